"""A rehearsal of tensor parallelism: whether a rank's part of each block fits, and which parameters see a part.

Without ranks, weights or memory: a copy of the model on meta runs every kind of block, whole and as one rank of ``tp``
would hold it. Tensors carry what they are: derived from parameters only, *whole* (equal on every rank) or *split* (this
rank's heads or features). A parameter that the plan leaves whole but that meets split activations has a partial
gradient on every rank; whole activations that meet split ones outside of a planned layer would get one. A rank's part
that does not fit together is found before anything is loaded.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_nd.parallelize.sequence import SequenceShard
from lightning_nd.parallelize.styles import Style

log = logging.getLogger(__name__)

NAME = "nd_rehearsal"
ROWS, TOKENS_A_RANK = 2, 6
NONE, PARAMETER, WHOLE, SPLIT = range(4)
_EMPTY = ("new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "empty_like", "full_like")


@dataclass
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        partial: parameters that the plan leaves whole and that act on this rank's heads or features.
        outside: modules whose parameters are used without their forward, and the module that uses them.
        sequence: why sequence parallelism cannot be; None if it can.
        unknown: why there was no rehearsal; None if there was one.
    """

    partial: set[str] = field(default_factory=set)
    outside: dict[str, str] = field(default_factory=dict)
    sequence: str | None = None
    unknown: str | None = None


@dataclass(frozen=True)
class Part:
    """What a rank holds: styles, placements and gradients that are summed by full name; regions, and which are pure."""

    styles: Mapping[str, Style]
    placements: Mapping[str, Placement]
    summed: frozenset[str]
    regions: Mapping[str, bool]


class _Reached(Exception):
    """The head has been reached: the blocks are behind."""


class Flow(TorchDispatchMode):
    """Follows what tensors are through every operation."""

    def __init__(self, block: str, styles: Mapping[str, Style]) -> None:
        super().__init__()
        self.block, self.styles = block, styles
        self.stack: list[str] = []
        self.kinds: dict[int, tuple[int, frozenset[str]]] = {}
        self.kept: list[Any] = []  # storages are known by address
        self.owners: dict[int, str] = {}
        self.seen: dict[str, set[int]] = {}
        self.mixed: list[str] = []
        self.outside: dict[str, str] = {}

    def mark(self, tensor: Tensor, kind: int, names: Iterable[str] = ()) -> Tensor:
        """Say what a tensor is."""
        self.kinds[self._key(tensor)] = (kind, frozenset(names))
        return tensor

    def kind(self, tensor: Tensor) -> int:
        """What a tensor is."""
        return self.kinds.get(self._key(tensor), (NONE, frozenset()))[0]

    def own(self, name: str, parameter: Tensor, kind: int, tracked: bool) -> None:
        """A parameter of the block; its uses are noted if it is ``tracked``."""
        self.owners[self._key(parameter)] = name
        self.mark(parameter, kind, [name] if tracked else [])

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        return int(storage._cdata)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        if func.overloadpacket.__name__ in _EMPTY:
            inputs = []
        states = [self.kinds.get(self._key(t), (NONE, frozenset())) for t in inputs]
        for tensor in inputs:
            self._note_owner(tensor)
        activations = {kind for kind, _ in states} & {WHOLE, SPLIT}
        names = frozenset[str]().union(*(n for kind, n in states if kind == PARAMETER))
        planned = bool(self.stack) and self.stack[-1] in self.styles
        if not planned:
            for name in names:
                self.seen.setdefault(name, set()).update(activations)
            if activations == {WHOLE, SPLIT}:
                self.mixed.append(self.stack[-1] if self.stack else self.block)
        kind = max((kind for kind, _ in states), default=NONE)
        for tensor in outputs:
            self.mark(tensor, kind, names if kind == PARAMETER else ())
        return out

    def _note_owner(self, tensor: Tensor) -> None:
        name = self.owners.get(self._key(tensor))
        owner = name.rpartition(".")[0] if name else ""
        if name and self.stack and owner not in self.stack:
            self.outside.setdefault(owner, self.stack[-1])


