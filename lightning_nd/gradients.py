"""Gradients over several meshes: partial sums, norm, clipping, rescaling, finiteness.

A gradient is a DTensor whose placements say which ranks hold what. All of this works on the local shards with one
small collective for the whole model, where torch's own functions need one per parameter or refuse several meshes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The local shards of all gradients that there are."""
    return [_local(p.grad) for p in parameters if p.grad is not None]


def average_partial_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Complete the gradients of these parameters over the tp ranks, in one bucket a dtype.

    Norms under sequence parallelism see only this rank's tokens, norms over heads only this rank's heads
    (Korthikanti et al. 2022, section 4.2.2). Each rank's part has been counted tp times (see `install_style`), so the
    average is the sum of the parts, and a gradient that is complete already stays as it is.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in local_gradients(parameters):
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        parts = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients as one process would have it; equal on every rank.

    Each rank sums the squares of its shards, divided by the number of ranks that hold the same shard; one all-reduce
    over the world adds them. The squares of the norms are added in float64.

    Returns:
        A float32 scalar; 0 without gradients.
    """
    parameters = list(parameters)
    device = _local(parameters[0]).device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_kind: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        by_kind.setdefault((_copies(gradient), gradient.dtype), []).append(_local(gradient))
    for (copies, dtype), gradients in by_kind.items():
        norms = torch._foreach_norm(gradients, 2, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum() / copies
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt().float()


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of the given global norm down to ``max_norm``, as `torch.nn.utils.clip_grad_norm_` does."""
    scale(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp every gradient element to ±``limit``."""
    gradients = local_gradients(parameters)
    if gradients:
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)


def scale(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by a scalar."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in local_gradients(parameters):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), gradients in by_kind.items():
        torch._foreach_mul_(gradients, factor.to(device))


def check_finite(named: Iterable[tuple[str, nn.Parameter]], step: int) -> None:
    """Stop every rank if a gradient is not finite on some rank.

    Collective over the world; every rank passes the same parameters in the same order.

    Args:
        named: parameters by name.
        step: the one that is worked on, from 1 on.

    Raises:
        RuntimeError: the same on every rank, with the step, the first such parameter and the lowest rank that holds
            the element.
    """
    items = [(name, p.grad) for name, p in named if p.grad is not None]
    if not items:
        return
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    flags = torch.stack([(~torch.isfinite(_local(grad))).any() for _, grad in items]).int() * (world - rank)
    if distributed:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    bad = flags.nonzero()
    if len(bad):
        raise RuntimeError(
            f"NDStrategy: the gradient of {items[int(bad[0])][0]} is not finite at step {step}, first in"
            f" the part of it on rank {world - int(flags[bad[0]])}; no weight has been changed. Look at the batch and"
            " the learning rate, or set error_if_nonfinite=False."
        )


def _local(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _copies(gradient: Tensor) -> int:
    """How many ranks of the world hold the same shard of this gradient."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(gradient, DTensor):
        return world
    mesh = gradient.device_mesh
    shards = 1
    for axis, placement in enumerate(gradient.placements):
        if not isinstance(placement, Replicate):
            shards *= mesh.size(axis)
    return world // shards
