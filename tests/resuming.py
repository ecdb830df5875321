"""Runs that stop and go on, and what they did at each optimizer step, to compare with a run that did not stop."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from families import make_model
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import tiny_trainer
from tiny import tiny_tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_nd import NDStrategy
from lightning_nd.checkpoint.shards import gather_full
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import WarmupDecay

ROWS_PER_STEP = 4


@dataclass
class Story:
    """What a run did: rows, learning rate and loss of each optimizer step, and the weights at its end."""

    steps: list[int] = field(default_factory=list)  # under which Lightning logs
    rows: list[list[list[int]]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def write_rows(path: Path, count: int = 36) -> str:
    """Chats of different lengths, all told apart by their tokens."""
    turns = [[("user", f"q{i}"), ("assistant", "abcdefgh"[: 1 + i % 7] + str(i))] for i in range(count)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) for row in turns]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def make_data(path: str, ranks: int, accumulate: int, **options: Any) -> ChatDataModule | DataLoader[Any]:
    if "own_loader" in options:
        return own_loader(ROWS_PER_STEP // (ranks * accumulate), **options["own_loader"])
    return ChatDataModule(
        **{
            "train": path,
            "tokenizer": tiny_tokenizer(),
            "micro_batch_size": ROWS_PER_STEP // (ranks * accumulate),
            "seed": 3,
            "shuffle_buffer": 8,
            **options,
        }
    )


def own_loader(batch_size: int, shuffle: bool, sampler: bool = False, **options: Any) -> DataLoader[Any]:
    """A loader as a user makes one; ``sampler`` gives it the order that a shuffled one has under `NDStrategy`."""
    rows = torch.randint(3, 260, (options.pop("count", 36), 12), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    if sampler:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        options["sampler"] = DistributedSampler(data, 1, 0, shuffle=shuffle, seed=seed)
    else:
        options["shuffle"] = shuffle
    if options.pop("unsized", False):
        data, options["shuffle"] = Unsized(data), None
    return (Counting if options.pop("counting", False) else DataLoader)(data, batch_size, **options)


class Unsized(IterableDataset[Any]):
    """Rows one by one; nobody knows how many."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Counting(DataLoader[Any]):
    """A user's loader that counts the batches of an epoch; nobody else can tell its place from its state."""

    at = skip = 0

    def __iter__(self) -> Any:
        self.at, skip, self.skip = self.skip, self.skip, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= skip:
                self.at = i + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = self.skip = state["at"]


