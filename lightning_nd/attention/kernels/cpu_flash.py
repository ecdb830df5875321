"""Torch's flash attention for CPU, in float64, float32, bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nd.attention.plan import Kind, Rect

_BAND_ROWS = 512
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuFlash:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: grouped queries, log-sum-exp, additive float masks."""

    name = "cpu-flash"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> bool:
        """CPU, no soft-cap; values no wider than keys (they are padded to the same width)."""
        return device.type == "cpu" and dtype in _DTYPES and softcap is None and value_dim <= head_dim

    def split(self, rect: Rect) -> Iterator[Rect]:
        """One call a document; bands in tiles of rows, so that the mask stays tile × (window + tile)."""
        yield from _split(rect)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        width = v.shape[-1]
        q, k, v = _exact(width, q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads(q),
            _heads(k),
            _heads(_pad(v, q.shape[-1])),
            0.0,
            rect.kind is Kind.CAUSAL,
            attn_mask=_mask(rect, q.dtype),
            scale=scale,
        )
        return _rows(out)[..., :width], _rows(lse)

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
        grad, q, k, v, out = _exact(width, grad, q, k, v, out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(_pad(grad, full)),
            _heads(q),
            _heads(k),
            _heads(_pad(v, full)),
            _heads(_pad(out, full)),
            _heads(lse),
            0.0,
            rect.kind is Kind.CAUSAL,
            attn_mask=_mask(rect, q.dtype),
            scale=scale,
        )
        return _rows(dq), _rows(dk), _rows(dv)[..., :width]


def _exact(width: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """In half precision, values narrower than keys are computed in float32, as torch's own attention does it."""
    half, full = tensors[0].dtype in (torch.bfloat16, torch.float16), max(x.shape[-1] for x in tensors)
    return tuple(x.float() for x in tensors) if half and width < full else tensors


def _heads(x: Tensor) -> Tensor:
    """`[rows, heads, ...]` as `[1, heads, rows, ...]`, a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _rows(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


@lru_cache(maxsize=4096)
def _split(rect: Rect) -> tuple[Rect, ...]:
    if rect.kind is Kind.FULL:
        return (rect,)
    if rect.kind is Kind.CAUSAL:
        return tuple(rect.by_document())
    return tuple(_band_tiles(rect))


def _band_tiles(rect: Rect) -> Iterator[Rect]:
    """Tiles of rows with the keys that any of their rows sees; a tile that sees them all needs no mask."""
    for a in range(rect.q0, rect.q1, _BAND_ROWS):
        b = min(a + _BAND_ROWS, rect.q1)
        low, high = rect.offset + a - rect.q0, rect.offset + b - 1 - rect.q0
        k0, k1 = max(0, low - rect.window + 1), min(rect.k1 - rect.k0, high + 1)
        seen = k1 - 1 <= low and high - k0 < rect.window
        yield replace(
            rect,
            q0=a,
            q1=b,
            k0=rect.k0 + k0,
            k1=rect.k0 + k1,
            kind=Kind.FULL if seen else Kind.BAND,
            offset=0 if seen else low - k0,
            window=0 if seen else rect.window,
        )


def _mask(rect: Rect, dtype: torch.dtype) -> Tensor | None:
    if rect.kind is not Kind.BAND:
        return None
    mask = _band(rect.q1 - rect.q0, rect.k1 - rect.k0, rect.offset, rect.window, dtype)
    return mask.view(dtype)


# All tiles inside a band share one mask. Made without torch's dispatcher: what selective checkpointing sees of a
# forward must not depend on what was cached before it.
@lru_cache(maxsize=8)
def _band(rows: int, keys: int, offset: int, window: int, dtype: torch.dtype) -> Tensor:
    distance = np.arange(rows, dtype=np.int32)[:, None] + offset - np.arange(keys, dtype=np.int32)[None]
    hidden = (distance < 0) | (distance >= window)
    if dtype == torch.bfloat16:  # numpy has none: the bits of -inf and 0
        return torch.from_numpy(np.where(hidden, np.uint16(0xFF80), np.uint16(0)).view(np.int16))
    mask = np.zeros(hidden.shape, dtype=str(dtype).removeprefix("torch."))
    mask[hidden] = -np.inf
    return torch.from_numpy(mask)
