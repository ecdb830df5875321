"""Adding up attention over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32: a log-sum-exp in bf16 would be off by percents."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Fold attention over further keys into `out` `[n, H, Dv]` and `lse` `[n, H]`, in place.

    Rows of `lse` may be −inf (nothing seen so far), on either side.
    """
    weight = torch.sigmoid(new_lse - lse).nan_to_num_(0.0)  # nan: neither side has seen a key
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, new_lse.to(lse.dtype), out=lse)
