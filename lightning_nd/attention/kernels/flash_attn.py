"""The flash-attn package's kernels for packed sequences, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lightning_nd.attention.kernels.varlen import bounds_of, pad_width
from lightning_nd.attention.plan import Kind, Rect


class FlashAttn:
    """`flash_attn` (Dao-AILab, version 2): documents, windows and soft-caps in one call, grouped queries."""

    name = "flash-attn"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> bool:
        """CUDA, half precision, head dim up to 256 in steps of 8; the package is there."""
        return (
            device.type == "cuda"
            and dtype in (torch.bfloat16, torch.float16)
            and head_dim <= 256
            and head_dim % 8 == 0
            and value_dim <= head_dim
            and find_spec("flash_attn") is not None
        )

    def split(self, rect: Rect) -> Iterator[Rect]:
        """Nothing to split: documents are `cu_seqlens`, bands are window sizes."""
        yield rect

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        options = _options(rect, q.device, scale, softcap)
        out, lse, *_ = _flash_attn_varlen_forward(
            q.contiguous(), k.contiguous(), pad_width(v, q.shape[-1]).contiguous(), **options
        )
        return out[..., : v.shape[-1]], lse.transpose(0, 1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rect: Rect,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        width = q.shape[-1]
        q, k = q.contiguous(), k.contiguous()
        grad, v_wide, out = (pad_width(x, width).contiguous() for x in (grad, v, out))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v_wide)
        _flash_attn_varlen_backward(
            grad,
            q,
            k,
            v_wide,
            out,
            lse.transpose(0, 1).contiguous(),
            dq,
            dk,
            dv,
            **_options(rect, q.device, scale, softcap),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv[..., : v.shape[-1]]


def _options(rect: Rect, device: torch.device, scale: float, softcap: float | None) -> dict[str, Any]:
    """The keywords that forward and backward share; −1 is a window without end."""
    cu_q, cu_k, max_q, max_k, left, right = bounds_of(rect, device)
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": rect.kind is Kind.CAUSAL,
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
        "softcap": softcap or 0.0,
        "alibi_slopes": None,
    }
