"""Preemption, full disks and slow disks: what was trained is saved once, by all ranks together, or not lost.

Reported elsewhere: C11 (export times out on a slow disk), C14 (the first save meets a full disk), C18 (saving under tp
hangs), E01 (one rank fails while saving).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pool as pool_module
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pool import Pool, PoolEnvironment
from resuming import SaveAt, Story, Trained, check_continues, plain, run

from lightning_nd import save_pretrained
from lightning_nd.checkpoint import export, files
from lightning_nd.checkpoint.manifest import damage, read_manifest

ROOT = Path(__file__).resolve().parents[1]
SHORT: dict[str, Any] = {"max_steps": 6, "enable_checkpointing": True}


class Signal(SaveAt):
    """Sends a signal to its own rank in the midst of a step."""

    signal = signal.SIGTERM

    def __init__(self, folder: str, rank: int, step: int) -> None:
        super().__init__(folder, ())
        self.rank, self.at = rank, step

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.at:
            os.kill(os.getpid(), self.signal)


def preempted(rank: int, world: int, rows: str, folder: str, victim: int, accumulate: int) -> tuple[int, Story]:
    degrees = {"dp_shard": 2, "tp": world // 2}
    code = 0
    try:
        run(
            rank,
            world,
            rows,
            folder,
            degrees,
            accumulate=accumulate,
            trainer=SHORT,
            callbacks=[Signal(folder, victim, 2)],
        )
    except SIGTERMException as error:
        code = int(error.code or 0)
    return code, run(
        rank,
        world,
        rows,
        folder,
        degrees,
        accumulate=accumulate,
        ckpt="last",
        trainer=SHORT,
        callbacks=[SaveAt(folder, ())],
    )


@pytest.mark.parametrize(("world", "victim", "accumulate"), [(2, 1, 1), (4, 0, 2)])
def test_sigterm_to_one_rank_saves_once_on_all_at_one_step(
    pool: Pool, rows: str, world: int, victim: int, accumulate: int, tmp_path: Path
) -> None:
    whole = plain(rows, max_steps=6)
    for code, after in pool.run(preempted, world, rows, str(tmp_path), victim, accumulate, timeout=120):
        assert code == 143
        check_continues(whole, after, 3)
    assert read_manifest(tmp_path / "preempted.ckpt").step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["preempted.ckpt"]


SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
import torch
from lightning.pytorch import Callback, Trainer
from resuming import SaveAt, Trained, make_data
from lightning_nd import NDStrategy

class Preempt(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getppid(), signal.SIGTERM)

torch.manual_seed(7)
module = Trained()
trainer = Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(dp_shard=2), max_steps=6, logger=False,
                  enable_progress_bar=False, enable_model_summary=False, callbacks=[SaveAt("saved", ()), Preempt()])
trainer.fit(module, make_data({rows!r}, 2, 1), ckpt_path="last")
"""


def environ() -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")}
    return {**keep, "PYTHONPATH": os.pathsep.join([str(ROOT), keep.get("PYTHONPATH", "")])}


def test_sigterm_to_the_launcher_ends_with_143(rows: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=str(ROOT / "tests"), rows=rows))
    command = [sys.executable, "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 143, ended.stderr[-3000:]
    assert "asked to stop by SIGTERM: saved step" in ended.stderr
    assert read_manifest(tmp_path / "saved" / "preempted.ckpt").step in (3, 4)
    assert "Traceback" not in ended.stderr


EVALUATION = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
from lightning.pytorch import LightningModule, Trainer
from families import make_model
from reference import make_batches
from lightning_nd import NDStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model("llama")

    def step(self, batch, index):
        if self.global_rank == 0:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            time.sleep(60)  # rank 0 waits for us in a collective
        self.model(**batch)

    validation_step = test_step = predict_step = step

trainer = Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(dp_shard=2), logger=False,
                  enable_progress_bar=False, enable_model_summary=False)
