"""Differentiable collectives between the two layouts of an activation under tensor parallelism.

Each pair is named forward_backward. The conjugate pairs are those of Megatron-LM (Shoeybi et al. 2019, section 3,
``f`` and ``g``) and its sequence parallelism (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

# torch 2.13 gave them new names, and warns of the old ones in every rank
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the equally sized shards of all ranks along ``dim``."""
    size = group.size()
    if size == 1:
        return x
    x = x.contiguous()
    shape = (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    # The result must own its memory: FSDP2 warns of modules that return views.
    if x.shape[:dim].numel() == 1:  # one row: the shards already follow each other
        whole = x.new_empty(shape)
        all_gather_single(whole.view(-1), x.view(-1), group=group)
        return whole
    gathered = x.new_empty((size, *x.shape))
    all_gather_single(gathered.view(-1), x.view(-1), group=group)
    return torch.cat(gathered.unbind(0), dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sum over the ranks and keep this rank's shard of ``dim``, which the group's size must divide."""
    size = group.size()
    if size == 1:
        return x
    shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    stacked = x.reshape(shape).movedim(dim, 0).contiguous()
    shard = stacked.new_empty(stacked.shape[1:])
    reduce_scatter_single(shard.view(-1), stacked.view(-1), group=group)
    return shard


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks; the input is left as it is."""
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def own_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of ``dim``, which the group's size must divide."""
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


class _Identity_AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _AllReduce_Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllGather_ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter_AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _AllGather_Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(grad, ctx.dim, ctx.group), None, None


class _Slice_AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_slice(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _Identity_SumOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dim, size = ctx.dim, ctx.group.size()
        missing = -grad.shape[dim] % size
        padded = torch.cat([grad, grad.new_zeros(*grad.shape[:dim], missing, *grad.shape[dim + 1 :])], dim)
        summed = reduce_scatter(padded if missing else grad, dim, ctx.group)
        first, last = _own_range(grad, dim, ctx.group)
        own = torch.zeros_like(grad)
        own.narrow(dim, first, last - first).copy_(summed.narrow(dim, 0, last - first))
        return own, None, None


class _Identity_Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, last = _own_range(grad, ctx.dim, ctx.group)
        own = torch.zeros_like(grad)
        own.narrow(ctx.dim, first, last - first).copy_(grad.narrow(ctx.dim, first, last - first))
        return own, None, None


def _own_range(x: Tensor, dim: int, group: ProcessGroup) -> tuple[int, int]:
    """This rank's part of a dim whose last part may be short."""
    length = x.shape[dim]
    part = -(-length // group.size())
    return min(group.rank() * part, length), min((group.rank() + 1) * part, length)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def identity_allreduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Replicated activation into work that every rank does for its own shard: the gradients add up."""
    return _Identity_AllReduce.apply(x, group)


def allreduce_identity(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial sums into the replicated total."""
    return _AllReduce_Identity.apply(x, group)


def allgather_reducescatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Shard of ``dim`` into the whole, for work whose gradients are partial on every rank."""
    return _AllGather_ReduceScatter.apply(x, dim, group)


def reducescatter_allgather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Partial sums into this rank's shard of ``dim`` of the total."""
    return _ReduceScatter_AllGather.apply(x, dim, group)


def allgather_slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Shard of ``dim`` into the whole, for work that every rank repeats: the gradient is complete everywhere."""
    return _AllGather_Slice.apply(x, dim, group)


def identity_sum_own(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """As `identity_allreduce`, where only this rank's part of ``dim`` is asked for below: the rest gets zeros."""
    return _Identity_SumOwn.apply(x, dim, group)


def identity_own(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The same values; the gradient outside of this rank's part of ``dim`` is dropped."""
    return _Identity_Own.apply(x, dim, group)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The same values; the gradient is multiplied."""
    return _ScaleGradient.apply(x, factor)


def slice_allgather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Replicated activation into this rank's shard of ``dim``."""
    return _Slice_AllGather.apply(x, dim, group)