class Stage(SequenceShard):
    """What the styles and the sequence shard do to shapes, without ranks."""

    def __init__(self, flow: Flow, size: int, split_sequence: bool) -> None:
        self.flow, self.size, self.split_sequence = flow, size, split_sequence

    def whole(self, like: Tensor, width: int | None = None) -> Tensor:
        """An activation that is equal on every rank."""
        return self._fresh((*like.shape[:-1], width or like.shape[-1]), like, WHOLE)

    def split(self, like: Tensor, width: int | None = None) -> Tensor:
        """An activation of this rank's features or heads."""
        return self._fresh((*like.shape[:-1], width or like.shape[-1]), like, SPLIT)

    def _fresh(self, shape: Iterable[int], like: Tensor, kind: int) -> Tensor:
        return self.flow.mark(like.new_empty(tuple(shape)), kind)

    def _resized(self, hidden: Tensor, tokens: int, kind: int) -> Tensor:
        return self._fresh((hidden.shape[0], tokens, *hidden.shape[2:]), hidden, kind)

    @override
    def leave(self, hidden: Tensor) -> Tensor:
        if not self.split_sequence:
            return hidden
        self._check(hidden, TOKENS_A_RANK)
        return self._resized(hidden, TOKENS_A_RANK * self.size, WHOLE)

    @override
    def gather_partial(self, hidden: Tensor) -> Tensor:
        self._check(hidden, TOKENS_A_RANK * (1 if self.split_sequence else self.size))
        # What flows back is summed at the border: inside, it may meet split activations.
        return self._resized(hidden, TOKENS_A_RANK * self.size, NONE)

    @override
    def scatter(self, hidden: Tensor) -> Tensor:
        if not self.split_sequence:
            return hidden
        self._check(hidden, TOKENS_A_RANK * self.size)
        return self._resized(hidden, TOKENS_A_RANK, WHOLE)

    @override
    def scatter_sum(self, partial: Tensor) -> Tensor:
        return self.scatter(partial)

    def _check(self, hidden: Tensor, tokens: int) -> None:
        if hidden.dim() < 3 or hidden.shape[0] != ROWS or hidden.shape[1] != tokens:
            raise ValueError(f"hidden states of shape {list(hidden.shape)} are not [batch, sequence, hidden]")


