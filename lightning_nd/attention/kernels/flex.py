"""Torch's flex_attention: kernels that it generates for the mask at hand. Chosen by name only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from lightning_nd.attention.plan import Kind, Rect

_BLOCK = 128


class Flex:
    """`torch.nn.attention.flex_attention`: windows and soft-caps, values of any width, float32 too.

    Its backward pass takes the gradients of output and log-sum-exp of a rectangle alone, so that pass computes the
    rectangle's forward once more.
    """

    name = "flex"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> bool:
        """Everything on CUDA; on CPU torch has no backward pass for it."""
        return device.type == "cuda"

    def split(self, rect: Rect) -> Iterator[Rect]:
        """One call a document."""
        return rect.by_document()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        with torch.no_grad():
            return _attend(q, k, v, rect, scale, softcap)

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
        """See `Kernel.backward`.

        The final output is the sum of the rectangles' outputs o, each times w = exp(l − lse) of its own log-sum-exp
        l: the gradient of o is w · grad, that of l is w · (grad · o − grad · out).
        """
        with torch.enable_grad():
            leaves = q, k, v = tuple(x.detach().requires_grad_() for x in (q, k, v))
            own, own_lse = _attend(q, k, v, rect, scale, softcap)
            with torch.no_grad():
                weight = torch.exp(own_lse - lse)
                wide = grad.to(own_lse.dtype)
                to_lse = weight * (wide * (own.to(wide.dtype) - out.to(wide.dtype))).sum(-1)
                to_out = (weight.unsqueeze(-1) * wide).to(own.dtype)
            dq, dk, dv = torch.autograd.grad((own, own_lse), leaves, (to_out, to_lse))
        return dq, dk, dv


def _attend(q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    run: Any = _compiled() if q.device.type == "cuda" else flex.flex_attention
    out, aux = run(
        *heads,
        score_mod=None if softcap is None else _soft_cap(softcap),
        block_mask=_block_mask(rect, q.device),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=flex.AuxRequest(lse=True),
    )
    return out.squeeze(0).transpose(0, 1), aux.lse.squeeze(0).transpose(0, 1)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=True)
    return compiled


@lru_cache(maxsize=8)
def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)


def _block_mask(rect: Rect, device: torch.device) -> flex.BlockMask | None:
    """Blocks of keys that each block of queries sees, by arithmetic: no mask of every pair is ever made."""
    if rect.kind is Kind.FULL:
        return None
    n, m = rect.q1 - rect.q0, rect.k1 - rect.k0
    offset, window = (0, n) if rect.kind is Kind.CAUSAL else (rect.offset, rect.window)
    start = torch.arange(0, n, _BLOCK)
    first = (start + offset - window + 1).clamp(0, m - 1) // _BLOCK
    last = ((start + _BLOCK).clamp(max=n) - 1 + offset).clamp(0, m - 1) // _BLOCK
    blocks = -(-m // _BLOCK)
    indices = (first[:, None] + torch.arange(blocks)[None]).clamp(max=blocks - 1)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + offset - j
        return (distance >= 0) & (distance < window)

    return flex.BlockMask.from_kv_blocks(
        (last - first + 1).to(torch.int32)[None, None].to(device),
        indices.to(torch.int32)[None, None].to(device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(n, m),
    )
