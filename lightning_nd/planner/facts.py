"""A model's numbers, taken from a skeleton without weights: parameters by name, activations by one pass on meta."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from lightning_nd.parallelize.blocks import find_blocks
from lightning_nd.parallelize.tensor import Split, describe_split
from lightning_nd.planner.experts import PRODUCTS, ExpertRows
from lightning_nd.planner.model import Attention, Block, ModelFacts, PerToken, Sizes, Working
from lightning_nd.planner.working import watch

NAME = "nd_planner"
TOKENS = 509  # a prime, so that a tensor whose size it divides has a token dim

_FREE = ("view", "_unsafe_view", "t", "transpose", "expand", "permute", "unsqueeze", "squeeze", "slice", "select",
         "detach", "alias", "split", "split_with_sizes", "unbind", "as_strided", "reshape", "empty", "empty_like",
         "chunk", "lift_fresh")  # fmt: skip


def facts_of(model: PreTrainedModel, name: str, tp_plan: Any = "auto") -> ModelFacts:
    """The numbers of a causal language model on meta, in the dtype in which it computes.

    Args:
        model: from `lightning_nd.checkpoint.from_config`, with its adapters if it has any.
        name: for reports.
        tp_plan: as for `NDStrategy`; a model without a plan has whole parameters.

    Raises:
        ValueError: if the model cannot be run on meta, naming what it did.
    """
    split = _split(model, tp_plan)
    recorder = _run(model, split)
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    counted: set[int] = set()
    embedding_sizes = _count(embedding, "", model, split, counted, None)
    head_sizes = _count(head, "", model, split, counted, None)
    groups: Counter[Block] = Counter()
    for path, block in find_blocks(model):
        record = recorder.blocks.get(path, _Record())
        sizes = {
            trains: _count(block, path, model, split, counted if trains else set(counted), trains)
            for trains in (False, True)
        }
        products, trained = _products(block, path, split, config)
        groups[
            Block(
                1,
                sizes[True],
                sizes[False],
                products,
                trained,
                tuple(record.attention),
                record.saved(),
                record.kept(),
                record.traffic(),
                recorder.working.get(path, Working()),
                record.kernels,
                _routed(config) if (experts := _experts(block)) else 0,
                max(experts.values(), default=0),
                sum((_sized(f"{path}.{n}", block.get_parameter(n).numel(), split) for n in experts), Sizes()),
            )
        ] += 1
        counted.update(id(p) for p in block.parameters())
    rest = _count(model, "", model, split, counted, None)
    return ModelFacts(
        name=name,
        hidden=int(config.hidden_size),
        vocabulary=int(head.weight.shape[0]) if head is not None else int(config.vocab_size),
        embedding=embedding_sizes,
        head=head_sizes,
        rest=rest,
        blocks=tuple(replace(block, count=count) for block, count in groups.items()),
        tail=recorder.tail,
        scales_logits=recorder.scales_logits,
        trains_embedding=_trains(embedding),
        trains_head=_trains(head),
        trains_rest=any(p.requires_grad for p in model.parameters() if id(p) not in counted) or _trains_norm(model),
        max_length=getattr(config, "max_position_embeddings", None),
        width=next(model.parameters()).element_size(),
    )


def _trains(module: nn.Module | None) -> bool:
    return module is not None and any(p.requires_grad for p in module.parameters())


def _trains_norm(model: PreTrainedModel) -> bool:
    inside = {id(p) for _, block in find_blocks(model) for p in block.parameters()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        inside |= {id(p) for p in module.parameters()} if module is not None else set()
    return any(p.requires_grad for p in model.parameters() if id(p) not in inside)


def _split(model: PreTrainedModel, tp_plan: Any) -> Split:
    try:
        return describe_split(model, tp_plan)
    except ValueError:
        return Split()


def _count(
    module: nn.Module | None, path: str, model: nn.Module, split: Split, counted: set[int], trains: bool | None
) -> Sizes:
    """Parameters of a module that are not counted yet; ``trains`` picks those with or without gradients."""
    if module is None:
        return Sizes()
    if not path:
        path = next((n for n, m in model.named_modules() if m is module), "")
    sizes = Sizes()
    for name, parameter in module.named_parameters(prefix=path):
        if id(parameter) in counted or (trains is not None and parameter.requires_grad != trains):
            continue
        sizes += _sized(name, parameter.numel(), split)
        if trains is None:
            counted.add(id(parameter))
    return sizes


def _sized(name: str, numel: float, split: Split) -> Sizes:
    if name in split.grouped:
        return Sizes(grouped=numel, groups=split.grouped[name])
    return Sizes(split=numel) if name in split.split else Sizes(whole=numel)


def _routed(config: Any) -> int:
    for key in ("num_experts_per_tok", "moe_topk", "top_k", "experts_per_token", "num_experts_per_token"):
        if isinstance(value := getattr(config, key, None), int):
            return value
    return 1


def _experts(block: nn.Module) -> dict[str, int]:
    """Packed expert weights of a block: name and number of experts."""
    return {name: p.shape[0] for name, p in block.named_parameters() if p.dim() == 3}


def _products(block: nn.Module, path: str, split: Split, config: Any) -> tuple[Sizes, Sizes]:
    experts, routed = _experts(block), _routed(config)
    every, trained = Sizes(), Sizes()
    for name, parameter in block.named_parameters():
        if parameter.dim() < 2:
            continue
        share = min(routed / experts[name], 1.0) if name in experts else 1.0
        sizes = _sized(f"{path}.{name}", parameter.numel() * share, split)
        every += sizes
        if parameter.requires_grad:
            trained += sizes
    return every, trained


# -- one pass on meta -------------------------------------------------------------------------------------------------


@dataclass
class _Record:
    """What one block did."""

    attention: list[Attention] = field(default_factory=list)
    tensors: dict[int, tuple[int, str]] = field(default_factory=dict)
    products: list[tuple[int, str]] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)
    kernels: int = 0

    def saved(self) -> PerToken:
        return _per_token(self.tensors.values())

    def kept(self) -> PerToken:
        calls = sum(a.heads * a.value_dim for a in self.attention)
        width = self.width
        kept = [
            *self.products[::2],
            (TOKENS * calls * width + 4 * TOKENS * sum(a.heads for a in self.attention), "split"),
        ]
        return _per_token(kept)

    width: int = 2

    def traffic(self) -> PerToken:
        return _per_token((size, where) for where, size in self.moved.items())


def _per_token(sizes: Iterable[tuple[int, str]]) -> PerToken:
    total: Counter[str] = Counter()
    for size, where in sizes:
        total[where] += size
    return PerToken(**{where: size / TOKENS for where, size in total.items()})


class _Kept(torch.autograd.Function):
    """An attention kernel that keeps q, k, v, its output and the log-sum-exp, as flash kernels do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)[..., : v.shape[-1]]  # laid out as the queries are
        if v.shape[-1] < q.shape[-1]:
            out = out.clone()
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Recorder(TorchDispatchMode):
    """Notes, block by block, what a forward pass keeps and moves."""

    def __init__(self, model: PreTrainedModel, split: Split) -> None:
        super().__init__()
        self.blocks: dict[str, _Record] = {}
        self.current: _Record | None = None
        self.region: str | None = None
        self.border: set[int] = set()
        self.split = split
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.outside: set[int] = set()  # made before the blocks and kept once for all of them (rotary tables)
        self.held: list[Tensor] = []  # a freed storage's address could be taken for another
        self.inputs: dict[str, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}
        self.last: list[tuple[nn.Module, Tensor]] = []  # modules that ran after the blocks so far, and their input
        self.working: dict[str, Working] = {}
        self.tail = Working()
        self.is_watching = False
        self.scales_logits = False
        config = model.config.get_text_config()
        self.logits = TOKENS * int(config.vocab_size)
        packed = [n for n, p in model.named_parameters() if p.dim() == 3]
        self.experts = ExpertRows(TOKENS, _routed(config) if packed else 0, any(n in split.split for n in packed))

    def where(self, tensor: Tensor) -> str:
        if self.experts.has(tensor):
            return self.experts.where(tensor)
        if self.region is None:
            return "residual"
        if tensor.untyped_storage()._cdata in self.border:
            return "whole"
        if self.split.regions.get(self.region, False):
            return "split"
        widths = self.split.widths.get(self.region, frozenset())
        heads = {a.heads for a in (self.current.attention if self.current else [])}
        features = tensor.numel() // TOKENS
        is_split = bool(widths & {features, *tensor.shape}) or (tensor.dim() == 4 and tensor.shape[1] in heads)
        return "split" if is_split else "whole"

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        ours = storage._cdata not in self.weights and storage._cdata not in self.outside
        if self.current is not None and ours and tensor.numel() % TOKENS == 0:
            size = storage.nbytes()  # a part that is kept (values of packed projections) keeps the whole
            if tensor.numel() and size % TOKENS == 0:
                known = self.current.tensors.get(storage._cdata, (0, ""))
                self.current.tensors[storage._cdata] = (max(size, known[0]), known[1] or self.where(tensor))
        self.held.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.experts.note(func, args, out)
        if self.current is not None:
            name = func._schema.name.rpartition("::")[2]
            tensors = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
            if name in PRODUCTS and tensors:
                self.current.kernels += 1
                self.current.products.append((tensors[0].numel() * tensors[0].element_size(), self.where(tensors[0])))
            elif name not in _FREE and tensors and tensors[0].numel() >= TOKENS:
                self.current.kernels += 1
                inputs = [t for t in args if isinstance(t, Tensor)]
                size = sum(t.numel() * t.element_size() for t in (*inputs, *tensors))
                self.current.moved[self.where(tensors[0])] += size
            self.held += tensors
        else:
            made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
            name = func._schema.name.rpartition("::")[2]
            if name not in (*_FREE, *PRODUCTS, "_to_copy", "clone") and any(t.numel() == self.logits for t in made):
                self.scales_logits = True
            self.outside |= {t.untyped_storage()._cdata for t in made}
            self.held += made
        return out


