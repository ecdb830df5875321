"""Torch's own variable-length flash attention for CUDA, in bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

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
        cu_q, cu_k, max_q, max_k, left, right = _bounds(rect, q.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            _pad(v, q.shape[-1]),
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
        cu_q, cu_k, max_q, max_k, left, right = _bounds(rect, q.device)
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that is off
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _pad(grad, full).contiguous(),
            q,
            k,
            _pad(v, full),
            _pad(out, full).contiguous(),
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


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _bounds(rect: Rect, device: torch.device) -> tuple[Tensor, Tensor, int, int, int | None, int | None]:
    """Sequence bounds of queries and keys, the longest of each, and the window to the left and right.

    The kernel aligns its diagonal with the last query and the last key: query i sees keys from
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
