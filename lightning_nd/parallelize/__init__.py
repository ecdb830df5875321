"""What is done to a module, one file a step; `parallelize` shows the order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_nd.mesh import Meshes, ParallelDims
from lightning_nd.parallelize.activation import ActivationCheckpointing, apply_activation_checkpointing
from lightning_nd.parallelize.agree import agree_on_weights
from lightning_nd.parallelize.blocks import check_shared
from lightning_nd.parallelize.compile import apply_compile
from lightning_nd.parallelize.context import ContextParallel, apply_context_parallel, run_without_context
from lightning_nd.parallelize.data import ShardingOptions, apply_fully_shard
from lightning_nd.parallelize.entry import guard_entry
from lightning_nd.parallelize.tensor import (
    TensorParallelism,
    TPPlan,
    apply_tensor_parallel,
    check_tensor_parallel,
)
from lightning_nd.quantized import check_quantized

if TYPE_CHECKING:
    from lightning_nd.strategy import NDStrategy


@dataclass(frozen=True)
class ParallelConfig:
    """Everything that `parallelize` needs to know; `NDStrategy.parallel_config` makes one.

    Attributes:
        meshes: where the ranks are.
        tp_plan: ``"auto"`` takes that of transformers.
        sequence_parallel: split activations between attention and MLP along the sequence, over the tp ranks.
        activation_checkpointing: ``"none"``, ``"full"``, ``"selective"`` or every n-th block.
        offload_activations: keep in host memory what blocks save for the backward pass.
        context: context parallelism over the cp ranks; None without.
        compile: compile each block.
        sharding: how `fully_shard` is called.
    """

    meshes: Meshes
    tp_plan: TPPlan | Literal["auto"] = "auto"
    sequence_parallel: bool = True
    activation_checkpointing: ActivationCheckpointing = "none"
    offload_activations: bool = False
    context: ContextParallel | None = None
    compile: bool = False
    sharding: ShardingOptions = field(default_factory=ShardingOptions)


def parallelize(model: nn.Module, how: NDStrategy | ParallelConfig) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing, compilation and FSDP2 to a model, in place.

    A model on the meta device (from `load_pretrained` or `from_config`) is filled afterwards, each rank reading only
    its slices. A real model keeps its weights; where ranks differ, those of rank 0 are taken. Calling it a second time
    on the same model does nothing. Collective: every rank calls it with the same model.

    Args:
        model: a transformers model, or any module with repeated blocks; it must be called as a whole
            (``model(...)``), since the hooks that gather its parameters start there.
        how: the strategy (``self.trainer.strategy`` in `configure_model`), or a config for a loop without a Trainer.

    Raises:
        ValueError: if the model cannot be split this way; see `check_tensor_parallel`.
    """
    from transformers import PreTrainedModel

    from lightning_nd.checkpoint import materialize

    config = how if isinstance(how, ParallelConfig) else how.parallel_config
    if config.context is not None:
        if config.context.sdpa and config.compile:
            raise ValueError(
                "NDStrategy: cp_sdpa=True cannot look into compiled blocks; use compile=False, or call"
                " lightning_nd.context_parallel_attention in the model."
            )
        apply_context_parallel(model, config.context)
    else:
        run_without_context()
    if is_parallelized(model):
        check_layout(model, config.meshes.dims)
        return model
    if part := parallelized_part(model):
        raise TypeError(
            f"parallelize: {part} of {type(model).__name__} has been parallelised by itself, and the rest has not. Call"
            f" parallelize once on the {type(model).__name__}, or on each of its parts."
        )
    if not isinstance(how, ParallelConfig):
        how.precision_plugin.convert_module(model)  # here, so that a call in configure_model gets the dtype too
    meshes = config.meshes
    on_meta = any(p.is_meta for p in model.parameters())
    if on_meta and not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"parallelize: {type(model).__name__} is on the meta device, and only transformers models can be"
            " filled from there. Build it with real weights; each rank keeps its shards."
        )
    check_shared(model)
    check_quantized(model)
    check_tensor_parallel(model, config.tp_plan, meshes.tp.size())
    if not on_meta:
        agree_on_weights(model)
    tensor = apply_tensor_parallel(model, meshes.tp, config.tp_plan, config.sequence_parallel)
    router = getattr(model, "_lightning_nd_sdpa", None)
    kept = config.activation_checkpointing, tensor.sequence, router, config.offload_activations, config.compile
    apply_activation_checkpointing(model, *kept)
    if config.compile:
        apply_compile(model, config.offload_activations)
    apply_fully_shard(model, meshes.fsdp, config.sharding)
    if meshes.dims.world_size > 1:
        guard_entry(model)
    if on_meta:
        assert isinstance(model, PreTrainedModel)
        materialize(model, _device(meshes))
    model._lightning_nd = tensor  # type: ignore[assignment]
    model._lightning_nd_dims = meshes.dims  # type: ignore[assignment]
    return model


def is_parallelized(model: nn.Module) -> bool:
    """Whether `parallelize`, or the user with `fully_shard`, has taken this model as a whole."""
    return isinstance(model, FSDPModule) or "_lightning_nd" in vars(model)


def parallelized_part(model: nn.Module) -> str | None:
    """The name of a part of a model that has been taken by itself, while the rest has not; None if there is none."""
    return None if is_parallelized(model) else next((n for n, m in model.named_modules() if is_parallelized(m)), None)


def check_layout(module: nn.Module, dims: ParallelDims) -> None:
    """Refuse a module whose models were parallelised over another layout, by an earlier Trainer.

    Raises:
        ValueError: naming both layouts.
    """
    for name, part in module.named_modules():
        made_for = vars(part).get("_lightning_nd_dims", dims)
        if made_for != dims:
            raise ValueError(
                f"NDStrategy: {name or type(part).__name__} has been parallelised over {made_for} before, and this"
                f" strategy lays out {dims}. Use the same degrees, or save a checkpoint and load it into a new module."
            )


def partial_gradients(module: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients are partial sums over the tp ranks after backward."""
    found: list[nn.Parameter] = []
    for part in module.modules():
        tensor = vars(part).get("_lightning_nd")
        if isinstance(tensor, TensorParallelism):
            named = dict(part.named_parameters())
            found += [named[name] for name in sorted(tensor.partial)]
    return found


def _device(meshes: Meshes) -> str:
    import torch

    kind = meshes.axes.device_type
    return f"{kind}:{torch.cuda.current_device()}" if kind == "cuda" else kind


__all__ = [
    "ActivationCheckpointing",
    "ParallelConfig",
    "ShardingOptions",
    "TPPlan",
    "TensorParallelism",
    "check_layout",
    "check_tensor_parallel",
    "is_parallelized",
    "parallelize",
    "parallelized_part",
    "partial_gradients",
]
