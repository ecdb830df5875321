"""Attention over keys and values that lie on several ranks, as one autograd function.

Each rank keeps its queries, output and log-sum-exp; key/value rows come to it one block at a time while it computes
on the block before (ring attention, Liu et al., arXiv:2310.01889; merging as in FlashAttention-2). Everything here
is token-major, `[tokens, heads, head_dim]`, with all rows of the micro-batch on one axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_nd.attention.kernels import Kernel
from lightning_nd.attention.layout import Interval
from lightning_nd.attention.merge import accumulation_dtype, merge
from lightning_nd.attention.plan import Plan, Rect
from lightning_nd.attention.transport import Exchange, Traffic, Transfer, add_rows, count, take


@dataclass(frozen=True)
class Call:
    """What one attention call needs besides tensors; it travels in the autograd context, so that a recomputed
    forward and the backward pass of another micro-batch's neighbour never see a plan that is not theirs.

    `exchange` is None when everything is local.
    """

    plan: Plan
    kernel: Kernel
    exchange: Exchange | None
    scale: float
    softcap: float | None
    ring: bool
    traffic: Traffic


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        acc = accumulation_dtype(q.dtype)
        out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=acc, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, dtype=acc, device=q.device)
        for s, k_block, v_block in _blocks(call, k, v):
            for part, rows, keys in _parts(call, s):
                new = call.kernel.forward(q[rows], k_block[keys], v_block[keys], part, call.scale, call.softcap)
                if part.first:
                    out[rows], lse[rows] = new
                else:
                    merge(out[rows], lse[rows], *new)
            del k_block, v_block  # its buffer is the next one to receive
        if sinks is not None:
            # A sink is one more key, without a value: it only enlarges the denominator.
            total = torch.logaddexp(lse, sinks.to(acc))
            out.mul_(torch.exp(lse - total).unsqueeze(-1))
            lse = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        ctx.call = call
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call: Call = ctx.call
        grad = grad.contiguous()
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        returns = _RingReturns(call, k, v) if call.ring else _DirectReturns(call, k, v)
        for s, k_block, v_block in _blocks(call, k, v):
            dk, dv = returns.buffers(s)
            for part, rows, keys in _parts(call, s):
                new = call.kernel.backward(
                    grad[rows],
                    q[rows],
                    k_block[keys],
                    v_block[keys],
                    out[rows],
                    lse[rows],
                    part,
                    call.scale,
                    call.softcap,
                )
                dq[rows] += new[0]
                dk[keys] += new[1]
                dv[keys] += new[2]
                del new  # before the next call makes its own
            del k_block, v_block
            returns.send(s)
        dk, dv = returns.finish()
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dsinks = -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(0).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
    """Run `call` on token-major `q [T, H, D]`, `k [T, Hkv, D]`, `v [T, Hkv, Dv]`; the output is `[T, H, Dv]`.

    The gradient of `sinks` `[H]` is that of this rank's queries only; whoever reduces the gradients of parameters
    over the group (FSDP2 does) makes it whole.
    """
    with torch.autocast(q.device.type, enabled=False):
        result: Tensor = _Attention.apply(q, k.contiguous(), v.contiguous(), sinks, call)
    return result


def _parts(call: Call, s: int) -> Iterator[tuple[Rect, slice, slice]]:
    """The kernel calls of a step with their query and key rows."""
    rects = call.plan.steps[s].rects
    if rects:
        call.traffic.note("compute", s)
    for rect in rects:
        for part in call.kernel.split(rect):
            yield part, slice(part.q0, part.q1), slice(part.k0, part.k1)


def _blocks(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every step's key/value rows; the next step's transfer is posted before a step is handed out.

    At most two received blocks exist at a time, in two buffers that the steps use in turn.
    """
    steps = call.plan.steps
    most = max((count(step.fetch) for step in steps), default=0)
    buffers: list[tuple[Tensor, Tensor] | None] = [None, None]
    pending: Transfer | None = None
    block = [k, v]
    for s in range(len(steps)):
        if pending is not None:
            call.traffic.note("wait", s)
            block = pending.wait()
            pending = None
        elif s:
            block = [k[:0], v[:0]]
        if s + 1 < len(steps):
            pending = _post(call, s + 1, k, v, block, buffers, most)
        yield s, block[0], block[1]


def _post(
    call: Call,
    s: int,
    k: Tensor,
    v: Tensor,
    block: list[Tensor],
    buffers: list[tuple[Tensor, Tensor] | None],
    most: int,
) -> Transfer | None:
    """Start the transfer of step s: own rows to its target, or in a ring the block at hand to the neighbour."""
    step, rank, cp = call.plan.steps[s], call.plan.rank, call.plan.cp
    if not step.fetch and not step.give:
        return None
    assert call.exchange is not None
    call.traffic.note("post", s)
    buffer = buffers[s % 2]
    if step.fetch and buffer is None:
        buffer = buffers[s % 2] = (k.new_empty(most, *k.shape[1:]), v.new_empty(most, *v.shape[1:]))
    receive = [x[: count(step.fetch)] for x in buffer] if buffer is not None else [k[:0], v[:0]]
    if call.ring:
        return call.exchange.post(block, (rank + 1) % cp, receive, (rank - 1) % cp)
    return call.exchange.post([take(k, step.give), take(v, step.give)], step.target, receive, step.source)


