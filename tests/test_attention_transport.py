"""What context-parallel attention sends, holds and keeps for backward."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from attention_cases import Case, compare, context_of, dense, inputs, local, pack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_nd.attention.context import context_parallel_attention
from lightning_nd.attention.transport import Exchange, Transfer


class LiveKeyValues(TorchDispatchMode):
    """Bytes of live storages that hold keys or values or their gradients: those with `heads` and `width` dims.

    A few rows of queries, with `others` heads, can look like them and are left out.
    """

    def __init__(self, heads: int, width: int, others: int) -> None:
        super().__init__()
        self.others = others
        self.dims, self.live, self.peak, self.largest = {heads, width}, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor) or x.untyped_storage()._cdata in given:
                continue
            storage = x.untyped_storage()
            self.largest = max(self.largest, storage.nbytes())
            key = storage._cdata
            if self.dims <= set(x.shape) and self.others not in x.shape and key not in self.live:
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key, None)
                self.peak = max(self.peak, sum(self.live.values()))
        return out


def _memory(rank, world_size, cases):
    return [_peaks(case) for case in cases]


def _peaks(case):
    context = context_of(case, dist.group.WORLD)
    q, k, v, _, grad = (None if x is None else local(x, context).contiguous() for x in _four(case))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    own = k.numel() * k.element_size() * 2
    with LiveKeyValues(case.kv_heads, case.head_dim, case.heads) as forward:
        out = context_parallel_attention(q, k, v, context, window=case.window)
    with LiveKeyValues(case.kv_heads, case.head_dim, case.heads) as backward:
        out.backward(grad)
    return forward.peak / own, backward.peak / own, max(forward.largest, backward.largest) / (q.numel() * 4)


def _four(case):
    q, k, v, sinks, grad = inputs(case, torch.float32)
    assert sinks is None
    return q, k, v, sinks, grad


@pytest.mark.parametrize("method", ["direct", "ring"])
def test_a_rank_holds_its_own_rows_and_two_blocks(pool, method):
    """A block is as many keys and values as a rank owns; nothing grows with their number over all ranks."""
    base = Case(heads=6, kv_heads=3, head_dim=40, method=method)
    for world_size in (2, 4, 8):
        length = 128 * world_size
        cases = [
            replace(base, rows=((length,),), layout="zigzag"),
            replace(base, rows=((length,),), layout="zigzag", window=length // 3),
            replace(base, rows=(pack(length, 0, 20, 150),), layout="chunks"),  # rows to send are scattered
        ]
        for rank in pool.run(_memory, world_size, cases):
            for forward, backward, largest in rank:
                # The own keys and values, laid out token by token, and two blocks.
                assert forward <= 1 + 2 + 0.01
                # The gradients of the own ones, and two blocks of everything that travels: keys, values, gradients.
                assert backward <= 1 + 2 + 0.01
                assert largest <= 1.01, "something grows with the whole sequence"


def _traffic(rank, world_size, case):
    context = context_of(case, dist.group.WORLD)
    q, k, v, _, grad = (None if x is None else local(x, context) for x in _four(case))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = context_parallel_attention(q, k, v, context, window=case.window)
    forward, received, first = context.traffic.overlapped(), context.traffic.received, len(context.traffic.events)
    _check_posted_ahead(context.traffic.events)
    out.backward(grad)
    _check_posted_ahead(context.traffic.events[first:])
    rows = context.plan(case.window, ring=case.method == "ring").fetched_rows
    return rows * case.kv_heads * case.head_dim * 2 * 4, received, forward, context.traffic


def _check_posted_ahead(events):
    """Every block's transfer is posted before the kernels of the block before it run."""
    at = {event: i for i, event in enumerate(events)}
    for step in (s for what, s in events if what == "post"):
        assert at["post", step] < at["wait", step]
        before = [i for (what, s), i in at.items() if what == "compute" and s == step - 1]
        assert all(at["post", step] < i < at["wait", step] for i in before), (step, events)


@pytest.mark.parametrize("method", ["direct", "ring"])
def test_bytes_are_those_of_the_plan_and_transfers_overlap(pool, method):
    case = Case(((1024,),), layout="zigzag", method=method)
    for planned, received, (hidden, total), traffic in pool.run(_traffic, 4, case):
        assert received == planned
        assert (hidden, total) == (3, 3), "a transfer was waited for before anything was computed"
        hidden, total = traffic.overlapped()
        assert hidden >= total - 1  # only the last gradient's way home has nothing to hide behind


