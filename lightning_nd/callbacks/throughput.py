"""Tokens per second and seconds per optimizer step, over all ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override


class Throughput(Callback):
    """Logs ``throughput/tokens_per_s`` and ``throughput/step_time_s``.

    Tokens are the tokens that attention sees (no padding) in the whole job; ranks that share a row count it once. Time
    is what passes between the ends of optimizer steps, waiting for data included and validation excluded, averaged
    over ``trainer.log_every_n_steps``.
    """

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._began = 0.0
        self._paused = 0.0
        self._steps = 0

    def _restart(self, module: LightningModule) -> None:
        self._tokens = torch.zeros((), dtype=torch.float64, device=_counting_device(module.device))
        self._steps = 0
        self._began = time.perf_counter()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._tokens is None or not isinstance(batch, dict):
            return
        mask = batch.get("attention_mask")
        self._tokens += batch["input_ids"].numel() if mask is None else mask.sum()
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.global_step % every:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        elapsed = time.perf_counter() - self._began
        tokens = trainer.strategy.reduce(self._tokens, reduce_op="sum")
        if elapsed > 0:
            pl_module.log("throughput/tokens_per_s", (tokens / elapsed).float(), batch_size=1)
            pl_module.log("throughput/step_time_s", elapsed / self._steps, batch_size=1)
        self._restart(pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began += time.perf_counter() - self._paused


def _counting_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device
