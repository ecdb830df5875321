"""Cases of context-parallel attention and their dense reference, built from nothing but documents and windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nd.attention.context import AttentionContext, context_parallel_attention
from lightning_nd.attention.layout import Documents, choose_layout, move_rows

Row = tuple[int, ...]
"""Lengths of a row's segments in order: positive for a document, negative for padding."""


@dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...] = ((96,),)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    layout: str = "auto"
    method: str = "direct"
    kernel: str | None = None
    scale: float | None = None
    seed: int = 0

    @property
    def length(self) -> int:
        lengths = {sum(map(abs, row)) for row in self.rows}
        assert len(lengths) == 1, self.rows
        return lengths.pop()

    def documents(self) -> Documents:
        found = []
        for i, row in enumerate(self.rows):
            at = i * self.length
            for segment in row:
                if segment > 0:
                    found.append((at, at + segment))
                at += abs(segment)
        return tuple(found)


@dataclass
class Result:
    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    #: Of the reference: the sum of the sizes of what is added up in the gradient of each sink, where signs cancel.
    sink_terms: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        named = {"out": self.out, "dq": self.q, "dk": self.k, "dv": self.v}
        return named if self.sinks is None else named | {"dsinks": self.sinks}


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """q, k, v, sinks and the output's gradient, which is zero at padding as it is in training."""
    random = torch.Generator().manual_seed(case.seed)
    b, s, width = len(case.rows), case.length, case.value_dim or case.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random).to(dtype)

    q = draw(b, case.heads, s, case.head_dim)
    k = draw(b, case.kv_heads, s, case.head_dim)
    v = draw(b, case.kv_heads, s, width)
    grad = draw(b, case.heads, s, width)
    real = torch.zeros(b * s, dtype=torch.bool)
    for start, end in case.documents():
        real[start:end] = True
    grad *= real.view(b, 1, s, 1)
    return q, k, v, draw(case.heads) if case.sinks else None, grad


def mask_of(case: Case) -> Tensor:
    """Which keys each query sees, written out: bool `[b, s, s]`."""
    b, s = len(case.rows), case.length
    document = torch.full((b * s,), -1)
    for number, (start, end) in enumerate(case.documents()):
        document[start:end] = number
    document = document.view(b, s)
    i = torch.arange(s)
    distance = i[:, None] - i[None]
    seen = (distance >= 0) & (document[:, :, None] == document[:, None, :]) & (document >= 0)[:, :, None]
    return seen if case.window is None else seen & (distance < case.window)


def dense(case: Case, dtype: torch.dtype, compute: torch.dtype = torch.float64) -> Result:
    """One process, the whole S × S matrix in `compute` precision, on inputs drawn in `dtype`."""
    q, k, v, sinks, grad = inputs(case, dtype)
    q, k, v = (x.to(compute).requires_grad_() for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.to(compute).requires_grad_()
    s, seen = case.length, mask_of(case)
    group = case.heads // case.kv_heads
    scores = q @ k.repeat_interleave(group, 1).mT * (case.scale or case.head_dim**-0.5)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    padding = ~seen.any(-1)[:, None, :, None]
    scores = scores.masked_fill(~seen[:, None] & ~padding, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(q), -1, s, 1)], -1)
    weights = scores.softmax(-1).masked_fill(padding, 0.0)
    out = weights[..., :s] @ v.repeat_interleave(group, 1)
    out.backward(grad.to(compute))
    if sinks is None:
        return Result(out.detach(), q.grad, k.grad, v.grad, None)
    terms = weights[..., s] * (grad.to(compute) * out).sum(-1)
    return Result(out.detach(), q.grad, k.grad, v.grad, sinks.grad, terms.detach().abs().sum((0, 2)))


def context_of(case: Case, group: dist.ProcessGroup) -> AttentionContext:
    cp, rows = dist.get_world_size(group), len(case.rows)
    layout = choose_layout(
        case.length, case.documents(), cp, rows=rows, windows=((case.window, 1),), layout=case.layout
    ).layout
    documents = move_rows(case.documents(), case.length, layout.length)
    return AttentionContext(group, layout, documents, case.method, kernel=case.kernel, original_length=case.length)


def local(x: Tensor, context: AttentionContext) -> Tensor:
    """This rank's tokens of `[b, h, s, d]`, padded with zeros to what the layout needs."""
    b, h, s, d = x.shape
    padded = torch.cat([x, x.new_zeros(b, h, context.layout.length - s, d)], 2)
    flat = padded.transpose(1, 2).reshape(-1, h, d)
    return flat[context.local_indices()].view(b, -1, h, d).transpose(1, 2)


def sharded(case: Case, dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[Result, AttentionContext]:
    """The same through context parallelism; every tensor holds this rank's tokens, sinks the group's sum."""
    context = context_of(case, group)
    q, k, v, sinks, grad = inputs(case, dtype)
    lq, lk, lv = (local(x, context).requires_grad_() for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.requires_grad_()
    out = context_parallel_attention(
        lq, lk, lv, context, scale=case.scale, window=case.window, sinks=sinks, softcap=case.softcap
    )
    out.backward(local(grad, context))
    if sinks is not None:
        dist.all_reduce(sinks.grad, group=group)
    return Result(out.detach(), lq.grad, lk.grad, lv.grad, None if sinks is None else sinks.grad), context


def compare(got: Result, want: Result, context: AttentionContext) -> dict[str, float]:
    """Largest error of this rank's output and gradients, relative to the largest value of the reference.

    A gradient that is zero in exact arithmetic (of the queries, when each sees only itself) is compared as it is.
    """
    found = {}
    for (name, mine), reference in zip(got.named().items(), want.named().values(), strict=True):
        expected = reference if name == "dsinks" else local(reference, context)
        scale = (reference if name != "dsinks" or want.sink_terms is None else want.sink_terms).abs().max()
        scale = torch.where(scale > 1e-6, scale, 1.0)
        error = (mine.double() - expected.double()).abs().max() / scale if mine.numel() else torch.zeros(())
        found[name] = error.item()
    return found


def check(rank: int, world_size: int, cases: list[Case], dtype: torch.dtype, tolerance: float) -> list[str]:
    """Worker: what is wrong with each case, empty when all are right."""
    wrong = []
    for case in cases:
        got, context = sharded(case, dtype, torch.distributed.group.WORLD)
        worst = compare(got, dense(case, dtype), context)
        bad = {name: f"{value:.1e}" for name, value in worst.items() if not value <= tolerance}  # a NaN is bad too
        if bad:
            wrong.append(f"rank {rank} of {world_size}, {dtype}: {bad} in {case}")
    return wrong


def pack(length: int, seed: int, shortest: int = 1, longest: int = 40) -> Row:
    """Random document lengths that fill `length`."""
    random = np.random.default_rng(seed)
    left, row = length, []
    while left:
        size = min(left, int(random.integers(shortest, longest + 1)))
        row.append(size)
        left -= size
    return tuple(row)