def _run(model: PreTrainedModel, split: Split) -> _Recorder:
    recorder = _Recorder(model, split)
    hooks = []

    def begin(path: str) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            hidden, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
            more = {k: v for k, v in kwargs.items() if k != "hidden_states"}
            recorder.inputs.setdefault(path, (hidden, rest, more))
            recorder.last.clear()
            recorder.current = recorder.blocks.setdefault(path, _Record(width=next(model.parameters()).element_size()))

        return hook

    def end(*_: Any) -> None:
        recorder.current = None

    def enter(path: str) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            recorder.region = path
            recorder.border = {hidden.untyped_storage()._cdata} if isinstance(hidden, Tensor) else set()

        return hook

    def leave(*_: Any) -> None:
        recorder.region = None

    for path, block in find_blocks(model):
        hooks.append(block.register_forward_pre_hook(begin(path), with_kwargs=True))
        hooks.append(block.register_forward_hook(end))
        for key, child in block.named_children():
            if f"{path}.{key}" in split.regions or any(p.dim() > 1 for p in child.parameters()):
                hooks.append(child.register_forward_pre_hook(enter(f"{path}.{key}"), with_kwargs=True))
                hooks.append(child.register_forward_hook(leave))

    def note_last(module: nn.Module, args: Any) -> None:
        if recorder.current is None and args and isinstance(args[0], Tensor):
            recorder.last.append((module, args[0]))

    inside = {id(m) for _, block in find_blocks(model) for m in block.modules()}
    for module in model.get_decoder().modules():
        if id(module) not in inside and any(p.dim() == 1 for p in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(note_last))

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, sliding_window: int | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        if recorder.current is not None and not recorder.is_watching:
            call = Attention(q.shape[1], k.shape[1], q.shape[3], v.shape[3], sliding_window)
            recorder.current.attention.append(call)
        return _Kept.apply(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend)  # without a mask function of that name no mask is made
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        with saved_tensors_hooks(recorder.keep, lambda t: t), recorder:
            model(input_ids=tokens, use_cache=False)
        _watch(model, recorder)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"plan: the activations of {type(model).__name__} cannot be counted without running it:"
            f" {str(error).splitlines()[0]}"
        ) from error
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    return recorder


