"""When one rank fails or keeps the others waiting, the error says which, where and what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from families import make_model
from pool import Pool, tiny_trainer
from test_traps import Module, rows
from torch import Tensor

from lightning_nd import NDStrategy
from lightning_nd.faults import who_is_behind


def _notes(rank: int, world_size: int, module: Module, folder: str, **options: Any) -> str:
    trainer = tiny_trainer(
        rank,
        world_size,
        NDStrategy(**options),
        max_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=folder,
        val_check_interval=1,
        limit_val_batches=1,
    )
    try:
        trainer.fit(module)
    except Exception as error:
        return "\n".join(getattr(error, "__notes__", []))
    return ""


def _one_rank_sleeps(rank: int, world_size: int, folder: str) -> str:
    class Sleepy(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.model(**batch)

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if rank == 1 and batch_idx == 2:
                time.sleep(9)

    module = Sleepy(lambda: make_model("llama"), rows(4))
    notes = _notes(rank, world_size, module, folder, timeout=timedelta(seconds=4))
    if rank == 0:
        time.sleep(6)  # stay until the sleeper has woken up: its store is ours
    return notes


def test_a_timeout_names_the_rank_that_is_behind(pool: Pool, tmp_path: Any) -> None:
    notes = pool.run(_one_rank_sleeps, 2, str(tmp_path), timeout=120)[0]
    assert "rank 0 on" in notes
    assert "step 3, forward" in notes
    assert "Behind: rank 1 on" in notes
    assert "step 3, data" in notes


def test_a_rank_that_saves_alone_is_not_the_one_that_is_missing() -> None:
    def at(rank: int, step: int, phase: str, **more: Any) -> dict[str, Any]:
        return {"rank": rank, "host": "vm", "step": step, "phase": phase, "time": time.time(), **more}

    alone = [at(0, 4, "saving", waits=True), at(1, 5, "forward", waits=True)]
    (words,) = who_is_behind(alone)
    assert words.startswith("rank 0 on vm waited in a save for all ranks to join it, and these did not come: rank 1 on")
    assert who_is_behind([alone[0], at(1, 5, "forward")]) == ["Behind: rank 1 on vm, since 0 s at step 5, forward"]
    assert who_is_behind([alone[0], at(1, 4, "data")]) == ["Behind: rank 1 on vm, since 0 s at step 4, data"]


def _runs_out(where: str) -> Callable[..., str]:
    return {"forward": _out_in_forward, "backward": _out_in_backward, "optimizer": _out_in_optimizer}[where]


def _raise(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 266.00 MiB.")


class _Full(Module):
    """Runs out of memory at step 2, in one phase, on every rank at once (so that none is left waiting)."""

    phase = ""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1 and self.phase == "forward":
            _raise()
        loss = super().training_step(batch, index)
        if index == 1 and self.phase == "backward":
            loss.register_hook(_raise)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.phase == "optimizer":
            optimizer.register_step_post_hook(lambda *_: _raise() if self.trainer.fit_loop.batch_idx == 1 else None)
        return optimizer


def _out(rank: int, world_size: int, folder: str, phase: str) -> str:
    module = _Full(lambda: make_model("llama"), rows(3))
    module.phase = phase
    return _notes(rank, world_size, module, folder)


def _out_in_forward(rank: int, world_size: int, folder: str) -> str:
    return _out(rank, world_size, folder, "forward")


def _out_in_backward(rank: int, world_size: int, folder: str) -> str:
    return _out(rank, world_size, folder, "backward")


def _out_in_optimizer(rank: int, world_size: int, folder: str) -> str:
    return _out(rank, world_size, folder, "optimizer")


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_out_of_memory_says_where_and_what_to_change(pool: Pool, tmp_path: Any, phase: str) -> None:
    for rank, notes in enumerate(pool.run(_runs_out(phase), 2, str(tmp_path))):
        assert f"rank {rank} on" in notes
        assert f"step 2, {phase}" in notes
        assert "2 rows, the longest of 16 tokens" in notes
        assert "activation_checkpointing='full'" in notes
        assert "micro_batch_size" in notes


def test_nothing_is_left_behind_by_a_good_run(pool: Pool, tmp_path: Any) -> None:
    pool.run(_good_run, 2, str(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def _good_run(rank: int, world_size: int, folder: str) -> None:
    assert _notes(rank, world_size, Module(lambda: make_model("llama")), folder) == ""
