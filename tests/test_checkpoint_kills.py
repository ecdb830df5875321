"""Two ranks that do nothing but save are killed at 50 random moments: after each there is a whole checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_nd.checkpoint.files import tidy
from lightning_nd.checkpoint.inspect import Contents
from lightning_nd.checkpoint.manifest import damage, find_last, read_manifest
from lightning_nd.checkpoint.saver import Saver

MOMENTS, RANKS = 25, 2  # sync and async
ROWS = 64


def save_for_ever(rank: int, store: str, folder: Path, first: int, in_background: bool) -> None:
    """Save step after step, keep two; ``done`` has the last step that is known to be complete."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    saver = Saver({"dp_shard": RANKS}, sharded=True, in_background=in_background, timeout=None)
    module: Any = nn.Linear(1, 1)
    module.automatic_optimization = True
    loop = SimpleNamespace(_combined_loader=None)
    state = SimpleNamespace(fn=TrainerFn.FITTING, stage="train")
    trainer: Any = SimpleNamespace(
        lightning_module=module, accumulate_grad_batches=1, state=state, fit_loop=loop, lr_scheduler_configs=[]
    )
    trainer.precision = "32-true"
    done = os.open(folder / "done", os.O_CREAT | os.O_WRONLY)
    step = first
    while True:
        weights = DTensor.from_local(torch.full((ROWS // RANKS, 32), float(step)), mesh, [Shard(0)])
        checkpoint = {"state_dict": {"weight": weights}, "optimizer_states": [], "global_step": step, "epoch": 0}
        saver.save(trainer, checkpoint, folder / f"step-{step}.ckpt")
        saver.remove(folder / f"step-{step - 2}.ckpt")
        complete = step - in_background  # what is written in the background is known to be so at the next save
        if rank == 0 and complete >= first:
            os.pwrite(done, f"{complete:8d}".encode(), 0)
        step += 1


def fork(rank: int, *args: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(rank, *args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def killed_again_and_again(rank: int, world: int, place: str, in_background: bool) -> list[tuple[int, int, bool]]:
    """For each moment: step known to be complete, step of the newest whole checkpoint, whether a save was under way."""
    draw = random.Random(5 + in_background)
    folder, found = Path(place), []
    newest = 0
    for moment in range(MOMENTS):
        done = folder / "done"
        done.unlink(missing_ok=True)
        children = [fork(r, f"{place}/store-{moment}", folder, newest + 1, in_background) for r in range(RANKS)]
        deadline = time.monotonic() + 60
        while not done.exists() or not done.read_text().strip():
            assert time.monotonic() < deadline, "nothing is saved"
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        for child in children if draw.random() < 0.5 else [draw.choice(children)]:
            os.kill(child, signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.05))  # for the other, which notices or goes on
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        complete = int(done.read_text())
        under_way = any(path.name.startswith(".") for path in folder.iterdir())
        tidy(folder)  # as a resumed run does
        whole, skipped = find_last([folder])
        assert not skipped, skipped
        newest = read_manifest(whole[0]).step
        for path in whole:
            assert damage(path) == []
            assert torch.equal(
                Contents.of(path).weight("weight"), torch.full((ROWS, 32), float(read_manifest(path).step))
            )
        found.append((complete, newest, under_way))
    return found


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_killed_at_random_moments_nothing_complete_is_lost(pool: Pool, in_background: bool, tmp_path: Path) -> None:
    (found,) = pool.run(killed_again_and_again, 1, str(tmp_path), in_background, timeout=120, process_group=False)
    assert len(found) == MOMENTS
    for complete, newest, _ in found:
        assert newest >= complete > 0
    assert sum(under_way for *_, under_way in found) >= MOMENTS // 4, found  # or it was not killed while saving
