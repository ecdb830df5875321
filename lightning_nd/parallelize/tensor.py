"""Tensor parallelism: a plan of styles by module name, checked and applied to a model.

The plan comes from transformers (``base_model_tp_plan`` and ``_tp_plan``) or from the user. What this file adds: a
vocabulary-parallel input embedding, replicated key/value heads where there are fewer than ranks, regions for sequence
parallelism, ties, and the same mesh for every parameter, so that foreach and fused optimizers see one kind of tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from lightning_nd.names import class_name
from lightning_nd.parallelize.assignment import Assignment, assign
from lightning_nd.parallelize.blocks import block_list, check_shared, find_blocks
from lightning_nd.parallelize.flow import Part, Rehearsal, rehearse
from lightning_nd.parallelize.heads import (
    check_heads,
    is_kv_projection,
    kv_projection_names,
    projection,
    replicate_kv_heads,
)
from lightning_nd.parallelize.own_plan import check_own_plan
from lightning_nd.parallelize.sequence import SequenceShard, find_tail, is_tokenwise
from lightning_nd.parallelize.styles import (
    STYLES,
    Colwise,
    ShardedParameter,
    Site,
    install_style,
    lend_parameters,
)
from lightning_nd.quantized import quantized_layers
from lightning_nd.settings import settings_of, switched_on

log = logging.getLogger(__name__)

TPPlan = Mapping[str, str]

#: Plans for what transformers leaves replicated; names as in `base_model_tp_plan`.
SUPPLEMENTS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "sharded_parameter",
    },
}


@dataclass
class TensorParallelism:
    """What tensor parallelism did to a model.

    Attributes:
        partial: names of parameters whose gradients are partial sums over the tp ranks after backward.
        sequence: the sequence shard of the model; ``None`` without sequence parallelism.
        replicated_kv_heads: key/value heads were replicated because there are fewer than ranks.
    """

    partial: frozenset[str] = frozenset()
    sequence: SequenceShard | None = None
    replicated_kv_heads: bool = False


def resolve_plan(model: nn.Module, tp_plan: TPPlan | Literal["auto"], size: int) -> dict[str, str]:
    """The plan for a model, with names relative to it.

    Raises:
        ValueError: if there is no plan, or a style in it is unknown.
    """
    family = _family(model)
    if tp_plan == "auto":
        plan = dict(getattr(model, "tp_plan", None) or {})
        prefix = getattr(model, "base_model_prefix", "")
        for name, style in SUPPLEMENTS.get(family, {}).items():
            plan[f"{prefix}.{name}" if prefix else name] = style
        # A plan for the head alone (transformers puts one on every class) does not split the layers.
        if not any(".*." in name for name in plan):
            raise ValueError(
                f"NDStrategy: tp={size} needs a tensor-parallel plan, and {type(model).__name__} ({family}) has none."
                " Use tp=1 (dp_shard works for any model), or give one:"
                ' NDStrategy(tp_plan={"layers.*.attn.q": "colwise", "layers.*.attn.o": "rowwise", ...}).'
            )
    else:
        plan = dict(tp_plan)
    unknown = {style for style in plan.values() if style not in STYLES}
    if unknown:
        raise ValueError(
            f"NDStrategy: the tensor-parallel plan of {type(model).__name__} uses {', '.join(sorted(unknown))}, which"
            f" is not supported. Allowed styles: {', '.join(sorted(STYLES))}. Use tp=1 or give another tp_plan."
        )
    return plan


def check_tensor_parallel(model: nn.Module, tp_plan: TPPlan | Literal["auto"], size: int) -> None:
    """Refuse a model that cannot be split over ``size`` ranks with one process's numbers.

    Works on a meta model, before weights are loaded.

    Raises:
        ValueError: naming what was given, what is allowed, and what to change.
    """
    if size > 1:
        if packed := next(iter(quantized_layers(model)), None):
            layer = packed.removesuffix(".base_layer")
            raise ValueError(
                f"NDStrategy: {layer} is quantized, in blocks that run over its rows, and tp={size} would cut them."
                " Use tp=1 (dp_shard, dp_replicate and cp work), or leave the quantization out."
            )
        _checked(model, tp_plan, size)


def _checked(model: nn.Module, tp_plan: TPPlan | Literal["auto"], size: int) -> tuple[Assignment, Rehearsal]:
    """The styles of a model, and what a rehearsal of them found."""
    plan = resolve_plan(model, tp_plan, size)
    check_heads(model, plan, size)
    check_shared(model)
    _check_randomness(model, size)
    assignment = assign(model, plan)
    if tp_plan != "auto" and not any(".*." in name for name in getattr(model, "tp_plan", None) or {}):
        check_own_plan(model, assignment.modules)
    modules = dict(model.named_modules())
    for name, style in assignment.modules.items():
        if not is_kv_projection(name, modules):
            style.check(name, modules[name], size)
    return assignment, _rehearse(model, assignment, size)


def _rehearse(model: nn.Module, assignment: Assignment, size: int) -> Rehearsal:
    """Find the whole parameters that work on a rank's part, and give them their style."""
    blocks = [name for name, _ in find_blocks(model)]
    if not isinstance(getattr(model, "_no_split_modules", None), list | set | tuple) or not blocks:
        return Rehearsal(unknown="not a transformers model")

    def hold(twin: nn.Module) -> Part:
        styles = Assignment(dict(assignment.modules), dict(assignment.parameters))
        replicate_kv_heads(twin, styles, size, 0)
        placements, summed = _placements(twin, styles)
        return Part(styles.modules, placements, summed, _find_regions(twin, styles, trusted=True))

    while True:
        found = rehearse(model, blocks, hold, size)
        if not found.partial:
            break
        assignment.parameters.update(dict.fromkeys(found.partial, STYLES["replicated_with_grad_allreduce"]))
    if found.unknown is not None:
        log.info("NDStrategy: tensor parallelism of %s was not rehearsed: %s", type(model).__name__, found.unknown)
    return found


