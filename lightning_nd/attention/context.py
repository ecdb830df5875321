"""The context of one micro-batch: who owns which tokens, where documents lie, and how attention is computed."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_nd.attention.function import Call, attend
from lightning_nd.attention.kernels import choose_kernel
from lightning_nd.attention.layout import Documents, Layout, contiguous, work
from lightning_nd.attention.plan import Plan, build_plan, most_fetched
from lightning_nd.attention.transport import Exchange, Traffic
from lightning_nd.attention.ulysses import heads_divide, to_heads, to_tokens

METHODS = ("auto", "direct", "ring", "ulysses")


class AttentionContext:
    """What context-parallel attention needs to know of one micro-batch, the same on every rank of `group`.

    Args:
        group: the context-parallel process group; rank r of it owns `layout.intervals[r]`.
        layout: ownership of the tokens of all rows.
        documents: global bounds; tokens in none of them are padding.
        method: `"direct"`, `"ring"`, `"ulysses"`, or `"auto"`, which compares their cost for each kind of layer.
        inside_node: the group's ranks share one node (an all-to-all between nodes is slow).
        kernel: name of a local kernel, None to choose by device and dtype.
        original_length: tokens of a row before padding, None for `layout.length`.
        announced: the choices that have been logged; hand the same set to every micro-batch's context.

    Attributes:
        traffic: counters of bytes and events, filled by every call.
        calls: number of attention calls made with this context.

    Raises:
        ValueError: for an unknown method, or a layout made for another number of ranks.
    """

    # Not a dataclass: it rides in a batch, and Lightning takes dataclasses there apart to move their tensors.

    def __init__(
        self,
        group: ProcessGroup,
        layout: Layout,
        documents: Documents,
        method: str = "auto",
        *,
        inside_node: bool = True,
        kernel: str | None = None,
        original_length: int | None = None,
        announced: set[str] | None = None,
    ) -> None:
        if method not in METHODS:
            raise ValueError(
                f"Unknown context-parallel method {method!r}: choose one of {', '.join(map(repr, METHODS))}."
            )
        if dist.get_world_size(group) != layout.cp:
            raise ValueError(
                f"The layout is for {layout.cp} ranks, the process group has {dist.get_world_size(group)}: make the"
                " layout with the size of the group."
            )
        self.group = group
        self.layout = layout
        self.documents = documents
        self.method = method
        self.inside_node = inside_node
        self.kernel = kernel
        self.original_length = layout.length if original_length is None else original_length
        self.announced = announced if announced is not None else set()
        self.traffic = Traffic()
        self.exchange = Exchange(group, self.traffic)
        self.calls = 0
        self._plans: dict[tuple[int | None, bool], Plan] = {}

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def plan(self, window: int | None = None, *, ring: bool = False) -> Plan:
        """This rank's plan for layers with this window; the first call of a micro-batch makes it."""
        key = (window, ring)
        if key not in self._plans:
            self._plans[key] = build_plan(self.layout, self.documents, self.rank, window, ring=ring)
        return self._plans[key]

    def __deepcopy__(self, memo: dict[int, object]) -> AttentionContext:
        return self  # immutable, and a process group cannot be copied

    def local_indices(self) -> Tensor:
        """Global token indices of this rank's tokens, int64 `[rows * length / cp]`, row after row."""
        return torch.from_numpy(self.layout.indices(self.rank))


