"""The pool itself: groups of the right size, failures that are seen, nothing left behind."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import train_parallel
from pool import Pool, WorkerError, WorkerTimeout, tiny_trainer
from reference import make_batches
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def _sum_of_ranks(rank: int, world_size: int, scale: int = 1) -> tuple[int, int, float]:
    value = torch.tensor(float(rank * scale))
    dist.all_reduce(value)
    return rank, dist.get_world_size(), value.item()


def _fail_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise KeyError(f"told to fail on {failing}")
    dist.barrier()


def _sleep_on(rank: int, world_size: int, sleeping: int) -> None:
    print(f"rank {rank} is here", flush=True)
    if rank == sleeping:
        time.sleep(600)
    dist.barrier()


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def _mesh_matmul(rank: int, world_size: int, shape: tuple[int, int]) -> float:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh["b"], [Shard(0)])
    product = x @ x
    assert isinstance(product, DTensor)
    return product.full_tensor().sum().item()


def _train_on_a_mesh(rank: int, world_size: int) -> None:
    train_parallel(rank, world_size, "llama", (1, 2, 2), make_batches(1))


def _threads_and_meshes(rank: int, world_size: int) -> tuple[int, int]:
    meshes = [o for o in gc.get_objects() if isinstance(o, DeviceMesh)]
    return len(os.listdir("/proc/self/task")), len(meshes)


def _leave_traces(rank: int, world_size: int) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.manual_seed(rank)
    torch.set_default_dtype(torch.float64)


def _look_for_traces(rank: int, world_size: int) -> tuple[Any, ...]:
    return os.environ.get("LEFT_BEHIND"), torch.get_default_dtype(), torch.rand(()).item()


def _process_ids(rank: int, world_size: int) -> int:
    return os.getpid()


def _without_group(rank: int, world_size: int) -> tuple[bool, str]:
    return dist.is_initialized(), os.environ["MASTER_PORT"]


def _plain_ddp(rank: int, world_size: int) -> tuple[int, int, float]:
    from lightning.pytorch.demos.boring_classes import BoringModel

    model = BoringModel()
    trainer = tiny_trainer(rank, world_size, "ddp", max_steps=2)
    trainer.fit(model)
    return trainer.global_rank, trainer.world_size, model.layer.weight.sum().item()


@pytest.mark.parametrize("world_size", [1, 2, 4, 3])
def test_group_has_the_size_asked_for(pool: Pool, world_size: int) -> None:
    total = 10.0 * sum(range(world_size))
    assert pool.run(_sum_of_ranks, world_size, scale=10) == [(r, world_size, total) for r in range(world_size)]


def test_workers_are_reused(pool: Pool) -> None:
    first = pool.run(_process_ids, 3)
    assert len({*first, os.getpid()}) == 4
    assert pool.run(_process_ids, 2) == first[:2]


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_comes_back_with_rank_and_traceback(pool: Pool, failing: int) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"_fail_on failed on rank {failing}: KeyError.*told to fail") as caught:
        pool.run(_fail_on, 2, failing)
    assert time.monotonic() - start < 30
    assert (caught.value.rank, caught.value.type_name) == (failing, "KeyError")
    assert "raise KeyError" in caught.value.failures[failing]
    assert pool.run(_sum_of_ranks, 2)[0] == (0, 2, 1.0)  # and the pool lives on


def test_hang_names_the_ranks_and_where_they_stand(pool: Pool) -> None:
    with pytest.raises(WorkerTimeout, match=r"ranks \[0, 1\] of 2 did not answer within") as caught:
        pool.run(_sleep_on, 2, 1, timeout=1)
    text = str(caught.value)
    assert caught.value.ranks == [0, 1]
    assert text.count("in _sleep_on") == 2
    assert "in barrier" in text
    assert "rank 1 is here" in text
    assert pool.run(_sum_of_ranks, 2)[1] == (1, 2, 1.0)


def test_death_of_a_worker_is_a_failure(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"died|Connection closed") as caught:
        pool.run(_die, 2)
    assert "exit code 3" in str(caught.value)
    assert pool.run(_sum_of_ranks, 2)[1] == (1, 2, 1.0)


def test_meshes_do_not_leak_between_runs(pool: Pool) -> None:
    for shape in [(2, 2), (1, 4), (2, 2), (4, 1), (2, 2)]:
        expected = (torch.arange(16.0).reshape(4, 4) @ torch.arange(16.0).reshape(4, 4)).sum().item()
        assert pool.run(_mesh_matmul, 4, shape) == [expected] * 4


def test_groups_end_with_their_run(pool: Pool) -> None:
    """Something that still holds a mesh would keep the threads of its groups alive, a dozen more each run."""
    pool.run(_mesh_matmul, 4, (2, 2))
    pool.run(_train_on_a_mesh, 4)
    assert pool.run(_threads_and_meshes, 4, process_group=False) == [(1, 0)] * 4


def test_state_does_not_leak_between_runs(pool: Pool) -> None:
    before = pool.run(_look_for_traces, 2)
    pool.run(_leave_traces, 2)
    assert pool.run(_look_for_traces, 2) == before
    assert before[0][:2] == (None, torch.float32)


def test_without_a_process_group(pool: Pool) -> None:
    (first, port), (second, other_port) = pool.run(_without_group, 2, process_group=False)
    assert not first
    assert not second
    assert port == other_port


def test_refuses_more_ranks_than_workers(pool: Pool) -> None:
    with pytest.raises(ValueError, match="world_size is 99"):
        pool.run(_sum_of_ranks, 99)


def test_a_trainer_runs_inside_workers(pool: Pool) -> None:
    (rank0, size0, weight0), (rank1, size1, weight1) = pool.run(_plain_ddp, 2)
    assert (rank0, rank1, size0, size1) == (0, 1, 2, 2)
    assert weight0 == weight1
    assert pool.run(_sum_of_ranks, 2)[0] == (0, 2, 1.0)