def _placements(model: nn.Module, assignment: Assignment) -> tuple[dict[str, Placement], frozenset[str]]:
    """How every parameter lies on the mesh, and which gradients are summed whatever stands around them."""
    placements: dict[str, Placement] = {}
    summed: set[str] = set()
    for name, module in model.named_modules():
        style = assignment.modules.get(name, STYLES["replicate"])
        for key, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            owner = assignment.parameters.get(full_name, style)
            placements[full_name] = owner.placement(key, parameter.dim())
            if owner.is_partial(key, Site(None)):  # type: ignore[arg-type]
                summed.add(full_name)
    return placements, frozenset(summed)


@dataclass(frozen=True)
class Split:
    """What tensor parallelism would divide in a model, whatever the degree.

    Attributes:
        split: names of the parameters that are divided.
        grouped: of key and value projections: how many heads they have; a degree that does not divide that leaves the
            projection whole.
        regions: every region by name (see `styles.py`), and whether it is pure.
        widths: of a region, the features of its split layers.
    """

    split: frozenset[str] = frozenset()
    grouped: Mapping[str, int] = field(default_factory=dict)
    regions: Mapping[str, bool] = field(default_factory=dict)
    widths: Mapping[str, frozenset[int]] = field(default_factory=dict)


def describe_split(model: nn.Module, tp_plan: TPPlan | Literal["auto"] = "auto") -> Split:
    """What `apply_tensor_parallel` would divide, asked of a model on meta without a mesh.

    Raises:
        ValueError: if there is no plan for the model, or a style in it is unknown.
    """
    assignment = assign(model, resolve_plan(model, tp_plan, 2))
    regions = _find_regions(model, assignment, trusted=getattr(model, "tp_plan", None) is not None)
    grouped: dict[str, int] = {}
    for name, module in kv_projection_names(model, assignment):
        for key in (f"{name}.k_proj", f"{name}.v_proj"):
            heads = projection(module, key.rpartition(".")[2]).out_features // int(module.head_dim)  # type: ignore[arg-type]
            grouped.update({f"{key}.{own}": heads for own, _ in model.get_submodule(key).named_parameters()})
    divided: set[str] = set()
    widths: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        style = assignment.modules.get(name, STYLES["replicate"])
        for key, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            placement = assignment.parameters.get(full_name, style).placement(key, parameter.dim())
            if placement.is_replicate():
                continue
            divided.add(full_name)
            owner = assignment.parameters.get(full_name, style)
            if not owner.fits_pure_region:
                continue  # its slices are gathered at once
            if (region := _enclosing(name, regions)) is not None:
                widths.setdefault(region, set()).add(parameter.shape[placement.dim])  # type: ignore[attr-defined]
    return Split(frozenset(divided), grouped, regions, {k: frozenset(v) for k, v in widths.items()})


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, tp_plan: TPPlan | Literal["auto"] = "auto", sequence_parallel: bool = True
) -> TensorParallelism:
    """Split a model over the ``tp`` mesh, in place.

    Every parameter becomes a DTensor on the mesh; parameters may be on meta. Real parameters are taken as equal on all
    ranks: each rank keeps its own slice, nothing is sent.

    Raises:
        ValueError: see `check_tensor_parallel`.
    """
    _let_anomalies_be_looked_for()
    if mesh.size() == 1:
        return TensorParallelism()
    assignment, rehearsal = _checked(model, tp_plan, mesh.size())
    replicated_kv = replicate_kv_heads(model, assignment, mesh.size(), mesh.get_local_rank())
    regions = _find_regions(model, assignment, trusted=getattr(model, "tp_plan", None) is not None)
    sequence = _sequence_shard(model, mesh, tp_plan, sequence_parallel, rehearsal.sequence)
    norm, head = _tail(model, assignment) if sequence is not None else (None, None)

    partial: set[str] = set()
    placements: dict[str, Placement] = {}
    for name, module in model.named_modules():
        region = _enclosing(name, regions)
        pure = region is not None and regions[region]
        site = Site(
            mesh,
            pure=pure,
            scatter=None if sequence is None else sequence.scatter_sum,
            share=sequence.into_head if sequence is not None and name == head else None,
        )
        style = assignment.modules.get(name, STYLES["replicate"])
        own = list(module.named_parameters(recurse=False))
        if not own and name not in assignment.modules:
            continue
        for key, parameter in own:
            full_name = _join(name, key)
            owner = assignment.parameters.get(full_name, style)
            placements[full_name] = owner.placement(key, parameter.dim())
            inside_blocks = sequence is not None and region is None and _in_blocks(full_name, regions)
            if owner.is_partial(key, site) or inside_blocks or name == norm:
                partial.add(full_name)
        install_style(module, style, site, frozenset(key for key, _ in own if _join(name, key) in partial))
    for owner_name, user in rehearsal.outside.items():
        owner_module = model.get_submodule(owner_name)
        names = frozenset(k for k, _ in owner_module.named_parameters(recurse=False) if f"{owner_name}.{k}" in partial)
        lend_parameters(owner_module, model.get_submodule(user), Site(mesh), names)

    _shard_parameters(model, mesh, placements)
    # After the styles: a region's border surrounds what its layers do.
    if sequence is not None:
        modules = dict(model.named_modules())
        for name, pure in regions.items():
            sequence.install_on_region(modules[name], pure)
        blocks = block_list(model)
        assert blocks is not None
        sequence.install_on_chain(blocks)
        if norm is not None:
            sequence.install_on_tail(modules[norm])
    else:
        _install_plain_regions(model, regions, mesh)
    _refuse_outputs(model, whole_sequence=sequence is None)
    log.debug("tensor parallel: %d regions, %d partial gradients", len(regions), len(partial))
    return TensorParallelism(frozenset(partial), sequence, replicated_kv)


