"""`NDStrategy` is a part of Lightning: loops, callbacks, logging and checkpoints behave as on one process."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import make_model
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import ModelSummary
from parity import Layout, full_weights
from pool import Pool, WorkerError, tiny_trainer
from reference import Batch, adamw, compare, make_batches, nll_sum, relative, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import SumMetric

LAYOUTS: list[Layout] = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
ROWS, GLOBAL_BATCH = 8, 4


def run(pool: Pool, fn: Callable[..., Any], layout: Layout, *args: Any, **kwargs: Any) -> list[Any]:
    return pool.run(fn, layout[0] * layout[1] * layout[2], layout, *args, timeout=120, **kwargs)


def strategy(layout: Layout, **kwargs: Any) -> Any:
    from lightning_nd import NDStrategy

    return NDStrategy(dp_replicate=layout[0], dp_shard=layout[1], tp=layout[2], **kwargs)


class Rows(Dataset):
    def __init__(self, seed: int) -> None:
        batches = make_batches(ROWS // 4, seed=seed, silent_row=False)
        self.columns: Batch = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Batch:
        return {key: value[index] for key, value in self.columns.items()}


class Project(pl.LightningModule):
    """A complete user module: all four loops, a scheduler, logging."""

    def __init__(self, epochs_of_loss: list[float] | None = None) -> None:
        super().__init__()
        self.model = make_model("qwen3")
        self.count = SumMetric()
        self.seen: list[Tensor] = []

    def loader(self, seed: int, shuffle: bool = False) -> DataLoader:
        places = self.trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        return DataLoader(Rows(seed), batch_size=GLOBAL_BATCH // places, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader:
        # Lightning shuffles under every sampler that it injects for training, so the order is given here.
        loader = self.loader(0)
        place = self.trainer.strategy.distributed_sampler_kwargs
        sampler = DistributedSampler(loader.dataset, shuffle=False, **place)
        return DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return self.loader(1)

    def test_dataloader(self) -> DataLoader:
        return self.loader(2)

    def predict_dataloader(self) -> DataLoader:
        return self.loader(3)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.seen.append(batch["input_ids"][:, 0].clone())
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.count.update(1)
        self.log("batches", self.count)
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)
        self.log("one", 1.0, sync_dist=True)
        self.log("sum_of_ones", 1.0, sync_dist=True, reduce_fx="sum")

    def test_step(self, batch: Batch, index: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: Batch, index: int) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return batch["input_ids"], logits

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def one_process(epochs: int = 1) -> tuple[nn.Module, list[float]]:
    """The model after training on all rows in order, and its training losses."""
    rows = Rows(0).columns
    batches = [{k: v[i : i + GLOBAL_BATCH] for k, v in rows.items()} for i in range(0, ROWS, GLOBAL_BATCH)]
    model = make_model("qwen3")
    step = iter(range(1000))

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        take = optimizer.step

        def stepped(*args: Any) -> None:
            optimizer.param_groups[0]["lr"] = 2e-3 / (1 + next(step))
            take()

        optimizer.step = stepped  # type: ignore[method-assign,assignment]
        return optimizer

    losses = train(model, batches * epochs, optimizer=scheduled).losses
    return model, losses


def mean_loss(model: nn.Module, seed: int) -> float:
    """Mean over the global batches of an evaluation set of their token means."""
    rows, losses = Rows(seed).columns, []
    with torch.no_grad():
        for i in range(0, ROWS, GLOBAL_BATCH):
            nll, count = nll_sum(model.eval(), {k: v[i : i + GLOBAL_BATCH] for k, v in rows.items()})
            losses.append(nll.item() / count)
    return sum(losses) / len(losses)


# ---------------------------------------------------------------- the four loops


def _all_loops(rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    module = Project()
    trainer = tiny_trainer(rank, world_size, strategy(layout), max_epochs=1)
    trainer.fit(module)
    weights = full_weights(module.model)
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
    (val,) = trainer.validate(module, verbose=False)
    (test,) = trainer.test(module, verbose=False)
    predictions = trainer.predict(module)
    return {"weights": weights, "fit": metrics, "val": val, "test": test, "predictions": predictions}


@layouts
def test_fit_validate_test_predict(pool: Pool, layout: Layout) -> None:
    results = run(pool, _all_loops, layout)
    model, losses = one_process()
    val_loss, test_loss = mean_loss(model, 1), mean_loss(model, 2)
    data = layout[0] * layout[1]
    for result in results:
        assert compare(dict(model.named_parameters()), result["weights"])[0][0] <= 1e-4
        assert relative(losses[-1], result["fit"]["train_loss"]) <= 1e-4
        assert relative(val_loss, result["fit"]["val_loss"]) <= 1e-5
        assert relative(val_loss, result["val"]["val_loss"]) <= 1e-5
        assert relative(test_loss, result["test"]["test_loss"]) <= 1e-5
        # Constants say whether tp peers were counted: 2 batches on every data rank.
        assert result["val"]["one"] == 1.0
        assert result["val"]["sum_of_ones"] == 2.0 * data
        assert result["val"]["batches"] == 2.0 * data
    rows = Rows(3).columns
    with torch.no_grad():
        logits = model.eval()(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    expected = {tuple(ids.tolist()): value for ids, value in zip(rows["input_ids"], logits, strict=True)}
    for rank, result in enumerate(results):
        got = [(tuple(i.tolist()), v) for ids, out in result["predictions"] for i, v in zip(ids, out, strict=True)]
        assert len(got) == ROWS // data
        for key, value in got:
            torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3)
        if rank < layout[2]:  # the first data rank: tp peers predict the same rows
            assert [key for key, _ in got] == list(expected)[::data]


def _rows_seen(rank: int, world_size: int, layout: Layout) -> list[int]:
    module = Project()
    module.train_dataloader = lambda: module.loader(0, shuffle=True)  # type: ignore[method-assign]
    tiny_trainer(rank, world_size, strategy(layout), max_epochs=1, limit_val_batches=0).fit(module)
    first = Rows(0).columns["input_ids"][:, 0].tolist()
    return [first.index(i) for i in torch.cat(module.seen).tolist()]


@layouts
def test_tp_peers_read_the_same_rows_and_data_ranks_others(pool: Pool, layout: Layout) -> None:
    assert len(set(Rows(0).columns["input_ids"][:, 0].tolist())) == ROWS
    seen = run(pool, _rows_seen, layout)
    tp = layout[2]
    by_data_rank = seen[::tp]
    for rank, rows in enumerate(seen):
        assert rows == by_data_rank[rank // tp]
    assert sorted(row for rows in by_data_rank for row in rows) == list(range(ROWS))


def _two_fits(rank: int, world_size: int, layout: Layout) -> tuple[Any, Any]:
    weights = []
    for _ in range(2):
        module = Project()
        tiny_trainer(rank, world_size, strategy(layout), max_epochs=1, limit_val_batches=0).fit(module)
        weights.append(full_weights(module.model))
    return weights[0], weights[1]


def _fit_again(rank: int, world_size: int, layout: Layout) -> tuple[Any, Any]:
    module = Project()
    weights = []
    for _ in range(2):
        tiny_trainer(rank, world_size, strategy(layout), max_epochs=1, limit_val_batches=0).fit(module)
        weights.append(full_weights(module.model))
    return weights[0], weights[1]


@layouts
def test_two_fits_in_one_process(pool: Pool, layout: Layout) -> None:
    first, second = run(pool, _two_fits, layout)[0]
    assert compare(first, second)[0][0] == 0
    assert compare(dict(one_process()[0].named_parameters()), first)[0][0] <= 1e-4


@layouts
def test_second_trainer_goes_on_with_the_trained_module(pool: Pool, layout: Layout) -> None:
    first, second = run(pool, _fit_again, layout)[0]
    rows = Rows(0).columns
    batches = [{k: v[i : i + GLOBAL_BATCH] for k, v in rows.items()} for i in range(0, ROWS, GLOBAL_BATCH)]
    model, _ = one_process()
    assert compare(dict(model.named_parameters()), first)[0][0] <= 1e-4
    optimizer = adamw(model.parameters())
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 2e-3 / (1 + step)
        nll, count = nll_sum(model.train(), batch)
        (nll / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compare(dict(model.named_parameters()), second)[0][0] <= 1e-4


def _registered_name(rank: int, world_size: int) -> tuple[str, str]:
    import lightning_nd  # noqa: F401  (registers the name)

    module = Project()
    trainer = tiny_trainer(rank, world_size, "nd", max_steps=1, limit_val_batches=0)
    trainer.fit(module)
    return type(trainer.strategy).__name__, str(trainer.strategy.dims)  # type: ignore[attr-defined]


def test_strategy_by_name(pool: Pool) -> None:
    name, dims = pool.run(_registered_name, 2)[0]
    assert name == "NDStrategy"
    assert dims == "dp_replicate=1 × dp_shard=2 × cp=1 × tp=1"


# ---------------------------------------------------------------- callbacks and logging


class Scripted(Project):
    """Validation logs scripted values, which differ between data ranks and agree in their mean."""

    values = [3.0, 2.0, 2.5, 2.6, 1.0, 0.5]  # noqa: RUF012

    def validation_step(self, batch: Batch, index: int) -> None:
        place = self.trainer.strategy.distributed_sampler_kwargs
        offset = place["rank"] - (place["num_replicas"] - 1) / 2
        self.log("val_loss", self.values[self.current_epoch] + 10 * offset, sync_dist=True)


def _early_stopping(rank: int, world_size: int, layout: Layout, folder: str) -> tuple[int, int, float, str]:
    stopping = EarlyStopping("val_loss", patience=2)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best")
    trainer = tiny_trainer(
        rank,
        world_size,
        strategy(layout),
        max_epochs=6,
        callbacks=[stopping, best],
        enable_checkpointing=True,
    )
    trainer.fit(Scripted())
    return trainer.current_epoch, stopping.stopped_epoch, float(best.best_model_score or 0), best.best_model_path


@layouts
def test_early_stopping_and_best_checkpoint_agree_on_all_ranks(pool: Pool, layout: Layout, tmp_path: Path) -> None:
    results = run(pool, _early_stopping, layout, str(tmp_path))
    for result in results:
        assert result[:3] == (4, 3, 2.0)  # best in epoch 1, two worse ones after it
        assert Path(result[3]).exists()


def _logged(rank: int, world_size: int, layout: Layout, folder: str) -> dict[str, Any]:
    module = Project()
    trainer = tiny_trainer(
        rank,
        world_size,
        strategy(layout),
        max_epochs=2,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_model_summary=True,
        callbacks=[LearningRateMonitor("step")],
    )
    trainer.fit(module)
    summary = ModelSummary(module)
    return {
        "parameters": summary.total_parameters,
        "trainable": summary.trainable_parameters,
        "megabytes": summary.model_size,
    }


@layouts
def test_summary_counts_global_parameters_and_lr_is_logged(pool: Pool, layout: Layout, tmp_path: Path) -> None:
    results = run(pool, _logged, layout, str(tmp_path))
    total = sum(p.numel() for p in make_model("qwen3").parameters())
    for result in results:
        assert result["parameters"] == total
        assert result["trainable"] == total
        assert result["megabytes"] == pytest.approx(total * 4e-6)
    assert "180 K" in pool.output(0)
    (path,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(path.open()))
    rates = [float(row["lr-AdamW"]) for row in rows if row.get("lr-AdamW")]
    assert rates == pytest.approx([2e-3 / (1 + step) for step in range(4)])
    losses = [float(row["train_loss"]) for row in rows if row.get("train_loss")]
    assert losses == pytest.approx(one_process(epochs=2)[1], rel=1e-4)


class Uneven(Project):
    """Data rank 0 has two validation batches, data rank 1 has one; no collective in the step."""

    def val_dataloader(self) -> DataLoader:
        rank = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        return DataLoader(torch.zeros(2 - rank, 1), batch_size=1)  # type: ignore[arg-type]

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("constant", 1.0, on_epoch=True, sync_dist=True)
        rank = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        self.log("rank", float(rank), on_epoch=True, sync_dist=True)


def _uneven(rank: int, world_size: int, layout: Layout) -> dict[str, float]:
    trainer = tiny_trainer(rank, world_size, strategy(layout), use_distributed_sampler=False)
    (metrics,) = trainer.validate(Uneven(), verbose=False)
    return dict(metrics)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (1, 2, 2)], ids=lambda v: "x".join(map(str, v)))
def test_mean_over_ranks_with_unequal_batch_counts(pool: Pool, layout: Layout) -> None:
    for metrics in run(pool, _uneven, layout):
        assert metrics["constant"] == 1.0
        assert metrics["rank"] == pytest.approx(1 / 3)  # 0, 0 and 1


def _validate_from_file(rank: int, world_size: int, layout: Layout, folder: str, sharded: bool) -> tuple[Any, ...]:
    module = Project()
    keep = ModelCheckpoint(folder, filename="last", monitor="val_loss")
    trainer = tiny_trainer(
        rank,
        world_size,
        strategy(layout, save_distributed_checkpoint=sharded),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[keep],
    )
    trainer.fit(module)
    after_fit = trainer.callback_metrics["val_loss"].item()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    (best,) = trainer.validate(module, ckpt_path="best", verbose=False)
    fresh = Project()
    again = tiny_trainer(rank, world_size, strategy(layout, save_distributed_checkpoint=sharded))
    (path,) = again.validate(fresh, ckpt_path=keep.best_model_path, verbose=False)
    return after_fit, best["val_loss"], path["val_loss"], Path(keep.best_model_path).is_dir()


@layouts
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "one-file"])
def test_validate_from_a_checkpoint(pool: Pool, layout: Layout, sharded: bool, tmp_path: Path) -> None:
    expected = mean_loss(one_process()[0], 1)
    for after_fit, best, path, is_folder in run(pool, _validate_from_file, layout, str(tmp_path), sharded):
        assert relative(expected, after_fit) <= 1e-5
        assert best == after_fit
        assert path == after_fit
        assert is_folder is sharded


def _grad_norm(rank: int, world_size: int, layout: Layout) -> float:
    class Norm(Project):
        norm = 0.0

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            # Lightning's own utilities.grad_norm cannot add norms of DTensors.
            self.norm = float(self.trainer.strategy.grad_norm())  # type: ignore[attr-defined]

    module = Norm()
    tiny_trainer(rank, world_size, strategy(layout), max_steps=1, limit_val_batches=0).fit(module)
    return module.norm


@layouts
def test_gradient_norm_without_clipping(pool: Pool, layout: Layout) -> None:
    rows = {k: v[:GLOBAL_BATCH] for k, v in Rows(0).columns.items()}
    expected = train(make_model("qwen3"), [rows]).grad_norms[0]
    for norm in run(pool, _grad_norm, layout):
        assert relative(expected, norm) <= 1e-5


# ---------------------------------------------------------------- what must stop


def _other_layout(rank: int, world_size: int, stage: str) -> None:
    module = Project()
    tiny_trainer(rank, world_size, strategy((1, 1, 2)), max_steps=1, limit_val_batches=0).fit(module)
    getattr(tiny_trainer(rank, world_size, strategy((1, 2, 1)), max_steps=1), stage)(module)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_module_laid_out_otherwise_by_an_earlier_trainer_is_refused(pool: Pool, stage: str) -> None:
    with pytest.raises(WorkerError, match=r"dp_shard=1 .* tp=2 before.* dp_shard=2 .* tp=1"):
        pool.run(_other_layout, 2, stage)


def _infinite_gradient(rank: int, world_size: int, layout: Layout, hook: str) -> None:
    class Broken(Project):
        def on_after_backward(self) -> None:
            if hook == "on_after_backward":
                self.poison()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            if hook == "on_before_optimizer_step":
                self.poison()

        def poison(self) -> None:
            if self.global_step == 1 and rank == 1:
                grad: Any = self.model.model.layers[1].mlp.up_proj.weight.grad
                grad.to_local().view(-1)[0] = math.inf

    module = Broken()
    trainer = tiny_trainer(
        rank, world_size, strategy(layout, error_if_nonfinite=True), max_epochs=1, gradient_clip_val=1.0
    )
    try:
        trainer.fit(module)
    finally:
        if not all(bool(w.isfinite().all()) for w in full_weights(module.model).values()):
            raise AssertionError("weights have been changed")


@layouts
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_nonfinite_gradient_on_one_rank_stops_all(pool: Pool, layout: Layout, hook: str) -> None:
    with pytest.raises(
        WorkerError, match=r"layers\.1\.mlp\.up_proj\.weight.*step 2, first in the part of it on rank 1"
    ) as caught:
        run(pool, _infinite_gradient, layout, hook)
    assert sorted(caught.value.failures) == list(range(layout[0] * layout[1] * layout[2]))
    assert all("is not finite" in trace for trace in caught.value.failures.values())


def _fp16_plugin(rank: int, world_size: int) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))  # type: ignore[attr-defined]
    tiny_trainer(rank, world_size, strategy((1, 2, 1)), plugins=[plugin]).fit(Project())


def test_fp16_given_as_a_plugin_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="16-mixed"):
        pool.run(_fp16_plugin, 2)


def _early_optimizer(rank: int, world_size: int) -> None:
    class Early(Project):
        def __init__(self) -> None:
            super().__init__()
            self.early = adamw(self.parameters())

        def configure_optimizers(self) -> Any:
            return self.early

    tiny_trainer(rank, world_size, strategy((1, 1, 2)), max_steps=1).fit(Early())


def test_optimizer_made_before_the_model_was_split_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"AdamW.*before the model was parallelised"):
        pool.run(_early_optimizer, 2)


def _own_parameter(rank: int, world_size: int) -> None:
    class Owner(Project):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

    tiny_trainer(rank, world_size, strategy((1, 2, 1)), max_steps=1).fit(Owner())


def test_parameter_outside_any_submodule_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="temperature"):
        pool.run(_own_parameter, 2)


def _buffers(rank: int, world_size: int, layout: Layout) -> dict[str, Tensor]:
    module = Project()
    tiny_trainer(rank, world_size, strategy(layout), max_steps=1, precision="bf16-true").fit(module)
    return {name: buffer.clone() for name, buffer in module.model.named_buffers()}


@layouts
def test_rotary_frequencies_stay_in_single_precision(pool: Pool, layout: Layout) -> None:
    expected = dict(make_model("qwen3").named_buffers())
    assert expected
    for got in run(pool, _buffers, layout):
        assert compare(expected, got)[0][0] == 0
        assert all(got[name].dtype == buffer.dtype for name, buffer in expected.items())
