"""What an optimizer step reads, and the learning rate for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the rows of an optimizer step.

    Attributes:
        kind: ``"none"``; ``"linear"``: rate × rows ÷ reference (Goyal et al. 2017, section 2.1, for SGD); ``"sqrt"``:
            rate × √(rows ÷ reference) (Malladi et al. 2022, for Adam).
        reference_batch: the rows per optimizer step for which the given rate was found.

    Raises:
        ValueError: for one without the other.
    """

    kind: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("none", "linear", "sqrt"):
            raise ValueError(f"lr_scaling={self.kind!r} is not one of 'none', 'linear', 'sqrt'.")
        if self.kind == "none" and self.reference_batch is not None:
            raise ValueError(f"reference_batch={self.reference_batch} does nothing with lr_scaling: none.")
        if self.kind != "none" and (self.reference_batch is None or self.reference_batch < 1):
            raise ValueError(
                f"lr_scaling: {self.kind} needs reference_batch, the rows per optimizer step for which the learning"
                f" rate was found; got {self.reference_batch}."
            )


@dataclass(frozen=True)
class Batch:
    """The rows (packs, where rows are packed) of an optimizer step: micro-batch × accumulation × data ranks."""

    micro_batch: int
    accumulate: int
    data_ranks: int
    max_length: int | None
    what: str = "row"

    @property
    def rows(self) -> int:
        """Rows of an optimizer step."""
        return self.micro_batch * self.accumulate * self.data_ranks

    def describe(self, given: Any, used: Any, scaling: Scaling) -> str:
        """The arithmetic, for the log."""
        words = (
            f"Optimizer step: {self.micro_batch} {self.what}s × {self.accumulate} accumulated × {self.data_ranks} data"
            f" rank{'s' if self.data_ranks > 1 else ''} = {self.rows} {self.what}s"
        )
        if self.max_length:
            words += f", at most {self.rows} × {self.max_length:,} = {self.rows * self.max_length:,} tokens"
        if scaling.kind == "none":
            return words + (f"; learning rate {given:g}" if isinstance(given, float | int) else "")
        root = "√" if scaling.kind == "sqrt" else ""
        return f"{words}; learning rate {given:g} × {root}({self.rows} / {scaling.reference_batch}) = {used:g}"


def batch_of(module: LightningModule) -> Batch | None:
    """What the run of a module reads per optimizer step; None where its data do not say."""
    trainer: Any = module.trainer
    data = getattr(trainer, "datamodule", None)
    micro_batch = getattr(data, "micro_batch_size", None)
    if micro_batch is None:
        return None
    layout = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return Batch(
        micro_batch=micro_batch,
        accumulate=trainer.accumulate_grad_batches,
        data_ranks=layout.get("num_replicas", 1),
        max_length=getattr(data, "max_length", None),
        what="pack" if getattr(data, "packing", False) else "row",
    )


def scale(scaling: Scaling, rate: Any, batch: Batch | None, scheduler: dict[str, Any] | None) -> float:
    """The learning rate for a batch.

    Raises:
        ValueError: where the batch or the rate is not known, or a schedule sets rates of its own.
    """
    assert scaling.reference_batch is not None
    if batch is None:
        raise ValueError(f"lr_scaling: {scaling.kind} needs a data module with micro_batch_size (ChatDataModule).")
    if not isinstance(rate, float | int):
        raise ValueError(f"lr_scaling: {scaling.kind} needs a number for optimizer.lr, got {rate!r}.")
    if scheduler is not None and "max_lr" in (scheduler.get("init_args") or {}):
        raise ValueError(
            f"lr_scaling: {scaling.kind} would be undone by {scheduler['class_path']}, which sets max_lr itself. Use"
            " lr_scaling: none, or a schedule that multiplies the optimizer's rate (WarmupDecay)."
        )
    ratio = batch.rows / scaling.reference_batch
    return float(rate) * (math.sqrt(ratio) if scaling.kind == "sqrt" else ratio)