getattr(trainer, {what!r})(Module(), torch.utils.data.DataLoader(make_batches(4), batch_size=None))
"""


def test_sigterm_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text(EVALUATION.format(tests=str(ROOT / "tests"), what="validate"))
    command = [sys.executable, "evaluate.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=50)
    assert ended.returncode == -signal.SIGTERM, ended.stderr[-3000:]


REQUEUE = """#!/bin/sh
echo "$@" >> {folder}/scontrol
"""


class Slurm(PoolEnvironment, SLURMEnvironment):
    """A task of a SLURM job that is to be queued again on SIGUSR1."""

    def __init__(self, rank: int, world: int) -> None:
        PoolEnvironment.__init__(self, rank, world)
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR1


class Requeue(Signal):
    signal = signal.SIGUSR1


def requeued(rank: int, world: int, rows: str, folder: str) -> int:
    os.environ.update(PATH=f"{folder}:{os.environ['PATH']}", SLURM_JOB_ID="17")
    kept = pool_module.PoolEnvironment
    pool_module.PoolEnvironment = Slurm  # type: ignore[misc]
    stacks = signal.getsignal(signal.SIGUSR1)
    try:
        callbacks = [Requeue(f"{folder}/saved", 1, 2)]
        run(rank, world, rows, folder, {"dp_shard": 2}, trainer=SHORT, callbacks=callbacks)
    except SIGTERMException as error:
        return int(error.code or 0)
    finally:
        pool_module.PoolEnvironment = kept  # type: ignore[misc]
        signal.signal(signal.SIGUSR1, stacks)
    return 0


def test_slurms_signal_saves_on_all_ranks_and_queues_the_job_once(pool: Pool, rows: str, tmp_path: Path) -> None:
    """SLURM sends it to every task or to one; Lightning's handler would save in the midst of a collective."""
    (tmp_path / "scontrol").write_text("")
    command = tmp_path / "bin"
    command.mkdir()
    (command / "scontrol").write_text(REQUEUE.format(folder=tmp_path))
    (command / "scontrol").chmod(0o755)
    assert pool.run(requeued, 2, rows, str(command), timeout=120) == [143, 143]
    assert read_manifest(command / "saved" / "preempted.ckpt").step == 3
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    assert "asked to stop by SLURM (SIGUSR1): saved step 3" in pool.output(0)


RESTARTED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
from lightning.pytorch import Callback, Trainer
from resuming import SaveAt, Trained, make_data
from lightning_nd import NDStrategy

class Die(Callback):
    def on_before_backward(self, trainer, *_):
        restarted = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if trainer.global_rank == 1 and trainer.global_step == 3 and not restarted:
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(7)
module = Trained()
trainer = Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(dp_shard=2), max_steps=5, logger=False,
                  enable_progress_bar=False, enable_model_summary=False, callbacks=[SaveAt("saved", (2,)), Die()],
                  gradient_clip_val=1.0)