def _watch(model: PreTrainedModel, recorder: _Recorder) -> None:
    """Run one block of each kind, and what follows the blocks, alone."""
    recorder.is_watching = True
    known: dict[Any, Working] = {}
    last = list(recorder.last)

    def sized(path: str) -> Any:
        return lambda name: _sized(f"{path}.{name}", 1, recorder.split)

    for path, block in find_blocks(model):
        record = recorder.blocks[path]
        weights = dict(block.named_parameters())
        shapes = tuple((n, p.shape, p.requires_grad) for n, p in weights.items())
        kind = (type(block), shapes, record.saved(), tuple(record.attention))
        if kind not in known:
            hidden, rest, more = recorder.inputs[path]
            held = [t for t in tree_leaves((rest, more)) if isinstance(t, Tensor)]

            def call(x: Tensor, block: Any = block, rest: Any = rest, more: Any = more) -> Any:
                return block(x, *rest, **more)

            known[kind] = watch(call, hidden, recorder.where, weights, sized(path), held, recorder.experts)
        recorder.working[path] = known[kind]
    if last:
        modules = [module for module, _ in last]
        weights = {f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters()}

        def tail(x: Tensor) -> Any:
            for module in modules:
                x = module(x)
            return x

        recorder.tail = watch(tail, last[0][1], lambda _: "whole", weights, lambda _: Sizes(whole=1))


def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model that a config describes, on meta, as `fit` builds it, with experts that run without looking at data."""
    from lightning_nd.checkpoint import from_config

    model = from_config(config, dtype=dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    return model
