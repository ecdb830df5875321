"""The layout of ranks: validated degrees and the named device meshes made from them.

Axes from the outermost to the innermost: ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``. Neighbouring ranks share a
``tp`` group, so the axis that talks most stays inside a node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard", "cp", "tp")

Degree = int | Literal["auto"]


def check_timeout(timeout: object) -> None:
    """Refuse a timeout that process groups cannot take.

    Raises:
        ValueError: it is no `datetime.timedelta`, or not positive.
    """
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        raise ValueError(
            f"NDStrategy: timeout={timeout!r}: give a positive datetime.timedelta, as timedelta(minutes=30), or None"
            " for the backend's own."
        )


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every mesh axis; their product is the number of ranks.

    Args:
        dp_replicate: replicas of the sharded model (HSDP when ``dp_shard`` > 1, DDP when it is 1).
        dp_shard: ranks over which parameters, gradients and optimizer state are sharded (FSDP2).
        cp: ranks that share one sequence.
        tp: ranks that share every layer.

    Raises:
        ValueError: if a degree is not a positive integer.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        _check_degrees(self.as_dict())

    @classmethod
    def resolve(
        cls, *, world_size: int, dp_replicate: Degree = 1, dp_shard: Degree = "auto", cp: Degree = 1, tp: Degree = 1
    ) -> ParallelDims:
        """Fill the one ``"auto"`` degree with the ranks that the others leave.

        Raises:
            ValueError: if more than one degree is ``"auto"``, a degree is not positive, or the product of the degrees
                is not ``world_size``. The message holds every number.
        """
        given: dict[str, Degree] = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        _check_degrees(given, world_size)
        picture = _picture(given)
        autos = [axis for axis, degree in given.items() if degree == "auto"]
        if len(autos) > 1:
            raise ValueError(
                f"ParallelDims: only one degree can be 'auto', got {' and '.join(autos)} ({picture} for {world_size}"
                f" rank{'s' if world_size > 1 else ''}). Give a number to all but one of them. Allowed:"
                f" {_divisors(world_size)}."
            )
        fixed = math.prod(degree for degree in given.values() if degree != "auto")
        if world_size % fixed or (not autos and fixed != world_size):
            raise ValueError(
                f"ParallelDims: {picture} does not fit {world_size} rank{'s' if world_size > 1 else ''}:"
                f" the given degrees multiply to {fixed}, and the product of all degrees must be the number of ranks."
                f" Allowed degrees are {_divisors(world_size)}; change one, leave"
                f" dp_shard at 'auto', or start {fixed}{' or a multiple of it' if autos else ''} processes (devices ×"
                " num_nodes)."
            )
        resolved = {axis: world_size // fixed if degree == "auto" else degree for axis, degree in given.items()}
        return cls(**resolved)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of data ranks: ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    def as_dict(self) -> dict[str, int]:
        """Degrees by axis name, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank on every axis."""
        position, rest = {}, rank
        for axis in reversed(AXES):
            rest, position[axis] = divmod(rest, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def build_meshes(self, device_type: str, timeout: timedelta | None = None) -> Meshes:
        """Make every mesh that the strategy uses; collective over all ranks.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.
            timeout: applied to the process group of every mesh; ``None`` keeps torch's default.
        """
        from torch.distributed.device_mesh import init_device_mesh

        ranks = init_device_mesh(device_type, (self.world_size,), mesh_dim_names=("ranks",))
        axes = ranks._unflatten(0, tuple(self.as_dict().values()), AXES)
        # Parameters live on their own view, in which dp_shard and cp are one axis: fully_shard takes a mesh of
        # (dp_shard, cp) for "replicate, shard", and slicing a flattened axis out of a root mesh is deprecated.
        params = ranks._unflatten(
            0, (self.dp_replicate, self.dp_shard * self.cp, self.tp), ("dp_replicate", "dp_shard_cp", "tp")
        )
        meshes = Meshes(
            axes=axes,
            data=axes["dp_replicate", "dp_shard"]._flatten("data_parallel"),
            loss=axes["dp_replicate", "dp_shard", "cp"]._flatten("loss"),
            fsdp=params["dp_replicate", "dp_shard_cp"] if self.dp_replicate > 1 else params["dp_shard_cp"],
            cp=axes["cp"],
            tp=params["tp"],
            dims=self,
        )
        if timeout is not None:
            meshes.set_timeout(timeout)
        return meshes

    def __str__(self) -> str:
        return _picture(self.as_dict())


@dataclass(frozen=True)
class Meshes:
    """The device meshes by purpose; made once by `ParallelDims.build_meshes` and never rebuilt.

    Attributes:
        axes: all four axes.
        data: 1-D, ``dp_replicate × dp_shard``: which rows a rank reads.
        loss: 1-D, ``dp_replicate × dp_shard × cp``: token counts, logged means, evaluation sums.
        fsdp: 1-D ``dp_shard × cp``, or 2-D ``dp_replicate, dp_shard × cp`` (HSDP): what `fully_shard` gets.
        cp: the attention ring.
        tp: tensor and sequence parallelism.
        dims: the degrees.
    """

    axes: DeviceMesh
    data: DeviceMesh
    loss: DeviceMesh
    fsdp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    dims: ParallelDims

    def groups(self) -> list[ProcessGroup]:
        """Every process group behind the meshes, each once."""
        meshes = (self.axes, self.data, self.loss, self.fsdp, self.tp)
        found = [group for mesh in meshes for group in mesh.get_all_groups()]
        return list(dict.fromkeys(found))

    def set_timeout(self, timeout: timedelta) -> None:
        """Give every group this timeout: a mesh's own groups do not take over that of the world group."""
        from torch.distributed.distributed_c10d import _set_pg_timeout

        for group in self.groups():
            _set_pg_timeout(timeout, group)


def _check_degrees(given: Mapping[str, object], world_size: int | None = None) -> None:
    def wrong(degree: object) -> bool:
        if world_size is not None and degree == "auto":
            return False
        return isinstance(degree, bool) or not isinstance(degree, int) or degree < 1

    found = {axis: degree for axis, degree in given.items() if wrong(degree)}
    if found:
        ranks = f" for {world_size} rank{'s' if world_size > 1 else ''}" if world_size else ""
        allowed = _divisors(world_size) if world_size else "1, 2, 3, …"
        kind = "a positive integer" if len(found) == 1 else "positive integers"
        raise ValueError(
            f"ParallelDims: {' and '.join(found)} must be {kind}, got {' and '.join(map(repr, found.values()))}"
            f" ({_picture(given)}{ranks}). Allowed: {allowed}; and one degree may"
            " be 'auto', which takes the ranks that the others leave."
        )


def _picture(degrees: Mapping[str, object]) -> str:
    return " × ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def _divisors(world_size: int) -> str:
    found = [str(d) for d in range(1, world_size + 1) if world_size % d == 0]
    return f"the divisors of {world_size} ({', '.join(found)})"
