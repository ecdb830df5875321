"""Context parallelism of a model and of its batches: every cp rank keeps some tokens of every row."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from lightning_nd.attention.context import METHODS, AttentionContext, announce
from lightning_nd.attention.interface import CONTEXT_KEY, NAME, check_model, register, windows_of
from lightning_nd.attention.kernels import NAMES
from lightning_nd.attention.layout import LAYOUTS, Documents, choose_layout, move_rows
from lightning_nd.attention.sdpa import SDPARouter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORE = -100
_BOUNDS = ("cu_seq_lens", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_GONE = (*_BOUNDS, "max_length_q", "max_length_k", "seq_idx")  # say what holds for the whole batch only
_FILL = {"labels": IGNORE, "shift_labels": IGNORE}


# The contexts of the batch that was moved to its device last, which is the one that a step works on; None without cp.
_running: ContextVar[tuple[weakref.ref[AttentionContext], ...] | None] = ContextVar("running", default=None)


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """How one strategy runs context parallelism; it makes the context of every micro-batch.

    Args:
        group: the cp process group.
        method: `"auto"`, `"direct"`, `"ring"` or `"ulysses"`.
        layout: `"auto"`, `"zigzag"`, `"chunks"` or `"contiguous"`.
        multiple: each rank's share of a row is padded to a multiple of this (tp, with sequence parallelism).
        inside_node: the group's ranks share one node.
        kernel: a name of `lightning_nd.attention.kernels.NAMES`, None to choose by device and dtype.
        sdpa: send the `F.scaled_dot_product_attention` calls of models that are not transformers' over the ranks.

    Raises:
        ValueError: for an unknown method, layout or kernel.
    """

    group: ProcessGroup
    method: str = "auto"
    layout: str = "auto"
    multiple: int = 1
    inside_node: bool = True
    kernel: str | None = None
    sdpa: bool = False
    windows: set[tuple[int | None, int]] = field(default_factory=set)
    announced: set[str] = field(default_factory=set, repr=False)
    _contexts: WeakIdKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False)
    _positions: WeakIdKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        check_options(self.method, self.layout, self.kernel or "auto")

    def shard(self, batch: Any) -> Any:
        """This cp rank's part of a batch; see `shard_batch`. Lists, tuples and mappings of batches are searched.

        Raises:
            ValueError: if no `input_ids` or `inputs_embeds` are in it.
        """
        sharded, found = self._shard(batch)
        if not found:
            keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
            raise ValueError(
                f"NDStrategy: cp > 1 shards batches that are mappings with `input_ids` [batch, sequence]; got a"
                f" {type(batch).__name__}{keys}. Return such a mapping from the dataset, or use cp=1."
            )
        return sharded

    def _shard(self, batch: Any) -> tuple[Any, bool]:
        if isinstance(batch, Mapping):
            if _tokens(batch) is not None:
                return shard_batch(batch, self), True
            parts = {key: self._shard(value) for key, value in batch.items()}
            return {key: part for key, (part, _) in parts.items()}, any(found for _, found in parts.values())
        if isinstance(batch, list | tuple):
            pairs = [self._shard(value) for value in batch]
            made = [part for part, _ in pairs]
            plain = tuple(made) if type(batch) is tuple else made
            whole = type(batch)(*made) if hasattr(batch, "_fields") else plain
            return whole, any(found for _, found in pairs)
        return batch, False

    def remember(self, batch: Any) -> None:
        """Note, once a batch is on its device, which contexts its tokens belong to."""
        _running.set(tuple(weakref.ref(context) for context in self._remember(batch)))

    def _remember(self, batch: Any) -> Iterator[AttentionContext]:
        if isinstance(batch, Mapping):
            if CONTEXT_KEY not in batch:
                for value in batch.values():
                    yield from self._remember(value)
            elif (tokens := _tokens(batch)) is not None:
                context = batch[CONTEXT_KEY]
                self._contexts[tokens] = self._positions[batch["position_ids"]] = context
                yield context
        elif isinstance(batch, list | tuple):
            for value in batch:
                yield from self._remember(value)

    def check_used(self, *, loss_is_ours: bool) -> None:
        """Refuse to train on a batch whose tokens never attended to those of other ranks; warn of an unknown loss.

        Args:
            loss_is_ours: the loss about to be differentiated comes from the strategy's token loss.

        Raises:
            RuntimeError: if no attention call used the context of a batch.
        """
        if not loss_is_ours and self._contexts and "loss" not in self.announced:
            self.announced.add("loss")
            rank_zero_warn(
                "NDStrategy: this loss is not the strategy's. Under cp > 1 each rank holds some tokens of every row: a"
                " loss from logits needs batch['shift_labels'], not labels that it shifts itself, and the mean over the"
                " tokens of all ranks. Return self.model(**batch).loss, or use lightning_nd.loss.causal_lm_loss."
            )
        unused = [context for context in self._contexts.values() if not context.calls]
        if unused:
            raise RuntimeError(
                "NDStrategy: the model never called context-parallel attention, so under cp > 1 each rank attended"
                " to its own tokens only. Call lightning_nd.context_parallel_attention(q, k, v,"
                f" batch[{CONTEXT_KEY!r}]) in its layers, set cp_sdpa=True if they call"
                " F.scaled_dot_product_attention, or use cp=1."
            )

    def context_of(self, tokens: Any) -> AttentionContext | None:
        """The context of tokens that came out of `shard`, found by the tensor itself."""
        return self._contexts.get(tokens) if isinstance(tokens, Tensor) else None

    def positions_of(self, positions: Any) -> AttentionContext | None:
        """The context of position ids that came out of `shard`, found by the tensor itself."""
        return self._positions.get(positions) if isinstance(positions, Tensor) else None


def check_options(method: str, layout: str, kernel: str) -> None:
    """Refuse unknown choices before anything starts.

    Raises:
        ValueError: with the choices.
    """
    choices = (("cp_method", method, METHODS), ("cp_layout", layout, LAYOUTS), ("cp_kernel", kernel, ("auto", *NAMES)))
    for name, given, allowed in choices:
        if given not in allowed:
            raise ValueError(f"NDStrategy: {name}={given!r}: choose one of {', '.join(map(repr, allowed))}.")


def check_context_parallel(model: nn.Module) -> None:
    """Refuse a transformers model whose attention cannot be split over a sequence.

    Raises:
        ValueError: see `lightning_nd.attention.interface.check_model`.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        check_model(model)


