"""FSDP2 and HSDP: shard every block as a unit, the embeddings, and the rest in the root."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_nd.parallelize.adapters import low_rank_layers
from lightning_nd.parallelize.blocks import find_blocks
from lightning_nd.parallelize.sequence import is_tokenwise
from lightning_nd.quantized import is_quantized

log = logging.getLogger(__name__)

#: How much larger padding may make a parameter before another dim is split.
MOST_PADDING = 1.25


@dataclass(frozen=True)
class ShardingOptions:
    """How `fully_shard` is called.

    Attributes:
        mixed_precision: dtypes of compute and of gradient reduction.
        cpu_offload: keep parameters, gradients and optimizer state in host memory (CUDA only; on CPU they are there).
        reshard_after_forward: free gathered parameters after forward; an integer keeps them sharded over that many
            ranks.
    """

    mixed_precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    cpu_offload: bool = False
    reshard_after_forward: bool | int = True


def apply_fully_shard(model: nn.Module, mesh: DeviceMesh, options: ShardingOptions) -> None:
    """Shard a model over the ``fsdp`` mesh, in place; `model` becomes the root unit.

    Embedding and head are units of their own, unless they are tied: one parameter must not stand in two units (torch
    refuses it since 2.13), so tied ones stay in the root.
    """
    offload: OffloadPolicy = OffloadPolicy()
    if options.cpu_offload and mesh.device_type != "cpu":
        offload = CPUOffloadPolicy()
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": options.mixed_precision,
        "offload_policy": offload,
        "reshard_after_forward": options.reshard_after_forward,
    }
    if isinstance(options.reshard_after_forward, bool):  # FSDP2 reshards over fewer ranks along dim 0 only
        ranks = mesh.size(mesh.ndim - 1)
        settings["shard_placement_fn"] = lambda parameter: shard_placement(parameter, ranks)
    usual = _usual_dtype(model)
    for _, block in find_blocks(model):
        _shard_unit(block, usual, settings)
    # What backward needs first is not resharded in between: the head's parameters and the root's own.
    kept = {**settings, "reshard_after_forward": False}
    for module in _embeddings(model):
        _shard_unit(module, usual, kept if module is _head(model) else settings)
        if isinstance(module, nn.Embedding) and isinstance(module, FSDPModule):
            module.set_unshard_in_backward(False)  # the gradient of a lookup does not need the table
    _shard_unit(model, usual, kept)


def shard_placement(parameter: torch.Tensor, ranks: int) -> Shard | None:
    """Which dim of a parameter FSDP2 splits over so many ranks; None for the first one.

    FSDP2 pads the first dim to a multiple of the ranks, and gathers and reduces what it padded: 8 experts over 64 ranks
    travel, and are held, as 64. Where that is more than a quarter, a later dim is taken, if one divides evenly that
    tensor parallelism has not split already.
    """
    local, taken = parameter, set()
    if isinstance(parameter, DTensor):
        local = parameter._local_tensor
        taken = {getattr(p, "dim", 0) % local.dim() for p in parameter.placements if not isinstance(p, Replicate)}
    if local.dim() < 2 or -(-local.shape[0] // ranks) * ranks <= MOST_PADDING * local.shape[0]:
        return None
    even = [dim for dim in range(1, local.dim()) if dim not in taken and local.shape[dim] % ranks == 0]
    return Shard(max(even, key=lambda dim: local.shape[dim])) if even else None


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """All FSDP2 units inside a module."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def _embeddings(model: nn.Module) -> list[nn.Module]:
    getters = (getattr(model, f"get_{kind}_embeddings", None) for kind in ("input", "output"))
    found = [module for getter in getters if getter is not None and isinstance(module := getter(), nn.Module)]
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    alone = all(owners[id(p)] == 1 for module in found for p in module.parameters())
    return [m for m in found if not isinstance(m, FSDPModule)] if alone else []


def _head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if getter is not None else None


def _shard_unit(module: nn.Module, usual: torch.dtype, settings: dict[str, Any]) -> None:
    if isinstance(module, FSDPModule):
        return
    packed = [m for m in module.modules() if is_quantized(m) and not isinstance(m, FSDPModule)]
    if packed:  # one unit for all of a block's: bytes are gathered as they are, and layers cast their inputs themselves
        fully_shard(packed, **{**settings, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
    pairs = [m for m in low_rank_layers(module) if not isinstance(m, FSDPModule)]
    pairs = [m for m in pairs if any(p.dtype != usual for p in m.parameters())]
    if pairs:  # one unit for all of a block's: they are small
        fully_shard(pairs, **settings)
    for odd in {p.dtype for p in _unsharded_parameters(module)} - {usual}:
        _shard_odd(module, odd, usual, settings)
    fully_shard(module, **settings)


def _shard_odd(unit: nn.Module, odd: torch.dtype, usual: torch.dtype, settings: dict[str, Any]) -> None:
    """Give modules of another dtype units of their own: FSDP2 gathers a unit in one buffer, of one dtype.

    Norms kept in fp32 within a bf16 model stay fp32 for the optimizer, and compute in bf16 as their neighbours do.
    """
    policy: MixedPrecisionPolicy = settings["mp_policy"]
    for child in list(unit.modules()):
        own = [p for p in child.parameters(recurse=False) if p.dtype == odd]
        if not own or child is unit or isinstance(child, FSDPModule):
            continue
        if any(p.dtype != odd for p in child.parameters()):
            raise ValueError(
                f"NDStrategy: {type(child).__name__} holds parameters of several dtypes; cast the model to one dtype,"
                " or load it with dtype=torch.float32."
            )
        if policy.param_dtype is None and is_tokenwise(child):
            fully_shard(child, **{**settings, "mp_policy": replace(policy, param_dtype=usual)})
        else:
            fully_shard(child, **settings)


def _usual_dtype(model: nn.Module) -> torch.dtype:
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def _unsharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    taken = {id(p) for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in taken]