def rehearse(model: nn.Module, blocks: list[str], hold: Callable[[nn.Module], Part], size: int) -> Rehearsal:
    """Run every kind of block of a transformers model as one rank of ``size`` would; nothing of it is changed.

    Args:
        model: on any device, not split yet.
        blocks: names of the blocks.
        hold: what a rank holds of a copy of the model; may change the copy's attributes.
        size: the tp degree.

    Raises:
        ValueError: naming the module in which a rank's part does not fit together.
    """
    found = Rehearsal()
    try:
        whole, split = _skeleton(model, blocks), _skeleton(model, blocks)
        part = hold(split)
        _take_part(split, blocks, part, size)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        found.unknown = f"{type(error).__name__}: {error}"
        return found
    known: dict[str, Any] = {}
    carried: dict[tuple[int, str], Any] = {}

    def play(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lasting = [key for key, value in kwargs.items() if isinstance(value, dict)]
        kind = _kind(whole.get_submodule(name), name, part)
        if kind in known and not lasting:
            first, output, partial, outside = known[kind]
            found.partial |= {name + key.removeprefix(first) for key in partial}
            found.outside |= {name + k.removeprefix(first): name + v.removeprefix(first) for k, v in outside.items()}
            return output

        def run(block: nn.Module, mode: int, stage: Stage | None = None) -> Any:
            given = tree_map(_meta, (args, kwargs))
            for key in lasting:
                given[1][key] = carried.setdefault((mode, key), given[1][key])
            return _run(block, name, stage, *given)

        output = run(whole.get_submodule(name), 0)
        block = split.get_submodule(name)
        for mode in (1, 2):
            flow = Flow(name, part.styles)
            stage = Stage(flow, size, split_sequence=mode == 2)
            if mode == 2 and found.sequence is not None:
                break
            handles = _install(block, name, part, stage)
            try:
                with flow:
                    run(block, mode, stage)
            except Exception as error:
                if mode == 2:
                    found.sequence = f"in {flow.stack[-1] if flow.stack else name}: {error}"
                    break
                raise ValueError(_misfit(model, flow, name, size, error)) from error
            finally:
                for handle in handles:
                    handle.remove()
            if mode == 1:
                partial = _judge(model, flow, size)
                found.partial |= partial
                found.outside |= flow.outside
                known[kind] = (name, tree_map(_zeros, output), partial, flow.outside)
        return known[kind][1]

    for name in blocks:
        whole.get_submodule(name).forward = lambda *a, _name=name, **k: play(_name, a, k)
    # The class's own forward, for the runs on meta.
    try:
        with torch.no_grad():
            whole(input_ids=torch.zeros((ROWS, TOKENS_A_RANK * size), dtype=torch.long), use_cache=False)
    except _Reached:
        pass
    except ValueError as error:
        if str(error).startswith("NDStrategy"):
            raise
        found.unknown = f"ValueError: {error}"
    except Exception as error:
        found.unknown = f"{type(error).__name__}: {error}"
    return found


def _judge(model: nn.Module, flow: Flow, size: int) -> set[str]:
    """The parameters that have seen a rank's part; refuses what has no right gradient."""
    partial: set[str] = set()
    for name, uses in flow.seen.items():
        if uses == {WHOLE, SPLIT}:
            raise ValueError(
                f"NDStrategy: tp={size} cannot split {type(model).__name__}: {name} is used on whole activations and on"
                " a rank's part of them, so its gradient is neither whole nor a partial sum. Use tp=1 (dp_shard works),"
                " or another tp_plan."
            )
        if SPLIT in uses:
            partial.add(name)
    if flow.mixed:
        raise ValueError(
            f"NDStrategy: tp={size} cannot split {type(model).__name__}: in {flow.mixed[0]} activations that are whole"
            " on every rank meet a rank's heads or features, and their gradients would be partial. Use tp=1 (dp_shard"
            " works), or another tp_plan."
        )
    return partial


def _misfit(model: nn.Module, flow: Flow, name: str, size: int, error: Exception) -> str:
    where = flow.stack[-1] if flow.stack else name
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"NDStrategy: tp={size} cannot split {type(model).__name__}: its tensor-parallel plan leaves layers whole that"
        f" work on a rank's heads or features. In {where} ({type(model.get_submodule(where)).__name__}): {reason}."
        " Use tp=1 (dp_shard works), or a tp_plan that splits what belongs together."
    )


def _run(block: nn.Module, name: str, stage: Stage | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = type(block).forward.__get__(block) if stage is None else block
    if stage is not None:
        flow = stage.flow

        def enter(hidden: Tensor) -> Tensor:
            if stage.split_sequence:
                stage._check(hidden, TOKENS_A_RANK * stage.size)
                return stage._resized(hidden, TOKENS_A_RANK, WHOLE)
            return flow.mark(hidden, WHOLE)

        if args:
            args = (enter(args[0]), *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}
    with torch.no_grad():
        output = call(*args, **kwargs)
    if stage is not None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and stage.flow.kind(tensor) == SPLIT and tensor.dim() == 3:
                raise ValueError("its output is a rank's part of the features, and no layer puts the parts together")
    return output


def _install(block: nn.Module, name: str, part: Part, stage: Stage) -> list[Any]:
    """Hooks of one run on a rank's part of a block."""
    before = {id(m): (set(m._forward_hooks), set(m._forward_pre_hooks)) for m in block.modules()}
    flow = stage.flow
    for key, module in block.named_modules(prefix=name):
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{key}.{own}"
            split = not isinstance(part.placements.get(full, Replicate()), Replicate)
            flow.own(full, parameter, SPLIT if split else PARAMETER, tracked=not split and full not in part.summed)
        module.register_forward_pre_hook(lambda _, __, _key=key: flow.stack.append(_key))
    for key, module in block.named_modules(prefix=name):
        if key in part.styles:
            pure = any(is_pure and key.startswith(f"{region}.") for region, is_pure in part.regions.items())
            part.styles[key].rehearse(module, stage, pure)
        module.register_forward_hook(lambda _, __, ___: flow.stack.pop() and None)
    for region, pure in part.regions.items():
        if region.startswith(f"{name}.") and (pure or stage.split_sequence):
            stage.install_on_region(block.get_submodule(region[len(name) + 1 :]), pure)
    return [_Handle(m, *before[id(m)]) for m in block.modules()]


class _Handle:
    """Takes away the hooks that a module has got since."""

    def __init__(self, module: nn.Module, after: set[int], before: set[int]) -> None:
        self.module, self.after, self.before = module, after, before

    def remove(self) -> None:
        for hooks, flags, old in (
            (self.module._forward_hooks, self.module._forward_hooks_with_kwargs, self.after),
            (self.module._forward_pre_hooks, self.module._forward_pre_hooks_with_kwargs, self.before),
        ):
            for key in [key for key in hooks if key not in old]:
                del hooks[key]
                flags.pop(key, None)


def _kind(block: nn.Module, name: str, part: Part) -> str:
    """What tells blocks apart: classes, plain attributes, shapes and styles."""
    lines = []
    for key, module in block.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str) and "idx" not in k}
        shapes = {k: tuple(p.shape) for k, p in module.named_parameters(recurse=False)}
        style = type(part.styles.get(f"{name}.{key}")).__name__
        summed = [k for k in shapes if f"{name}.{key}.{k}" in part.summed]
        lines.append(f"{key} {type(module).__name__} {plain} {shapes} {style} {summed}")
    return "\n".join(lines)