class Trained(pl.LightningModule):
    """A causal LM with AdamW, warm-up and decay."""

    def __init__(
        self,
        family: str = "qwen3",
        prepare: Any = None,
        lr: float = 1e-2,
        total_steps: int | None = 18,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.lr, self.total_steps = lr, total_steps
        self.save_hyperparameters(ignore=["prepare"])
        self.model = make_model(family, vocab_size=264, **overrides)
        if prepare is not None:
            prepared = prepare(self.model)
            self.model = self.model if prepared is None else prepared
        self.story = Story()
        self._rows: list[list[int]] = []
        self._loss = 0.0

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self._rows += rows_of(batch)
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self._loss = loss.item()
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val", self.model(**batch, use_cache=False).loss, sync_dist=True, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.story.validations.append(float(self.trainer.callback_metrics["val"]))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.story.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self._steps = self.global_step

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self._steps:
            return
        strategy: Any = self.trainer.strategy
        self.story.steps.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
        loss = getattr(strategy, "step_loss", None)
        self.story.losses.append(self._loss if loss is None else float(loss))
        self.story.rows.append(all_rows(self._rows, strategy))
        self._rows = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            (p for p in self.parameters() if p.requires_grad), lr=self.lr, weight_decay=0.1, eps=1e-3
        )
        steps = self.total_steps or int(self.trainer.estimated_stepping_batches)  # sets the loaders up
        scheduler = WarmupDecay(optimizer, warmup=3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows_of(batch: dict[str, Tensor]) -> list[list[int]]:
    """The supervised tokens of each row, in ascending order: cp ranks have parts of rows."""
    labels = batch.get("shift_labels", batch["labels"])
    return [sorted(int(t) for t in row if t != -100) for row in labels]


def all_rows(mine: list[list[int]], strategy: Any) -> list[list[int]]:
    """The rows of all data ranks, in one order; under cp each rank has a part of each row."""
    if not isinstance(strategy, NDStrategy):
        return sorted(row for row in mine if row)
    found: list[Any] = [None] * strategy.world_size
    if strategy.world_size == 1:
        found = [mine]
    else:
        dist.all_gather_object(found, mine)
    dims = strategy.dims
    whole: dict[tuple[int, int], list[int]] = {}
    for rank, rows in enumerate(found):
        place = dims.coordinates(rank)
        if place["tp"]:
            continue
        for i, row in enumerate(rows):
            key = (place["dp_replicate"] * dims.dp_shard + place["dp_shard"], i)
            whole[key] = sorted([*whole.get(key, []), *row]) if dims.cp > 1 else row
    return sorted(row for row in whole.values() if row)


def finish(module: Trained) -> Story:
    module.story.weights = {n: gather_full(p).detach().clone() for n, p in module.named_parameters()}
    return module.story


def run(
    rank: int,
    world: int,
    path: str,
    folder: str,
    degrees: dict[str, int],
    *,
    accumulate: int = 1,
    save_at: Sequence[int] = (),
    ckpt: str | None = None,
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
) -> Story:
    """Train under `NDStrategy`, saving ``step-<n>.ckpt`` at some steps."""
    options = {"dp_shard": 1, **degrees}
    ranks = options.get("dp_replicate", 1) * options["dp_shard"]
    nd = NDStrategy(**options, **(strategy or {}))
    saves = [SaveAt(folder, save_at)] if save_at else []
    fit = tiny_trainer(
        rank,
        world,
        nd,
        **{
            "max_steps": 18,
            "accumulate_grad_batches": accumulate,
            "enable_checkpointing": bool(saves),
            "callbacks": [*saves, *callbacks],
            "gradient_clip_val": 1.0,
            **(trainer or {}),
        },
    )
    torch.manual_seed(7)
    trained = Trained(**(module or {}))
    fit.fit(trained, make_data(path, ranks, accumulate, **(data or {})), ckpt_path=ckpt)
    return finish(trained)


class SaveAt(ModelCheckpoint):
    """Saves at some steps, by Lightning's own callback."""

    def __init__(self, folder: str, steps: Sequence[int], **options: Any) -> None:
        name = "step-{step}"
        super().__init__(
            folder,
            **{
                "filename": name,
                "auto_insert_metric_name": False,
                "every_n_train_steps": 1,
                "save_top_k": -1,
                **options,
            },
        )
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            super().on_train_batch_end(trainer, *args)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        pass

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        pass


def plain(path: str, **options: Any) -> Story:
    """The same run uninterrupted, in one process of plain Lightning, with the rows of a step in one batch."""
    data, module = options.pop("data", {}), options.pop("module", {})
    fit = pl.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": 18,
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "gradient_clip_val": 1.0,
            **options,
        }
    )
    torch.manual_seed(7)
    trained = Trained(**module)
    fit.fit(trained, make_data(path, 1, 1, **data))
    return finish(trained)


def check_continues(whole: Story, after: Story, step: int, tolerance: float = 1e-5) -> None:
    """A run that went on behind ``step`` did what the uninterrupted one did there."""
    assert after.steps == whole.steps[step:]
    assert after.rows == whole.rows[step:]
    assert after.rates == whole.rates[step:]
    for a, b in zip(after.losses, whole.losses[step:], strict=True):
        assert abs(a - b) <= tolerance * abs(b), (after.losses, whole.losses[step:])
    assert after.weights.keys() == whole.weights.keys()
    for name, weight in whole.weights.items():
        assert (after.weights[name] - weight).abs().max() <= tolerance * weight.abs().max(), name


def check_equal(whole: Story, after: Story, step: int) -> None:
    """The same, bit for bit."""
    check_continues(whole, after, step, 0.0)
