"""The progress bar of a fine-tuning run."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

_SHOWN = {"train/loss": "loss", "val/loss": "val_loss", "throughput/tokens_per_s": "tok/s", "throughput/mfu": "mfu"}


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with the global loss, the last validation loss and the tokens per second of the job."""

    def __init__(self) -> None:
        # a log file gets a line now and then, not one for every batch
        super().__init__(refresh_rate=1 if sys.stderr.isatty() or sys.stdout.isatty() else 20)
        self._batches: int | float | None = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        # Lightning's own total takes max_steps for a number of batches, which it is not when gradients accumulate
        batches: int | float = trainer.num_training_batches
        if trainer.max_steps > 0:
            batches = min(batches, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        self._batches = batches
        super().on_train_epoch_start(trainer, *args)

    @property
    @override
    def total_train_batches(self) -> int | float:
        return super().total_train_batches if self._batches is None else self._batches

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        shown: dict[str, Any] = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        logged = {**trainer.logged_metrics, **trainer.callback_metrics}
        loss = getattr(trainer.strategy, "step_loss", None)
        if loss is not None and "train/loss" in logged:
            logged["train/loss"] = loss  # the module logs it a moment after the bar is drawn
        for name, label in _SHOWN.items():
            if name in logged:
                value = float(logged[name])
                shown[label] = f"{value:,.0f}" if label == "tok/s" else f"{value:.4f}"
        return shown
