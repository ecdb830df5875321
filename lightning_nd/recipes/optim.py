"""Optimizer and learning-rate schedule of a run, made once the parameters have been sharded."""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import instantiate_class
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

DEFAULT_OPTIMIZER: dict[str, Any] = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.0},
}
DEFAULT_SCHEDULER: dict[str, Any] = {"class_path": "lightning_nd.recipes.WarmupDecay"}


class WarmupDecay(LambdaLR):
    """Linear warm-up to the full learning rate, then a decay that ends with the last optimizer step.

    With W warm-up steps of T, step i (from 0) runs at (i + 1) / (W + 1) of the rate while i < W; after that the factor
    falls from 1 at step W to ``final`` at T. No step runs at rate 0, unlike with schedules that count from 0.

    Args:
        optimizer: the optimizer to drive.
        warmup: number of optimizer steps, or a fraction of them when it is a float below 1.
        decay: the shape of the fall; ``"constant"`` does not fall.
        final: the factor that is reached after the last step.
        total_steps: T; in a Trainer run it is filled in from ``max_steps`` or ``max_epochs``.

    Raises:
        ValueError: if ``total_steps`` is unknown, or the warm-up is negative or not shorter than it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: int | float = 0.03,
        decay: Literal["cosine", "linear", "constant"] = "cosine",
        final: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        if total_steps is None or total_steps < 1:
            raise ValueError("WarmupDecay needs total_steps; in a Trainer run set max_steps or max_epochs.")
        steps = round(warmup * total_steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)
        if steps < 0 or steps >= total_steps:
            raise ValueError(
                f"WarmupDecay: warmup={warmup} is {steps} steps of {total_steps}; it must be at least 0 and leave a"
                " step."
            )
        if decay not in ("cosine", "linear", "constant"):
            raise ValueError(f"WarmupDecay: decay={decay!r} is not one of 'cosine', 'linear', 'constant'.")

        def factor(step: int) -> float:
            if step < steps:
                return (step + 1) / (steps + 1)
            done = min(1.0, (step - steps) / (total_steps - steps))
            height = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[decay]
            return final + (1 - final) * height

        super().__init__(optimizer, factor)


def configure_optimizers(
    module: LightningModule, optimizer: dict[str, Any], scheduler: dict[str, Any] | None
) -> dict[str, Any]:
    """Build both from ``class_path`` and ``init_args``, over the trainable parameters as they are now.

    Schedules advance once per optimizer step, `ReduceLROnPlateau` (which needs ``monitor``) once per validation.

    Returns:
        What Lightning expects from `LightningModule.configure_optimizers`.

    Raises:
        ValueError: if nothing is trainable, or the schedule needs a length and the run has none.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: every requires_grad is False.")
    built = instantiate_class(parameters, optimizer)
    if scheduler is None:
        return {"optimizer": built}
    config: dict[str, Any] = {"interval": "step", "frequency": 1}
    init_args = dict(scheduler.get("init_args") or {})
    if scheduler["class_path"].rpartition(".")[2] == WarmupDecay.__name__ and init_args.get("total_steps") is None:
        total = module.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError(
                "The learning-rate schedule needs an end: set trainer.max_steps, or trainer.max_epochs where the"
                " number of batches is known (it is not with data.streaming)."
            )
        init_args["total_steps"] = int(total)
    if scheduler["class_path"].rpartition(".")[2] == "ReduceLROnPlateau":
        config = {"interval": "epoch", "monitor": init_args.get("monitor", "val/loss")}
    config["scheduler"] = instantiate_class(built, {**scheduler, "init_args": init_args})
    return {"optimizer": built, "lr_scheduler": config}
