"""What kernels for packed sequences ask for: sequence bounds and windows of a rectangle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nd.attention.plan import Kind, Rect


def pad_width(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last dim, up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def bounds_of(rect: Rect, device: torch.device) -> tuple[Tensor, Tensor, int, int, int | None, int | None]:
    """Sequence bounds of queries and keys, the longest of each, and the window to the left and right.

    The kernels align their diagonal with the last query and the last key: query i sees keys from
    i + (m − n) − left to i + (m − n) + right.
    """
    n, m = rect.q1 - rect.q0, rect.k1 - rect.k0
    if rect.kind is Kind.CAUSAL:
        cuts = rect.cuts or (0, n)
        longest = max(b - a for a, b in rect.pieces())
        bounds = torch.tensor(cuts, dtype=torch.int32, device=device)
        return bounds, bounds, longest, longest, None, None
    cu_q = torch.tensor((0, n), dtype=torch.int32, device=device)
    cu_k = torch.tensor((0, m), dtype=torch.int32, device=device)
    if rect.kind is Kind.FULL:
        return cu_q, cu_k, n, m, None, None
    return cu_q, cu_k, n, m, m - n - rect.offset + rect.window - 1, rect.offset - m + n