trainer.fit(module, make_data({rows!r}, 2, 1))
torch.save(module.story, f"story-{{trainer.global_rank}}.pt")
"""


def test_torchrun_restarts_from_the_last_complete_checkpoint(rows: str, tmp_path: Path) -> None:
    """A rank is killed; what is said of it, and that the job that torchrun starts anew is the same run."""
    (tmp_path / "train.py").write_text(RESTARTED.format(tests=str(ROOT / "tests"), rows=rows))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    ended = subprocess.run(
        [*command, "--monitor-interval=0.5", "train.py"],
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"rank 1 on \S+, step 4, backward: its process has ended without a word", ended.stderr)
    assert "going on from" in ended.stderr
    after = torch.load(tmp_path / "story-0.pt", weights_only=False)
    whole = plain(rows, max_steps=5)
    assert after.rows == whole.rows[2:]
    assert after.losses == pytest.approx(whole.losses[2:], rel=1e-5)


# -- disks ------------------------------------------------------------------------------------------------------------


def start(rank: int, world: int, rows: str, folder: str, step: int | None, free: int | None) -> str:
    """Train where the disk has ``free`` bytes, or runs full in the save at ``step``; the error."""
    kept = files.shutil
    if free is not None:
        usage = type("Usage", (), {"free": free})
        files.shutil = type("Shutil", (), {**vars(files.shutil), "disk_usage": staticmethod(lambda _: usage)})  # type: ignore[attr-defined]
    seen: list[str] = []

    def full(name: str) -> None:
        seen.append(name)
        if step is not None and name == "shard" and seen.count("staged") == step and rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    files._phase_hook = full
    try:
        run(rank, world, rows, folder, {"dp_shard": 2}, trainer=SHORT, callbacks=[SaveAt(folder, (2, 4), save_top_k=1)])
    except OSError as error:
        return str(error)
    finally:
        files.shutil, files._phase_hook = kept, None
    return ""


def test_a_disk_without_room_is_refused_at_the_start(pool: Pool, rows: str, tmp_path: Path) -> None:
    for said in pool.run(start, 2, rows, str(tmp_path), None, 100_000):
        assert str(tmp_path) in said
        assert "needs 2,181,504 bytes, and 100,000 are free" in said
    assert not list(tmp_path.iterdir())


def test_a_disk_that_runs_full_costs_no_older_checkpoint(pool: Pool, rows: str, tmp_path: Path) -> None:
    for said in pool.run(start, 2, rows, str(tmp_path), 2, None):
        assert str(tmp_path / "step-4.ckpt") in said
        assert "bytes are needed" in said
        assert "are free" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-2.ckpt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB, which is room for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(disk)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(rank: int, world: int, rows: str, folder: str, options: dict[str, Any], axis: str = "dp_shard") -> str:
    try:
        callbacks = [SaveAt(folder, (2, 3, 4))]
        run(rank, world, rows, folder, {axis: 2}, trainer=SHORT, callbacks=callbacks, strategy=options)
    except OSError as error:
        return str(error)
    return ""


OPTIONS = [{}, {"async_checkpoint": True}, {"save_distributed_checkpoint": False}]


@pytest.mark.parametrize(
    ("options", "axis"),
    [*((one, "dp_shard") for one in OPTIONS), ({}, "dp_replicate")],
    ids=["sync", "async", "one-file", "replicas"],
)
def test_a_real_disk_that_runs_full(
    pool: Pool, rows: str, options: dict[str, Any], axis: str, small_disk: Path
) -> None:
    """What is needed is told as it is on disk: replicas are written once, so they are counted once."""
    for said in pool.run(fill, 2, rows, str(small_disk), options, axis, timeout=120):
        assert str(small_disk / "step-4.ckpt") in said
        found = re.search(r"([\d,]+) bytes are needed, ([\d,]+) are free", said)
        assert found is not None, said
        needed, free = (int(number.replace(",", "")) for number in found.groups())
        assert free < needed
        assert 2_000_000 < needed < 3_000_000
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-2.ckpt", "step-3.ckpt"]
    assert not damage(small_disk / "step-2.ckpt")
    assert not damage(small_disk / "step-3.ckpt")


def test_a_target_that_cannot_be_written_is_refused_at_the_start(pool: Pool, rows: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in pool.run(start, 2, rows, str(tmp_path / "file" / "sub"), None, None):
        assert "Cannot write a checkpoint to" in said
        assert "are free" in said


def slow(rank: int, world: int, rows: str, folder: str, options: dict[str, Any]) -> int:
    def sleep(name: str) -> None:
        if name == "shard" and rank == 0:
            time.sleep(6)

    files._phase_hook = sleep
    write = export._write
    naps = iter([6.0])

    def slow_write(*args: Any) -> None:
        time.sleep(next(naps, 0))
        write(*args)

    export._write = slow_write
    try:
        callback = SaveAt(folder, (1,))
        strategy = {"timeout": timedelta(seconds=4), **options}
        limits = {**SHORT, "max_steps": 2}
        story = run(
            rank,
            world,
            rows,
            folder,
            {"dp_shard": 2},
            trainer=limits,
            callbacks=[callback, Export()],
            strategy=strategy,
        )
    finally:
        files._phase_hook, export._write = None, write
    return len(story.losses)


class Export(SaveAt):
    def __init__(self) -> None:
        super().__init__("", ())

    def setup(self, *_: Any, **__: Any) -> None:
        pass

    def on_fit_end(self, trainer: Any, module: Trained) -> None:
        save_pretrained(module.model, Path(trainer.default_root_dir) / "export")


@pytest.mark.parametrize("options", [{}, {"async_checkpoint": True}], ids=["sync", "async"])
def test_a_disk_slower_than_the_timeout_of_the_groups(
    pool: Pool, rows: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert pool.run(slow, 2, rows, str(tmp_path), options, timeout=120) == [2, 2]
    assert read_manifest(tmp_path / "step-1.ckpt").step == 1


def failing_in_background(rank: int, world: int, rows: str, folder: str) -> tuple[str, int]:
    module: list[int] = []

    def fail(name: str) -> None:
        if name == "shard" and rank == 1:
            raise ValueError("the disk is on fire")

    class Count(SaveAt):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            module.append(trainer.global_step)
            time.sleep(0.3)

    files._phase_hook = fail
    try:
        run(
            rank,
            world,
            rows,
            folder,
            {"dp_shard": 2},
            trainer=SHORT,
            callbacks=[Count(folder, (1,))],
            strategy={"async_checkpoint": True},
        )
    except RuntimeError as error:
        return str(error), module[-1]
    finally:
        files._phase_hook = None
    return "", -1


def test_what_fails_in_the_background_is_raised_at_a_later_step_on_all_ranks(
    pool: Pool, rows: str, tmp_path: Path
) -> None:
    found = pool.run(failing_in_background, 2, rows, str(tmp_path))
    assert all("the disk is on fire" in said for said, _ in found)
    assert len({step for _, step in found}) == 1
    assert not [path for path in tmp_path.iterdir() if "ckpt" in path.name]
