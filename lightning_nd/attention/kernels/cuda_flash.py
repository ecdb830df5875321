"""Torch's own variable-length flash attention for CUDA, in bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_nd.attention.kernels.varlen import bounds_of, pad_width
from lightning_nd.attention.plan import Kind, Rect


class CudaFlash:
    """`aten::_flash_attention_forward` and its backward: documents and windows in one call, grouped queries.

    `torch.nn.attention.activate_flash_attention_impl` exchanges the kernels underneath.
    """

    name = "cuda-flash"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> bool:
        """CUDA, half precision, head dim up to 256 in steps of 8, no soft-cap."""
        return (
            device.type == "cuda"
            and dtype in (torch.bfloat16, torch.float16)
            and softcap is None
            and head_dim <= 256
            and head_dim % 8 == 0
            and value_dim <= head_dim
        )

    def split(self, rect: Rect) -> Iterator[Rect]:
        """Nothing to split: documents are `cu_seqlens`, bands are window sizes."""
        yield rect

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        width = v.shape[-1]
        cu_q, cu_k, max_q, max_k, left, right = bounds_of(rect, q.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            pad_width(v, q.shape[-1]),
            cu_q,
            cu_k,
            max_q,
            max_k,
            0.0,
            rect.kind is Kind.CAUSAL,
            return_debug_mask=False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out[..., :width], lse.transpose(0, 1)

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
        width, full = v.shape[-1], q.shape[-1]
        cu_q, cu_k, max_q, max_k, left, right = bounds_of(rect, q.device)
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is off
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            pad_width(grad, full).contiguous(),
            q,
            k,
            pad_width(v, full),
            pad_width(out, full).contiguous(),
            lse.transpose(0, 1).contiguous(),  # the kernel reads a sliced log-sum-exp wrongly
            cu_q,
            cu_k,
            max_q,
            max_k,
            0.0,
            rect.kind is Kind.CAUSAL,
            unused,
            torch.empty(0, device=q.device),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv[..., :width]