def test_what_sees_nothing_sends_nothing(pool):
    short = Case(((64,) * 16,), layout="contiguous")
    for planned, received, (hidden, total), traffic in pool.run(_traffic, 4, short):
        assert (planned, received, hidden, total, traffic.messages, traffic.sent) == (0, 0, 0, 0, 0, 0)
    window = Case(((1024,),), layout="contiguous", window=33)
    for rank, (planned, received, _, traffic) in enumerate(pool.run(_traffic, 4, window)):
        assert received == planned == (32 * 2 * 32 * 2 * 4 if rank else 0)
        assert {s for _, s in traffic.events} <= {0, 1}


def _recompute(rank, world_size, cases):
    """Two checkpointed forwards with different documents, then both backwards: each must recompute with its own."""
    runs = []
    for case in cases:
        context = context_of(case, dist.group.WORLD)
        q, k, v, _, grad = (None if x is None else local(x, context) for x in _four(case))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = checkpoint(context_parallel_attention, q, k, v, context, window=case.window, use_reentrant=False)
        runs.append((case, context, q, k, v, grad, out))
    worst = 0.0
    for case, context, q, k, v, grad, out in runs:
        out.backward(grad)
        got = replace(dense(case, torch.float32), out=out.detach(), q=q.grad, k=k.grad, v=v.grad)
        worst = max(worst, *compare(got, dense(case, torch.float32), context).values())
    return worst


def test_recomputed_forwards_use_their_own_documents(pool):
    cases = [Case(((96,),), method="direct"), Case(((20, 50, 26),), window=9, method="ring", layout="chunks")]
    assert max(pool.run(_recompute, 2, cases)) <= 1e-5


def _wrong(rank, world_size):
    case = Case(((96,),))
    context = context_of(case, dist.group.WORLD)
    q, k, v, _, _ = (None if x is None else local(x, context) for x in _four(case))
    ulysses = replace(case, method="ulysses", heads=3, kv_heads=1)
    messages = []
    for call in (
        lambda: context_parallel_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], context),
        lambda: context_parallel_attention(q, k[..., :8], v, context),
        lambda: context_parallel_attention(q, k, v, context, window=0),
        lambda: context_parallel_attention(q, k, v, context, sinks=torch.zeros(3)),
        lambda: context_parallel_attention(q[:, :3], k, v, context),
        lambda: context_of(replace(case, method="star"), dist.group.WORLD),
        lambda: context_parallel_attention(q[:, :3], k[:, :1], v[:, :1], context_of(ulysses, dist.group.WORLD)),
        lambda: context_parallel_attention(q, k, v, context_of(replace(case, kernel="fast"), dist.group.WORLD)),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("nothing was refused")
    return messages


def test_refusals_say_what_to_change(pool):
    fragments = ("owns 48 tokens", "takes q [batch, H, s, D]", "window is 0", "4 heads", "not a multiple", "'star'")
    fragments += ("multiples of 2", "Unknown attention kernel 'fast'")
    for message, fragment in zip(pool.run(_wrong, 2)[0], fragments, strict=True):
        assert fragment in message


class Watched(Transfer):
    """Notes what is overwritten between its post and the moment at which it is known to have left."""

    def __init__(self, inner, send, received):
        super().__init__([], [], received)
        self.inner, self.sent, self.copies = inner, list(send), [x.clone() for x in send]

    def finish(self):
        self.inner.finish()
        sent, self.sent = self.sent, []
        assert all(map(torch.equal, sent, self.copies)), "overwritten while it was on its way"


class WatchedExchange(Exchange):
    def post(self, send, to, receive, source):
        return Watched(super().post(send, to, receive, source), send, receive)


def _watched(rank, world_size, cases):
    for case in cases:
        context = context_of(case, dist.group.WORLD)
        context.exchange = WatchedExchange(context.group)
        q, k, v, _, grad = (None if x is None else local(x, context) for x in _four(case))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        context_parallel_attention(q, k, v, context, window=case.window).backward(grad)


@pytest.mark.parametrize("cp", [4, 8])
def test_nothing_that_is_on_its_way_is_overwritten(pool, cp):
    """Also where steps send nothing between others that do."""
    rows = (((20, 31, -45),), ((3, 61, 2, 1, 29),), ((96,),), (pack(96, 2), pack(96, 3)))
    cases = [
        Case(row, window=window, layout=layout, method=method)
        for row in rows
        for window in (None, 7, 40)
        for layout, method in (("chunks", "direct"), ("zigzag", "direct"), ("chunks", "ring"))
    ]
    pool.run(_watched, cp, cases)
