"""Optimizer and learning-rate schedule of a run, made once the parameters have been sharded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_nd.recipes.rate import Scaling, batch_of, scale

DEFAULT_OPTIMIZER: dict[str, Any] = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.0},
}
DEFAULT_SCHEDULER: dict[str, Any] = {"class_path": "lightning_nd.recipes.WarmupDecay"}


class WarmupDecay(LambdaLR):
    """Linear warm-up to the full learning rate, then a decay that ends with the last optimizer step.

    With W warm-up steps of T, step i (from 0) runs at (i + 1) / (W + 1) of the rate while i < W. Over the last D steps
    the factor falls from 1 at step T - D to ``final`` at T; between the two it is 1. No step runs at rate 0, unlike
    with schedules that count from 0.

    Args:
        optimizer: the optimizer to drive.
        warmup: number of optimizer steps, or a fraction of the run when it is a float below 1.
        decay: the shape of the fall; ``"constant"`` does not fall.
        final: the factor that is reached after the last step.
        decay_over: D: number of optimizer steps, or a fraction of the run when it is a float below 1; None: all that
            follow the warm-up.
        total_steps: T; in a Trainer run it is filled in from ``max_steps`` or ``max_epochs``.

    Raises:
        ValueError: if ``total_steps`` is unknown, the warm-up is negative or not shorter than it, or the decay starts
            before the warm-up has ended.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: int | float = 0.03,
        decay: Literal["cosine", "linear", "constant"] = "cosine",
        final: float = 0.0,
        decay_over: int | float | None = None,
        total_steps: int | None = None,
    ) -> None:
        if total_steps is None or total_steps < 1:
            raise ValueError("WarmupDecay needs total_steps; in a Trainer run set max_steps or max_epochs.")
        if decay not in ("cosine", "linear", "constant"):
            raise ValueError(f"WarmupDecay: decay={decay!r} is not one of 'cosine', 'linear', 'constant'.")
        steps, start = schedule_bounds(total_steps, warmup, decay_over)

        def factor(step: int) -> float:
            if step < steps:
                return (step + 1) / (steps + 1)
            if step < start:
                return 1.0
            done = min(1.0, (step - start) / (total_steps - start))
            height = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[decay]
            return final + (1 - final) * height

        super().__init__(optimizer, factor)


def schedule_bounds(total_steps: int, warmup: int | float, decay_over: int | float | None) -> tuple[int, int]:
    """The number of warm-up steps, and the step at which the decay starts.

    Raises:
        ValueError: where they do not fit into ``total_steps``.
    """
    steps = _steps(warmup, total_steps)
    if warmup < 0 or steps >= total_steps:
        raise ValueError(
            f"WarmupDecay: warmup={warmup} is {steps} steps of {total_steps}; it must be at least 0 and leave a step."
        )
    length = total_steps - steps if decay_over is None else _steps(decay_over, total_steps)
    if length == total_steps - steps + 1 and _fractions(warmup, decay_over) and warmup + (decay_over or 0) <= 1 + 1e-9:
        length -= 1  # both were rounded up
    if length < 1 or steps + length > total_steps:
        raise ValueError(
            f"WarmupDecay: decay_over={decay_over} is {length} steps of {total_steps}, of which {steps} warm up; it"
            f" must be from 1 to {total_steps - steps} steps."
        )
    return steps, total_steps - length


def check_optimizer(optimizer: dict[str, Any]) -> None:
    """Refuse values that an optimizer does not take, before anything is started.

    Raises:
        ValueError: with the optimizer's own words.
    """
    try:
        instantiate_class([nn.Parameter(torch.zeros(2, 2))], optimizer)
    except (ValueError, TypeError) as error:
        raise ValueError(f"optimizer {optimizer['class_path']}: {error}") from error


def check_schedule(scheduler: dict[str, Any] | None, total_steps: int) -> None:
    """Refuse a schedule that does not fit into a run of at most ``total_steps``, before anything is started.

    Raises:
        ValueError: see `WarmupDecay`.
    """
    if scheduler is None or not _is_warmup_decay(scheduler):
        return
    given = dict(scheduler.get("init_args") or {})
    total = given.get("total_steps") or total_steps
    schedule_bounds(int(total), given.get("warmup", 0.03), given.get("decay_over"))


