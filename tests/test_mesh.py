"""Degrees and what is said about those that do not fit."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning import Trainer
from pool import Pool

from lightning_nd import NDStrategy, ParallelDims

degree = st.integers(1, 4)


@given(replicate=degree, shard=degree, cp=degree, tp=degree)
def test_coordinates_number_every_rank_once(replicate: int, shard: int, cp: int, tp: int) -> None:
    dims = ParallelDims(replicate, shard, cp, tp)
    places = [tuple(dims.coordinates(rank).values()) for rank in range(dims.world_size)]
    assert places == sorted(set(places))  # outermost axis first, tp the fastest
    assert len(places) == replicate * shard * cp * tp
    assert places[-1] == (replicate - 1, shard - 1, cp - 1, tp - 1)


@given(replicate=degree, shard=degree, cp=degree, tp=degree)
def test_auto_takes_what_the_others_leave(replicate: int, shard: int, cp: int, tp: int) -> None:
    world = replicate * shard * cp * tp
    assert ParallelDims.resolve(world_size=world, dp_replicate=replicate, cp=cp, tp=tp).dp_shard == shard
    dims = ParallelDims.resolve(world_size=world, dp_replicate="auto", dp_shard=shard, cp=cp, tp=tp)
    assert dims.as_dict() == {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}


@pytest.mark.parametrize(
    ("world", "degrees", "said"),
    [
        (3, {"tp": 2}, ["3 ranks", "tp=2", "dp_shard=auto", "1, 3"]),
        (2, {"dp_shard": 1, "tp": 2, "cp": 2}, ["2 ranks", "tp=2", "cp=2", "multiply to 4"]),
        (4, {"dp_shard": 2}, ["4 ranks", "dp_shard=2", "multiply to 2"]),
        (2, {"dp_replicate": -1, "dp_shard": -2}, ["dp_replicate and dp_shard", "integers, got -1 and -2", "2 ranks"]),
        (2, {"dp_shard": 0}, ["dp_shard", "positive integer", "got 0", "'auto'", "2 ranks", "tp=1", "(1, 2)"]),
        (6, {"dp_shard": -2, "tp": 3}, ["dp_shard", "got -2", "6 ranks", "dp_replicate=1", "tp=3", "(1, 2, 3, 6)"]),
        (2, {"tp": "auto2"}, ["tp", "positive integer", "got 'auto2'"]),
        (2, {"tp": True}, ["tp", "positive integer", "got True"]),
        (2, {"tp": 1.0}, ["tp", "positive integer", "got 1.0"]),
        (
            2,
            {"dp_shard": "auto", "dp_replicate": "auto"},
            ["only one degree can be 'auto'", "dp_replicate and dp_shard", "2 ranks", "(1, 2)"],
        ),
    ],
)
def test_what_does_not_fit_is_said_with_every_number(world: int, degrees: dict[str, int], said: list[str]) -> None:
    with pytest.raises(ValueError, match="ParallelDims") as refusal:
        ParallelDims.resolve(world_size=world, **degrees)  # type: ignore[arg-type]
    for part in said:
        assert part in str(refusal.value)


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"dp_shard": -1}, {"dp_replicate": 0}])
def test_the_trainer_refuses_degrees_with_every_number_when_it_is_made(degrees: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"positive integer.*cp=1.*for 2 ranks.*\(1, 2\)"):
        Trainer(strategy=NDStrategy(**degrees), accelerator="cpu", devices=2, logger=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"dp_shard": -1}])
def test_dims_refuse_degrees_when_they_are_made(degrees: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positive integer"):
        ParallelDims(**degrees)


def _groups(rank: int, world_size: int) -> dict[str, list[int]]:
    import torch
    import torch.distributed as dist

    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=1, tp=2)
    meshes = dims.build_meshes("cpu", timedelta(seconds=77))
    for group in meshes.groups():
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77), group.group_desc
    named = {"data": meshes.data, "loss": meshes.loss, "cp": meshes.cp, "tp": meshes.tp}
    members = {name: dist.get_process_group_ranks(mesh.get_group()) for name, mesh in named.items()}
    members["shard"] = dist.get_process_group_ranks(meshes.fsdp["dp_shard_cp"].get_group())
    members["replicate"] = dist.get_process_group_ranks(meshes.fsdp["dp_replicate"].get_group())
    return members


def test_meshes_hold_the_right_ranks_and_the_timeout(pool: Pool) -> None:
    members = pool.run(_groups, 8)
    assert members[5] == {
        "data": [1, 3, 5, 7],
        "loss": [1, 3, 5, 7],
        "cp": [5],
        "tp": [4, 5],
        "shard": [5, 7],
        "replicate": [1, 5],
    }