def _tail(model: nn.Module, assignment: Assignment) -> tuple[str | None, str | None]:
    """The norm after the blocks and the head, where the head is split by vocabulary and nothing else is there."""
    found = find_tail(model)
    if found is None or not isinstance(style := assignment.modules.get(found[1]), Colwise) or not style.gather:
        return None, None
    return found


def _let_anomalies_be_looked_for() -> None:
    """Teach DTensor what ``detect_anomaly`` asks of every gradient: whether some element is NaN."""
    from torch.distributed.tensor.experimental import register_sharding

    def whole(*_: Any) -> Any:
        return [([Replicate()], [Replicate()])]

    register_sharding(torch.ops.aten._is_any_true.default)(whole)


def _refuse_outputs(model: nn.Module, whole_sequence: bool) -> None:
    """Refuse calls for outputs of which a tp rank has only a part."""
    parts = {"output_attentions": "heads of them: leave it out, or use tp=1"}
    if not whole_sequence:
        parts["output_hidden_states"] = "tokens of them: use NDStrategy(sequence_parallel=False)"

    def before(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        for key, part in parts.items():
            asked = kwargs.get(key)
            if asked or (asked is None and switched_on(getattr(module, "config", None), key)):
                raise ValueError(
                    f"NDStrategy: {class_name(module)} was asked for {key}, but each tp rank holds only its own {part}."
                )

    model.register_forward_pre_hook(before, with_kwargs=True)


def _install_plain_regions(model: nn.Module, regions: dict[str, bool], mesh: DeviceMesh) -> None:
    from lightning_nd.parallelize import collectives as comm
    from lightning_nd.parallelize.sequence import map_hidden_input

    modules, group = dict(model.named_modules()), mesh.get_group()
    for name, pure in regions.items():
        if pure:
            map_hidden_input(modules[name], lambda x: comm.identity_allreduce(x, group))


def _join(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _family(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    return str(getattr(config, "model_type", type(model).__name__))


def _check_randomness(model: nn.Module, size: int) -> None:
    """Ranks would draw their masks alone: replicated activations would differ, and no layout gives one process's."""
    active = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    settings = [f"{key}={value}" for key, value in settings_of(getattr(model, "config", None)) if _draws(key, value)]
    if active or settings:
        raise ValueError(
            f"NDStrategy: tp={size} with dropout is not supported: masks or noise drawn by each rank would not be those"
            f" of one process. Active: {', '.join([*settings, *active[:3]])}. Set these probabilities in the model's"
            " config to 0, or use tp=1."
        )


def _draws(key: str, value: Any) -> bool:
    """Whether a setting makes the forward draw random numbers; those of heads of other classes do not count."""
    leaf = key.rpartition(".")[2]
    if leaf.startswith(("classifier", "summary")) or not any(word in leaf for word in ("drop", "jitter")):
        return False
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _find_regions(model: nn.Module, assignment: Assignment, trusted: bool) -> dict[str, bool]:
    """Every region (block child that needs the whole sequence) by name, and whether it is pure.

    In code that is not ``trusted`` to be of transformers' shape no region is pure: a residual sum inside it would get
    its gradient from every rank.
    """
    blocks = block_list(model) or []
    names = {id(module): name for name, module in model.named_modules()}
    regions: dict[str, bool] = {}
    for block in blocks:
        for key, child in block.named_children():
            if not is_tokenwise(child):
                name = f"{names[id(block)]}.{key}"
                regions[name] = trusted and _is_pure(name, child, assignment)
    return regions


def _is_pure(name: str, region: nn.Module, assignment: Assignment) -> bool:
    kinds = {"in": 0, "out": 0}
    for key, module in region.named_modules(prefix=name):
        style = assignment.modules.get(key)
        for own, _ in module.named_parameters(recurse=False):
            owner = assignment.parameters.get(f"{key}.{own}", style)
            if owner is None or not owner.fits_pure_region:
                return False
        if style is not None and not style.fits_pure_region:
            return False
        kinds["out"] += style in (STYLES["rowwise"],)
        kinds["in"] += style is not None and style.splits_output
    return kinds["out"] == 1 and kinds["in"] > 0


def _enclosing(name: str, regions: Mapping[str, bool]) -> str | None:
    return next((region for region in regions if name == region or name.startswith(f"{region}.")), None)


def _in_blocks(parameter: str, regions: Mapping[str, bool]) -> bool:
    return any(parameter.startswith(region.rpartition(".")[0] + ".") for region in regions)


def _sequence_shard(
    model: nn.Module, mesh: DeviceMesh, tp_plan: TPPlan | Literal["auto"], wanted: bool, obstacle: str | None
) -> SequenceShard | None:
    if not wanted:
        return None
    if tp_plan != "auto" and getattr(model, "tp_plan", None) is None:
        log.info("NDStrategy: sequence_parallel is off: %s is not a transformers model.", type(model).__name__)
        return None
    if block_list(model) is None:
        log.info("NDStrategy: sequence_parallel is off: the blocks of %s are no chain.", type(model).__name__)
        return None
    if obstacle is not None:
        log.warning("NDStrategy: sequence_parallel is off for %s: %s.", type(model).__name__, obstacle)
        return None
    return SequenceShard(mesh)


def _shard_parameters(model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Turn every parameter into a DTensor on the mesh; tied parameters stay one object."""
    made: dict[int, tuple[nn.Parameter, str]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if id(parameter) in made:
            sharded, first = made[id(parameter)]
            if placements[name] != placements[first]:
                raise ValueError(
                    f"NDStrategy: {name} and {first} are tied, but the tensor-parallel plan splits them differently"
                    f" ({placements[name]}, {placements[first]}). Untie them or give both the same style in tp_plan."
                )
        else:
            if isinstance(parameter, DTensor):
                raise ValueError(f"NDStrategy: {name} is a DTensor already; the model has been parallelised before.")
            with torch.no_grad():
                value = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
            sharded = nn.Parameter(value, requires_grad=parameter.requires_grad)
            made[id(parameter)] = (sharded, name)
        module._parameters[key] = sharded


__all__ = [
    "STYLES",
    "ShardedParameter",
    "Split",
    "TPPlan",
    "TensorParallelism",
    "apply_tensor_parallel",
    "check_tensor_parallel",
    "describe_split",
    "resolve_plan",
]