def apply_context_parallel(model: nn.Module, cp: ContextParallel) -> None:
    """Let a transformers model attend over all ranks' tokens; another model calls `context_parallel_attention` itself.

    Raises:
        ValueError: if the model cannot; see `lightning_nd.attention.interface.check_model`.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        cp.windows.add((None, 1))
        if cp.sdpa:
            _route_sdpa(model, cp)
        return
    again = hasattr(model, "_lightning_nd_context")
    model._lightning_nd_context = cp  # type: ignore[assignment]
    cp.windows.update(windows_of(model.config))
    if again:  # a second fit: the model has the hook, the strategy may be another
        return
    check_model(model)
    register()
    _own_config(model)
    model.set_attn_implementation(NAME)

    def give_context(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get(CONTEXT_KEY) is None:
            tokens = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
            holder = module._lightning_nd_context
            assert isinstance(holder, ContextParallel)
            context = holder.context_of(tokens)
            if context is None:
                raise RuntimeError(
                    f"NDStrategy: {type(module).__name__} was called with tokens that are not a batch of the"
                    f" strategy's, so under cp > 1 nobody knows their places. Pass {CONTEXT_KEY}=batch[{CONTEXT_KEY!r}]"
                    " along with tensors derived from a batch; generation needs cp=1."
                )
            kwargs[CONTEXT_KEY] = context
        for name in ("input_ids", "inputs_embeds"):
            _check_fits(module, kwargs.get(name), kwargs[CONTEXT_KEY])
        if kwargs.get("position_ids") is None:
            raise RuntimeError(
                f"NDStrategy: {type(module).__name__} was called without position_ids; under cp > 1 it would count its"
                " positions from 0 on every rank. Pass batch['position_ids']."
            )
        kwargs["use_cache"] = False
        return args, kwargs

    model.register_forward_pre_hook(give_context, with_kwargs=True)


def _own_config(model: PreTrainedModel) -> None:
    """Give a model a copy of its config: another model may have been made from the same object."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in copies:
            module.config = copies[id(config)]


def _route_sdpa(model: nn.Module, cp: ContextParallel) -> None:
    """Let the causal attention calls inside a hand-written model's forward reach all ranks' tokens."""
    again = hasattr(model, "_lightning_nd_sdpa")
    model._lightning_nd_context = cp  # type: ignore[assignment]
    if again:
        return
    router = SDPARouter()
    model._lightning_nd_sdpa = router  # type: ignore[assignment]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        holder = module._lightning_nd_context
        assert isinstance(holder, ContextParallel)
        given = [*args, *kwargs.values()]
        context = next((found for x in given if (found := holder.positions_of(x)) is not None), None)
        if context is None:
            raise RuntimeError(
                f"NDStrategy: {type(module).__name__} was called without the batch's position_ids. With cp_sdpa=True"
                " they tell its attention where its tokens are, and the model must use them: counting positions from 0"
                " would be wrong on every rank. Pass batch['position_ids'] as it is."
            )
        router.enter(context)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(lambda *_: router.leave(), always_call=True)


