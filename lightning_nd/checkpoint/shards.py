"""Which part of a parameter this rank holds, and the way back from the parts to the whole.

A parameter under tensor parallelism and `fully_shard` is split by tp first; FSDP2 then splits what tp left,
contiguously. DTensor writes that order down as a `_StridedShard` on the FSDP axis and reads placements from
the first axis to the last. For packed weights (tp itself strided, on the dim that FSDP shards) reading them
that way gives other rows than those that FSDP2 holds, so this file goes from the last axis to the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Interval = tuple[int, int]
"""Half-open range of indices along one dim of the whole parameter."""

Box = list[list[Interval]]
"""For each dim, the ascending ranges that a rank holds; its shard is their product, in that order."""


def local_box(param: Tensor) -> Box:
    """Global indices of the part of `param` that this rank holds.

    Args:
        param: plain tensor (the whole) or DTensor with Replicate, Shard and _StridedShard placements.

    Raises:
        ValueError: placements that no tensor-parallel plan followed by `fully_shard` makes.
        RuntimeError: the shard does not have the shape that the placements imply.
    """
    if not isinstance(param, DTensor):
        return [[(0, size)] for size in param.shape]
    box = _boxes(param.shape, param.device_mesh, param.placements)[0]
    implied, local = _extent(box), param.to_local()
    if implied != tuple(local.shape):
        raise RuntimeError(
            f"A shard of {tuple(local.shape)} of a {tuple(param.shape)} parameter was found where "
            f"placements {param.placements} over {param.device_mesh} imply {implied}."
        )
    return box


def from_local_like(local: Tensor, like: Tensor) -> Tensor:
    """`local` laid out as `like`: a DTensor with its mesh, placements and global shape, or itself."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gather_full(param: Tensor) -> Tensor:
    """The whole of `param`, on every rank of its mesh and on its device. Collective over that mesh.

    Unlike `DTensor.full_tensor` this is right for packed weights that tp and FSDP2 split on the same dim.
    """
    if not isinstance(param, DTensor):
        return param.detach()
    mesh, placements = param.device_mesh, param.placements
    boxes = _boxes(param.shape, mesh, placements)
    whole = param.to_local().detach()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        # Before this axis was split there were the axes after it: boxes[axis + 1].
        shape = torch.Size(_extent(boxes[axis + 1]))
        stride = torch.empty(shape, device="meta").stride()
        one_axis = mesh if mesh.ndim == 1 else mesh[_axis_names(mesh)[axis]]
        part = DTensor.from_local(
            whole,
            one_axis,
            [_split_of(placement, axis, mesh.ndim)],
            run_check=False,
            shape=shape,
            stride=stride,
        )
        whole = part.full_tensor()
    return whole


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no axis names: build it with init_device_mesh(..., mesh_dim_names=...).")
    return mesh.mesh_dim_names


def _extent(box: Box) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in intervals) for intervals in box)


def _split_of(placement: Placement, axis: int, axes: int) -> Placement:
    """How an axis splits what the later axes left: FSDP2's strided marker is a plain split of that."""
    if isinstance(placement, _StridedShard) and axis < axes - 1:
        return Shard(placement.dim)
    return placement


def _boxes(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Box]:
    """For each i the box after splits by the last axis down to the i-th; the last entry is the whole."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"This rank is not part of the parameter's mesh {mesh}.")
    boxes: list[Box] = [[[(0, size)] for size in shape]]
    owner: dict[int, int] = {}
    for axis in reversed(range(mesh.ndim)):
        box = list(boxes[0])
        placement = placements[axis]
        if isinstance(placement, (Shard, _StridedShard)):
            dim = placement.dim % len(shape)
            if dim in owner and isinstance(placement, Shard):
                raise ValueError(
                    f"Placements {tuple(placements)} over {mesh} split dim {dim} on axis {axis} before axis "
                    f"{owner[dim]}; only tensor parallelism followed by fully_shard is supported."
                )
            owner[dim] = axis
            box[dim] = _split(box[dim], _split_of(placement, axis, mesh.ndim), mesh.size(axis), coordinate[axis])
        elif not isinstance(placement, Replicate):
            raise ValueError(f"Placement {placement} is no way to store a parameter: Replicate or Shard is needed.")
        boxes.insert(0, box)
    return boxes


def _split(intervals: list[Interval], placement: Placement, parts: int, index: int) -> list[Interval]:
    total = sum(stop - start for start, stop in intervals)
    if isinstance(placement, _StridedShard):
        spans = []
        for start, stop in _chunks(total, int(placement.split_factor)):
            a, b = _chunks(stop - start, parts)[index]
            spans.append((start + a, start + b))
    else:
        spans = [_chunks(total, parts)[index]]
    taken: list[Interval] = []
    for start, stop in spans:
        seen = 0
        for low, high in intervals:
            a, b = max(start - seen, 0), min(stop - seen, high - low)
            if a < b:
                taken.append((low + a, low + b))
            seen += high - low
    return taken


def _chunks(size: int, parts: int) -> list[Interval]:
    """Bounds of `torch.chunk`, empty ones included."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]