@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks, exact in value and gradients.

    Args:
        q: `[batch, H, s, D]`, this rank's tokens of every row, in the layout's order.
        k: `[batch, Hkv, s, D]`, H a multiple of Hkv; grouped heads are not repeated.
        v: `[batch, Hkv, s, Dv]`.
        context: layout, documents and method of the micro-batch, the same on every rank.
        scale: factor on the scores, `D ** -0.5` by default.
        window: a query sees this many latest keys of its document, itself included; None for all.
        sinks: `[H]` logits that join every softmax without a value (StreamingLLM, arXiv:2309.17453; gpt-oss). Their
            gradient is this rank's share: sum it over the group, as FSDP2 does for parameters.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118, section 2).

    Returns:
        `[batch, H, s, Dv]` in the dtype of q; rows of padding are zero.

    Raises:
        ValueError: if shapes do not fit each other, the layout, or the method.
    """
    _check(q, k, v, context, window, sinks)
    context.calls += 1
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    batch, heads, length, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    method = context.method
    if method == "auto":
        method = choose_method(context, heads, k.shape[1], head_dim, v.shape[-1], window, q.device.type)
    flat = [x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]) for x in (q, k, v)]
    kernel = choose_kernel(q.device, q.dtype, head_dim, v.shape[-1], softcap, context.kernel)
    if method == "ulysses":
        out = _ulysses(
            context,
            flat,
            sinks,
            window,
            Call(
                _whole(context.layout, context.documents, window),
                kernel,
                None,
                scale,
                softcap,
                False,
                context.traffic,
            ),
        )
    else:
        ring = method == "ring"
        call = Call(context.plan(window, ring=ring), kernel, context.exchange, scale, softcap, ring, context.traffic)
        out = attend(flat[0], flat[1], flat[2], sinks, call)
    return out.view(batch, length, heads, v.shape[-1]).transpose(1, 2)


def _ulysses(
    context: AttentionContext, flat: list[Tensor], sinks: Tensor | None, window: int | None, call: Call
) -> Tensor:
    cp, rest = context.layout.cp, (context.group, context.layout, context.traffic)
    heads, kv_heads = flat[0].shape[1], flat[1].shape[1]
    if not heads_divide(heads, kv_heads, cp):
        raise ValueError(
            f"cp_method='ulysses' deals heads to the {cp} ranks: {heads} query and {kv_heads} key/value heads (after "
            f"tensor parallelism) must both be multiples of {cp}. Use 'direct' or 'auto'."
        )
    if sinks is not None:
        share = heads // cp
        sinks = sinks[context.rank * share : (context.rank + 1) * share]
    q, k, v = (to_heads(x, *rest) for x in flat)
    return to_tokens(attend(q, k, v, sinks, call), *rest)


@lru_cache(maxsize=64)
def _whole(layout: Layout, documents: Documents, window: int | None) -> Plan:
    """The plan of a single rank that owns everything."""
    return build_plan(contiguous(layout.length, 1).with_rows(layout.rows), documents, 0, window)


def _check(
    q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, window: int | None, sinks: Tensor | None
) -> None:
    layout = context.layout
    if q.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or k.shape[2] != q.shape[2]:
        raise ValueError(
            "context_parallel_attention takes q [batch, H, s, D], k [batch, Hkv, s, D] and v [batch, Hkv, s, Dv]; got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads.")
    if (q.shape[0], q.shape[2]) != (layout.rows, layout.length // layout.cp):
        raise ValueError(
            f"This rank owns {layout.length // layout.cp} tokens of each of {layout.rows} rows, but q has batch "
            f"{q.shape[0]} and {q.shape[2]} tokens: pass the tensors of the batch that the context was made for."
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: a query sees at least itself, so it must be 1 or more, or None.")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must have one logit for each of the {q.shape[1]} heads, got {list(sinks.shape)}.")


# Rates that turn work and bytes into seconds, for comparing methods only: sustained FLOP/s of an attention kernel and
# bytes/s of a link inside a node.
_RATES = {"cuda": (400e12, 300e9), "cpu": (50e9, 2e9)}


@lru_cache(maxsize=256)
def _method_times(
    layout: Layout,
    documents: Documents,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    device: str,
) -> tuple[float, float]:
    """Estimated seconds of one layer, forward and backward, with direct transfers and with Ulysses."""
    flops, link = _RATES.get(device, _RATES["cuda"])
    load = work(layout, documents, window)
    pair = 7 * heads * (head_dim + value_dim)  # 2 products forward and 5 backward, of 2 FLOP each
    widths = kv_heads * (head_dim + value_dim)
    fetched = most_fetched(layout, documents, window)
    # Rows travel in half precision forward and backward, their gradients in fp32; all of it overlaps compute but
    # the last return.
    moved = fetched * widths * (2 + 2 + 4) / link
    compute = float(load.max()) * pair / flops
    last = moved / 2 / max(1, layout.cp - 1)
    direct = max(compute, moved) + (last if fetched else 0.0)
    share = layout.local_tokens * (layout.cp - 1) / layout.cp
    ulysses = float(load.mean()) * pair / flops + share * (widths + heads * (head_dim + value_dim)) * 2 * 2 / link
    return direct, ulysses


def choose_method(
    context: AttentionContext,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    device: str,
) -> str:
    """`"direct"` or `"ulysses"`, whichever is estimated to take less time for this batch; logged once a reason."""
    if not heads_divide(heads, kv_heads, context.layout.cp):
        why = f"{heads} query and {kv_heads} key/value heads do not divide by cp={context.layout.cp}"
        return _say(context, "direct", why)
    if not context.inside_node:
        return _say(context, "direct", "the group spans nodes, where all-to-all is slow")
    direct, ulysses = _method_times(
        context.layout, context.documents, heads, kv_heads, head_dim, value_dim, window, device
    )
    best = "direct" if direct <= ulysses else "ulysses"
    return _say(
        context, best, f"estimated {1e3 * direct:.3g} ms a layer for direct, {1e3 * ulysses:.3g} ms for ulysses"
    )


def _say(context: AttentionContext, method: str, why: str) -> str:
    announce(context.announced, f"cp_method='auto' picks {method!r}", why)
    return method


def announce(announced: set[str], choice: str, why: str) -> None:
    """Log a choice and its reason on rank 0, once for each that is not yet in `announced`."""
    if choice not in announced:
        announced.add(choice)
        rank_zero_info(f"NDStrategy: {choice}: {why}.")