def _take_part(skeleton: nn.Module, blocks: list[str], part: Part, size: int) -> None:
    """Give the copy the local shapes of a rank."""
    for name in blocks:
        for key, module in skeleton.get_submodule(name).named_modules(prefix=name):
            for own, parameter in list(module.named_parameters(recurse=False)):
                placement = part.placements.get(f"{key}.{own}", Replicate())
                if isinstance(placement, Replicate):
                    continue
                shape = list(parameter.shape)
                dim = placement.dim if isinstance(placement, Shard) else getattr(placement, "dim", 0)
                shape[dim] = -(-shape[dim] // size)
                module._parameters[own] = nn.Parameter(parameter.new_empty(shape), requires_grad=False)


def _skeleton(model: nn.Module, blocks: list[str]) -> nn.Module:
    """A copy without hooks and without memory: meta inside of the blocks, zeros that share one number outside."""
    memo: dict[int, Any] = {}
    inside = {id(m) for name in blocks for m in model.get_submodule(name).modules()}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(_empty(parameter, id(module) in inside), requires_grad=False)
        for buffer in module._buffers.values():
            if buffer is not None:
                meta = id(module) in inside
                memo[id(buffer)] = torch.empty_like(buffer, device="meta") if meta else _real(buffer)
        for key, value in vars(module).items():
            if "hook" in key and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
            elif key.startswith("_lightning_nd") or isinstance(value, torch.distributed.ProcessGroup):
                memo[id(value)] = value
    twin = copy.deepcopy(model, memo).train()
    if getattr(twin, "_supports_attention_backend", False):
        _register()
        twin.set_attn_implementation(NAME)  # type: ignore[operator]
    for module in twin.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda x, *_, **__: x.new_empty(x.shape)
    head = twin.get_output_embeddings() if hasattr(twin, "get_output_embeddings") else None  # type: ignore[operator]
    if head is not None:
        head.forward = _stop
    return twin


def _stop(*_: Any, **__: Any) -> Tensor:
    raise _Reached


def _empty(parameter: Tensor, meta: bool) -> Tensor:
    if meta:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _real(buffer: Tensor) -> Tensor:
    return torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.detach().cpu().clone()


def _meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *_: Any,
    s_aux: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """The products of attention, for their shapes."""
    groups = int(getattr(module, "num_key_value_groups", 1))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3)
    if isinstance(attention_mask, Tensor):  # of the model's own making: transformers makes none for this implementation
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)[..., :-1]
    return (scores @ value).transpose(1, 2).contiguous(), None