def _zeros(call: Call, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(k.dtype)
    return k.new_zeros(rows, *k.shape[1:], dtype=acc), v.new_zeros(rows, *v.shape[1:], dtype=acc)


class _DirectReturns:
    """Gradients of fetched rows go straight back to their owner, who adds them to its own.

    Two outgoing blocks (one being computed, one leaving) and one incoming block exist at a time.
    """

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        self._call, self._k, self._v = call, k, v
        self._home = _zeros(call, k, v, len(k))
        self._out: list[tuple[Tensor, Tensor]] = [self._home, self._home]
        self._in: tuple[Tensor, Tensor] | None = None
        self._pending: tuple[Transfer, int, tuple[Interval, ...]] | None = None
        self._current = self._home

    def buffers(self, s: int) -> tuple[Tensor, Tensor]:
        """Where step s adds its key and value gradients."""
        if s:
            steps = self._call.plan.steps
            rows = count(steps[s].fetch)
            if rows and self._out[s % 2] is self._home:
                self._out[s % 2] = _zeros(self._call, self._k, self._v, max(count(step.fetch) for step in steps))
            dk, dv = self._out[s % 2]
            self._current = dk[:rows].zero_(), dv[:rows].zero_() if rows else dv[:0]
        return self._current

    def send(self, s: int) -> None:
        """Send step s's gradients home and take in the ones that come back to this rank."""
        step = self._call.plan.steps[s]
        if s == 0 or not (step.fetch or step.give):
            return
        assert self._call.exchange is not None
        self._land()
        rows = count(step.give)
        if rows and self._in is None:
            self._in = _zeros(self._call, self._k, self._v, max(count(x.give) for x in self._call.plan.steps))
        receive = [x[:rows] for x in self._in] if self._in is not None else []
        self._call.traffic.note("grad post", s)
        self._pending = (
            self._call.exchange.post(list(self._current), step.source, receive, step.target),
            s,
            step.give,
        )

    def _land(self) -> None:
        if self._pending is None:
            return
        transfer, s, rows = self._pending
        self._pending = None
        self._call.traffic.note("grad wait", s)
        received = transfer.wait()
        for home, block in zip(self._home, received, strict=False):
            add_rows(home, rows, block)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The complete gradients of this rank's keys and values."""
        self._land()
        return self._home


class _RingReturns:
    """Gradients travel with their block from rank to rank, each adding its share, and end at the block's owner."""

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        self._call, self._k, self._v = call, k, v
        self._out: list[tuple[Tensor, Tensor] | None] = [None, None]
        self._in: tuple[Tensor, Tensor] | None = None
        self._pending: Transfer | None = None

    def buffers(self, s: int) -> tuple[Tensor, Tensor]:
        """Where step s adds its key and value gradients."""
        buffer = self._out[s % 2]
        if buffer is None:
            buffer = self._out[s % 2] = _zeros(self._call, self._k, self._v, len(self._k))
        elif s:
            buffer[0].zero_()
            buffer[1].zero_()
        return buffer

    def send(self, s: int) -> None:
        """Add what came along with block s and pass the sum on; after the last hop it goes to the owner."""
        plan = self._call.plan
        block = self._out[s % 2]
        assert block is not None
        self._land(s, block)
        if len(plan.steps) == 1:
            return
        assert self._call.exchange is not None
        if self._in is None:
            self._in = torch.empty_like(block[0]), torch.empty_like(block[1])
        last = s == len(plan.steps) - 1
        to, source = (plan.rank - s, plan.rank + s) if last else (plan.rank + 1, plan.rank - 1)
        self._call.traffic.note("grad post", s)
        self._pending = self._call.exchange.post(list(block), to % plan.cp, list(self._in), source % plan.cp)

    def _land(self, s: int, block: tuple[Tensor, Tensor]) -> None:
        if self._pending is None:
            return
        self._call.traffic.note("grad wait", s - 1)
        for mine, came in zip(block, self._pending.wait(), strict=True):
            mine += came
        self._pending = None

    def finish(self) -> tuple[Tensor, Tensor]:
        """The complete gradients of this rank's keys and values."""
        if self._pending is None:
            assert self._out[0] is not None
            return self._out[0]
        self._call.traffic.note("grad wait", len(self._call.plan.steps) - 1)
        dk, dv = self._pending.wait()
        return dk, dv
