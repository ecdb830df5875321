"""Attention over keys and values that lie on several ranks, as one autograd function.

Each rank keeps its queries, output and log-sum-exp; key/value rows come to it one block at a time while it computes
on the block before (ring attention, Liu et al., arXiv:2310.01889; merging as in FlashAttention-2). Everything here
is token-major, `[tokens, heads, head_dim]`, with all rows of the micro-batch on one axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_nd.attention.keep import kept
from lightning_nd.attention.kernels import Kernel
from lightning_nd.attention.merge import accumulation_dtype, merge
from lightning_nd.attention.plan import Plan, Rect, Step, count_rows
from lightning_nd.attention.transport import Exchange, Traffic, Transfer, add_rows, take


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
        result, lse = kept(lambda: _forward(q, k, v, sinks, call))
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
        steps = call.plan.backward
        returns = _Returns(call, steps, k, v)
        for s, k_block, v_block in _blocks(call, steps, k, v):
            dk, dv = returns.block(s)
            for part, rows, keys in _parts(call, steps, s):
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


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's queries."""
    acc = accumulation_dtype(q.dtype)
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=acc, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=acc, device=q.device)
    steps = call.plan.forward
    for s, k_block, v_block in _blocks(call, steps, k, v):
        for part, rows, keys in _parts(call, steps, s):
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
    return out.to(q.dtype), lse


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
    """Run `call` on token-major `q [T, H, D]`, `k [T, Hkv, D]`, `v [T, Hkv, Dv]`; the output is `[T, H, Dv]`.

    The gradient of `sinks` `[H]` is that of this rank's queries only; whoever reduces the gradients of parameters
    over the group (FSDP2 does) makes it whole.
    """
    with torch.autocast(q.device.type, enabled=False):
        result: Tensor = _Attention.apply(q, k.contiguous(), v.contiguous(), sinks, call)
    return result


def _parts(call: Call, steps: Sequence[Step], s: int) -> Iterator[tuple[Rect, slice, slice]]:
    """The kernel calls of a step with their query and key rows."""
    rects = steps[s].rects
    if rects:
        call.traffic.note("compute", s)
    for rect in rects:
        for part in call.kernel.split(rect):
            yield part, slice(part.q0, part.q1), slice(part.k0, part.k1)


def _blocks(call: Call, steps: Sequence[Step], k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every step's key/value rows; the next step's transfer is posted before a step is handed out.

    At most two received blocks exist at a time, in two buffers that the steps use in turn.
    """
    most = _most_rows(steps)
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
            pending = _post(call, steps, s + 1, k, v, block, buffers, most)
        yield s, block[0], block[1]


def _post(
    call: Call,
    steps: Sequence[Step],
    s: int,
    k: Tensor,
    v: Tensor,
    block: list[Tensor],
    buffers: list[tuple[Tensor, Tensor] | None],
    most: int,
) -> Transfer | None:
    """Start the transfer of step s: own rows to its target, or in a ring what is at hand to the neighbour."""
    step, rank, cp = steps[s], call.plan.rank, call.plan.cp
    if not step.fetch and not step.give:
        return None
    assert call.exchange is not None
    call.traffic.note("post", s)
    buffer = buffers[s % 2]
    if step.fetch and buffer is None:
        buffer = buffers[s % 2] = (k.new_empty(most, *k.shape[1:]), v.new_empty(most, *v.shape[1:]))
    receive = [x[: count_rows(step.fetch)] for x in buffer] if buffer is not None else [k[:0], v[:0]]
    send = block if call.ring and step.hop > 1 else [take(k, step.give), take(v, step.give)]
    if call.ring:
        return call.exchange.post(send, (rank + 1) % cp, receive, (rank - 1) % cp)
    return call.exchange.post(send, step.target, receive, step.source)


def _most_rows(steps: Sequence[Step]) -> int:
    """The most rows that a step brings or takes."""
    return max(max(count_rows(step.fetch), count_rows(step.give)) for step in steps)


def _room(k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Room for the gradients of `rows` key and value rows."""
    acc = accumulation_dtype(k.dtype)
    return k.new_empty(rows, *k.shape[1:], dtype=acc), v.new_empty(rows, *v.shape[1:], dtype=acc)


class _Returns:
    """Gradients on their way to the owner of their rows, who adds them to its own.

    Direct: a step's gradients go straight back. Ring: they travel on with their rows, each rank adds its share, and
    the last one sends the sum to the owner. Two outgoing pieces (one being computed, one leaving) and one arriving
    exist at a time.
    """

    def __init__(self, call: Call, steps: Sequence[Step], k: Tensor, v: Tensor) -> None:
        self._call, self._steps, self._k, self._v = call, steps, k, v
        self._home = self._current = _room(k, v, len(k))
        for gradient in self._home:
            gradient.zero_()
        self._out: list[tuple[Tensor, Tensor] | None] = [None, None]
        self._in: tuple[Tensor, Tensor] | None = None
        self._pending: tuple[Transfer, int] | None = None

    def block(self, s: int) -> tuple[Tensor, Tensor]:
        """Where step s adds its key and value gradients."""
        if self._pending is not None and s - self._pending[1] > 1:
            # The step between has sent nothing, so nobody has waited for this transfer, and it may still read the
            # buffer that is to be used now.
            self._pending[0].finish()
        if self._steps[s].hop:
            buffer = self._out[s % 2]
            rows = count_rows(self._steps[s].fetch)
            if buffer is None and rows:
                buffer = self._out[s % 2] = _room(self._k, self._v, _most_rows(self._steps))
            dk, dv = buffer or self._home
            self._current = dk[:rows].zero_(), dv[:rows].zero_()
        return self._current

    def send(self, s: int) -> None:
        """Send step s's gradients on their way and take in the ones that arrive at this rank."""
        step, plan = self._steps[s], self._call.plan
        if not step.hop or not (step.fetch or step.give):
            return
        assert self._call.exchange is not None
        self._land(self._current)
        to, source = step.source, step.target
        if self._call.ring and not self._last_hop(step):
            to, source = (plan.rank + 1) % plan.cp, (plan.rank - 1) % plan.cp
        rows = count_rows(step.give)
        if rows and self._in is None:
            self._in = _room(self._k, self._v, _most_rows(self._steps))
        receive = [x[:rows] for x in self._in] if self._in is not None else []
        self._call.traffic.note("grad post", s)
        self._pending = self._call.exchange.post(list(self._current), to, receive, source), s

    def _last_hop(self, step: Step) -> bool:
        return step.hop == self._call.plan.hops

    def _land(self, current: tuple[Tensor, Tensor]) -> None:
        """Add what has arrived: to own rows, or in a ring to the sum that is about to travel on."""
        if self._pending is None:
            return
        transfer, s = self._pending
        self._pending = None
        self._call.traffic.note("grad wait", s)
        step, received = self._steps[s], transfer.wait()
        if self._call.ring and not self._last_hop(step):
            for mine, came in zip(current, received, strict=True):
                mine += came
            return
        for home, came in zip(self._home, received, strict=False):
            add_rows(home, step.give, came)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The complete gradients of this rank's keys and values."""
        self._land(self._current)
        return self._home
