"""Attention in plain matrix products over tiles: any device, any dtype, soft-cap, values of any width."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_nd.attention.merge import accumulation_dtype, merge
from lightning_nd.attention.plan import Kind, Rect

_ROWS = 256
_KEYS = 1024


class Tiled:
    """Online softmax over tiles of 256 queries × 1024 keys; never holds more than one tile of scores."""

    name = "tiled"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> bool:
        """Everything."""
        return True

    def split(self, rect: Rect) -> Iterator[Rect]:
        """One call a document."""
        return rect.by_document()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        acc = accumulation_dtype(q.dtype)
        out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=acc, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, dtype=acc, device=q.device)
        for rows, keys in _tiles(rect):
            scores, _ = _scores(q[rows], k[keys], rect, rows, keys, scale, softcap)
            top = scores.logsumexp(-1)
            # A row may see nothing in this tile: its weights are then exp(-inf - 0) = 0, not exp(-inf + inf).
            weights = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0).unsqueeze(-1))
            tile = _ungroup(weights @ _grouped(v[keys], acc), len(out[rows]))
            merge(out[rows], lse[rows], tile, _ungroup(top.unsqueeze(-1), len(tile))[..., 0])
        return out, lse

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
        acc, groups = accumulation_dtype(q.dtype), k.shape[1]
        delta = (grad.to(acc) * out.to(acc)).sum(-1, keepdim=True)
        dq = torch.zeros(q.shape, dtype=acc, device=q.device)
        dk = torch.zeros(k.shape, dtype=acc, device=q.device)
        dv = torch.zeros(v.shape, dtype=acc, device=q.device)
        for rows, keys in _tiles(rect):
            scores, slope = _scores(q[rows], k[keys], rect, rows, keys, scale, softcap)
            weights = torch.exp(scores - _group(lse[rows].to(acc).unsqueeze(-1), groups))
            g = _group(grad[rows].to(acc), groups)
            dv[keys] += (weights.mT @ g).transpose(0, 1)
            ds = weights * (g @ _grouped(v[keys], acc).mT - _group(delta[rows], groups))
            ds = (ds if slope is None else ds * slope) * scale
            dq[rows] += _ungroup(ds @ _grouped(k[keys], acc), rows.stop - rows.start)
            dk[keys] += (ds.mT @ _group(q[rows].to(acc), groups)).transpose(0, 1)
        return dq, dk, dv


def _tiles(rect: Rect) -> Iterator[tuple[slice, slice]]:
    """Tiles of a rectangle in which at least one query sees a key."""
    n, m = rect.q1 - rect.q0, rect.k1 - rect.k0
    for a in range(0, n, _ROWS):
        b = min(a + _ROWS, n)
        for c in range(0, m, _KEYS):
            d = min(c + _KEYS, m)
            if rect.kind is Kind.CAUSAL and c > b - 1:
                continue
            if rect.kind is Kind.BAND and (c > b - 1 + rect.offset or d - 1 <= a + rect.offset - rect.window):
                continue
            yield slice(a, b), slice(c, d)


def _scores(
    q: Tensor, k: Tensor, rect: Rect, rows: slice, keys: slice, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Masked scores `[Hkv, H/Hkv · rows, keys]` of a tile and the soft-cap's slope."""
    acc, groups = accumulation_dtype(q.dtype), k.shape[1]
    scores = _group(q.to(acc), groups) @ _grouped(k, acc).mT * scale
    slope = None
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = squashed * softcap, 1 - squashed.square()
    if rect.kind is not Kind.FULL:
        i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=q.device)[None]
        distance = i + rect.offset - j
        hidden = distance < 0
        if rect.kind is Kind.BAND:
            hidden = hidden | (distance >= rect.window)
        scores = scores.masked_fill(hidden.repeat(q.shape[1] // groups, 1), -math.inf)
    return scores, slope


def _grouped(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values `[m, Hkv, D]` as `[Hkv, m, D]`."""
    return x.to(dtype).transpose(0, 1)


def _group(x: Tensor, groups: int) -> Tensor:
    """`[n, H, D]` as `[Hkv, H/Hkv · n, D]`: the queries that share a key/value head, one after the other."""
    n, heads, width = x.shape
    return x.reshape(n, groups, heads // groups, width).permute(1, 2, 0, 3).reshape(groups, -1, width)


def _ungroup(x: Tensor, rows: int) -> Tensor:
    """The inverse of `_group`."""
    groups, stacked, width = x.shape
    return x.reshape(groups, stacked // rows, rows, width).permute(2, 0, 1, 3).reshape(rows, -1, width)