def _check_fits(module: nn.Module, tokens: Any, context: AttentionContext) -> None:
    layout = context.layout
    want = (layout.rows, layout.length // layout.cp)
    if isinstance(tokens, Tensor) and tuple(tokens.shape[:2]) != want:
        raise RuntimeError(
            f"NDStrategy: {type(module).__name__} got tokens of shape {list(tokens.shape[:2])}, but this rank holds"
            f" {list(want)} of the batch. Pass them as they are in the batch."
        )


# -- one batch --------------------------------------------------------------------------------------------------------


def shard_batch(batch: Mapping[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """This cp rank's tokens of every row of a batch, as a new dictionary; the given one is left as it is.

    Labels are shifted over the whole row first and come out as `shift_labels` (and `labels`, for models that look
    whether there are any). `position_ids` are made if there are none. Documents are what `cu_seq_lens`, or
    `position_ids` that restart, say; tokens that `attention_mask` hides are padding. Every tensor whose first
    dims are those of `input_ids` is sharded along; other values are passed on. `cp_context` is added.

    Raises:
        ValueError: for masks, positions or bounds that cannot be sharded.
    """
    tokens = _tokens(batch)
    assert tokens is not None
    rows, length = tokens.shape[:2]
    full = {key: value for key, value in batch.items() if key not in _GONE}
    full["position_ids"] = _positions(batch, rows, length, tokens.device)
    documents = documents_of(batch, rows, length)
    if full.get("labels") is not None and full.get("shift_labels") is None:
        labels = full["labels"]
        full["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    _check_supervision(full)
    windows = tuple(sorted(cp.windows or {(None, 1)}, key=str))
    choice = choose_layout(
        length,
        documents,
        dist.get_world_size(cp.group),
        rows=rows,
        windows=windows,
        layout=cp.layout,
        multiple=cp.multiple,
    )
    layout = choice.layout
    if cp.layout == "auto":
        announce(cp.announced, f"cp_layout='auto' picks {layout.name!r}", choice.reason)
    context = AttentionContext(
        cp.group,
        layout,
        move_rows(documents, length, layout.length),
        cp.method,
        inside_node=cp.inside_node,
        kernel=cp.kernel,
        original_length=length,
        announced=cp.announced,
    )
    columns = torch.from_numpy(layout.columns(context.rank)).to(tokens.device)
    sharded = {
        key: _take(value, columns, length, _FILL.get(key, 0)) if _per_token(value, rows, length) else value
        for key, value in full.items()
    }
    sharded[CONTEXT_KEY] = context
    return sharded


def _check_supervision(batch: Mapping[str, Any]) -> None:
    """Padding attends to nothing under cp, so nothing can be learnt from it.

    Raises:
        ValueError: for a target at a token that `attention_mask` hides.
    """
    targets, mask = batch.get("shift_labels"), batch.get("attention_mask")
    if not isinstance(targets, Tensor) or not isinstance(mask, Tensor) or targets.shape != mask.shape:
        return
    wrong = ((targets != IGNORE) & (mask == 0)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"NDStrategy: {len(wrong)} tokens that attention_mask hides are supervised (the first: row {row}, token"
            f" {column}, target {int(targets[row, column])}). Set labels to -100 where attention_mask is 0."
        )


def documents_of(batch: Mapping[str, Any], rows: int, length: int) -> Documents:
    """Global bounds of the documents of a batch, without padding.

    Raises:
        ValueError: for bounds or masks that are not what they should be.
    """
    starts = np.zeros((rows, length), dtype=bool)
    starts[:, 0] = True
    bounds = next((batch[name] for name in _BOUNDS if batch.get(name) is not None), None)
    positions = batch.get("position_ids")
    if bounds is not None:
        flat = np.asarray(torch.as_tensor(bounds).cpu()).reshape(-1)
        if flat[0] != 0 or flat[-1] != rows * length or (np.diff(flat) < 0).any():
            raise ValueError(
                f"NDStrategy: cu_seq_lens must ascend from 0 to the {rows * length} tokens of the batch, got"
                f" {flat.tolist()[:6]}… to {flat[-1]}."
            )
        starts.reshape(-1)[flat[:-1][np.diff(flat) > 0]] = True
    elif positions is not None:
        where = _positions(batch, rows, length, torch.device("cpu")).cpu().numpy()
        starts[:, 1:] = np.diff(where, axis=1) != 1
    mask = batch.get("attention_mask")
    if mask is None:
        cuts = [*np.flatnonzero(starts).tolist(), rows * length]
        return tuple(pairwise(cuts))
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, length):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"NDStrategy: under cp > 1 attention_mask is [batch, sequence] = {[rows, length]}, 1 for tokens and 0"
            f" for padding; got {shape}. Masks of pairs of tokens cannot be sharded."
        )
    real = mask.cpu().numpy() != 0
    starts[:, 1:] |= real[:, 1:] & ~real[:, :-1]
    ends = np.ones((rows, length), dtype=bool)
    ends[:, :-1] = starts[:, 1:] | ~real[:, 1:]
    first, last = np.flatnonzero(starts & real), np.flatnonzero(ends & real)
    return tuple(zip(first.tolist(), (last + 1).tolist(), strict=True))


def gather_sequence(tensor: Tensor, batch: AttentionContext | Mapping[str, Any] | None = None) -> Tensor:
    """Put a per-token tensor of this rank's tokens back in global order, without the padding of the layout.

    Args:
        tensor: `[batch, s, ...]`, with the rows and tokens of `input_ids` on this rank. No gradient flows.
        batch: the batch that the tokens came in, or its `cp_context`; left out, the batch of the step that is running.
            Without cp `tensor` is returned.

    Returns:
        `[batch, sequence, ...]`, equal on all cp ranks.

    Raises:
        ValueError: if the tensor does not have this rank's tokens of the batch, or if it is unknown which is meant.
    """
    context = batch.get(CONTEXT_KEY) if isinstance(batch, Mapping) else batch
    if batch is None:
        context = _running_context()
    if context is None:
        return tensor
    want = [context.layout.rows, context.layout.length // context.layout.cp]
    if list(tensor.shape[:2]) != want:
        raise ValueError(
            f"gather_sequence: this rank holds {want} [rows, tokens] of the batch, the tensor is {list(tensor.shape)}:"
            " give a tensor with one entry for each token in its first two dims, and the batch that it came in."
        )
    layout = context.layout
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(layout.cp)]
    dist.all_gather(parts, mine, group=context.group)
    joined = torch.cat(parts, dim=1)
    order = np.empty(layout.length, dtype=np.int64)
    order[np.concatenate([layout.columns(rank) for rank in range(layout.cp)])] = np.arange(layout.length)
    return joined[:, torch.from_numpy(order[: context.original_length]).to(tensor.device)]


def _running_context() -> AttentionContext | None:
    running = _running.get()
    if running is None:
        return None
    alive = [context for reference in running if (context := reference()) is not None]
    if len(alive) != 1:
        what = "the batch of the last step is gone" if not alive else f"the step's batch holds {len(alive)} sequences"
        raise ValueError(
            f"gather_sequence: {what}, so it is not known where the tokens belong. Pass the batch:"
            " gather_sequence(tensor, batch)."
        )
    return alive[0]


def run_without_context() -> None:
    """A model is set up without cp: no earlier batch counts any more."""
    _running.set(None)


def _tokens(batch: Mapping[Any, Any]) -> Tensor | None:
    """The tensor that says how many rows and tokens a batch has."""
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.ndim == dims:
            return value
    return None


def _positions(batch: Mapping[str, Any], rows: int, length: int, device: torch.device) -> Tensor:
    given = batch.get("position_ids")
    if given is None:
        return torch.arange(length, device=device).expand(rows, length)
    if given.ndim > 2 or given.shape[-1] != length or (given.ndim == 2 and given.shape[0] not in (1, rows)):
        raise ValueError(
            f"NDStrategy: under cp > 1 position_ids are [batch, sequence] = {[rows, length]}, got {list(given.shape)}."
        )
    positions: Tensor = given.expand(rows, length)
    return positions


def _per_token(value: Any, rows: int, length: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and tuple(value.shape[:2]) == (rows, length)


def _take(value: Tensor, columns: Tensor, length: int, fill: int) -> Tensor:
    """Columns of a per-token tensor; those from `length` on are padding."""
    taken = value[:, columns.clamp(max=length - 1)]
    padding = columns >= length
    if padding.any():
        taken[:, padding] = fill
    return taken