def _steps(value: int | float, total: int) -> int:
    return round(value * total) if isinstance(value, float) and value < 1 else int(value)


def _fractions(*values: int | float | None) -> bool:
    return all(isinstance(value, float) and value < 1 for value in values)


def _is_warmup_decay(scheduler: dict[str, Any]) -> bool:
    return str(scheduler["class_path"]).rpartition(".")[2] == WarmupDecay.__name__


def configure_optimizers(
    module: LightningModule, optimizer: dict[str, Any], scheduler: dict[str, Any] | None
) -> dict[str, Any]:
    """Build both from ``class_path`` and ``init_args``, over the trainable parameters as they are now.

    Weight decay leaves out norms and biases. Schedules advance once per optimizer step, `ReduceLROnPlateau` (which
    needs ``monitor``) once per validation. The rate is scaled as ``module.lr_scaling`` says, where it has one.

    Returns:
        What Lightning expects from `LightningModule.configure_optimizers`.

    Raises:
        ValueError: if nothing is trainable, or the schedule needs a length and the run has none.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: every requires_grad is False.")
    scaling = getattr(module, "lr_scaling", None) or Scaling()
    batch = batch_of(module)
    init_args = dict(optimizer.get("init_args") or {})
    cls = _class_of(optimizer)
    rate = init_args.get("lr", _default(cls, "lr"))
    if scaling.kind != "none":
        init_args["lr"] = scale(scaling, rate, batch, scheduler)
    if batch is not None:
        rank_zero_info(batch.describe(rate, init_args.get("lr", rate), scaling))
    optimizer = {**optimizer, "init_args": init_args}
    built = instantiate_class(
        parameter_groups(named, init_args.get("weight_decay", _default(cls, "weight_decay"))), optimizer
    )
    if scheduler is None:
        return {"optimizer": built}
    config: dict[str, Any] = {"interval": "step", "frequency": 1}
    init_args = dict(scheduler.get("init_args") or {})
    if _is_warmup_decay(scheduler) and init_args.get("total_steps") is None:
        total = module.trainer.estimated_stepping_batches
        if not math.isfinite(total) or total < 1:  # Lightning gives max_steps, -1, for a stream
            raise ValueError(
                "The learning-rate schedule needs an end: set trainer.max_steps, or trainer.max_epochs where the"
                " number of batches is known (it is not with data.streaming)."
            )
        init_args["total_steps"] = int(total)
    if scheduler["class_path"].rpartition(".")[2] == "ReduceLROnPlateau":
        config = {"interval": "epoch", "monitor": init_args.get("monitor", "val/loss")}
    config["scheduler"] = instantiate_class(built, {**scheduler, "init_args": init_args})
    return {"optimizer": built, "lr_scheduler": config}


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float | None) -> list[Any]:
    """The parameters; in two groups where weight decay is on, of which the second has none: norms and biases.

    Those are the parameters of one dim: a weight that multiplies what a norm gives, or is added, has no reason to be
    small (Loshchilov & Hutter 2019 decay all; leaving these out is what GPT-2 and its successors do).
    """
    named = list(named)
    plain = [p for name, p in named if p.dim() < 2 or name.endswith("bias")]
    matrices = [p for name, p in named if not (p.dim() < 2 or name.endswith("bias"))]
    if not weight_decay or not plain or not matrices:
        # one kind only: a group without parameters is refused by some optimizers
        if weight_decay and plain:
            return [{"params": plain, "weight_decay": 0.0}]
        return [p for _, p in named]
    return [{"params": matrices}, {"params": plain, "weight_decay": 0.0}]


def _class_of(optimizer: dict[str, Any]) -> Any:
    import importlib

    module, _, name = str(optimizer["class_path"]).rpartition(".")
    return getattr(importlib.import_module(module), name)


def _default(cls: Any, name: str) -> Any:
    parameter = inspect.signature(cls).parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
