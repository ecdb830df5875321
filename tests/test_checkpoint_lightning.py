"""What people do with checkpoints in Lightning: it works here, or is refused with the reason.

Reported elsewhere: C19 (validate reads another path than fit), E07 (a resumed log starts anew).
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from pool import Pool, WorkerError, tiny_trainer
from resuming import SaveAt, Trained, make_data, plain, run
from tiny import TEMPLATE, tiny_tokenizer

from lightning_nd import NDStrategy, load_from_checkpoint
from lightning_nd.callbacks import MetricsLog
from lightning_nd.checkpoint.inspect import Contents

SHORT: dict[str, Any] = {"max_steps": 6, "enable_checkpointing": True}


@pytest.fixture(scope="module")
def made(pool: Pool, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, sharded in (("sharded", True), ("one", False)):
        options = {"save_distributed_checkpoint": sharded}
        limits = {"max_steps": 3}
        pool.run(run, 2, rows, str(folder / name), {"dp_shard": 2}, save_at=(2,), trainer=limits, strategy=options)
    return folder


# -- loading into a module --------------------------------------------------------------------------------------------


def test_load_from_checkpoint_of_both_formats(made: Path) -> None:
    sharded = load_from_checkpoint(Trained, made / "sharded" / "step-2.ckpt")
    one = load_from_checkpoint(Trained, made / "one" / "step-2.ckpt")
    own = Trained.load_from_checkpoint(made / "one" / "step-2.ckpt")
    contents = Contents.of(made / "sharded" / "step-2.ckpt")
    fresh = Trained()
    for name, tensor in sharded.state_dict().items():
        assert torch.equal(tensor, contents.weight(name)), name
        assert torch.equal(tensor, one.state_dict()[name]), name
        assert torch.equal(tensor, own.state_dict()[name]), name
    assert not torch.equal(fresh.model.lm_head.weight, sharded.model.lm_head.weight)


class Grown(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters())


def evaluate(rank: int, world: int, rows: str, ckpt: str, kind: Any, strict: bool) -> float:
    module = kind()
    module.strict_loading = strict
    trainer = tiny_trainer(rank, world, NDStrategy(dp_shard=world))
    data = make_data(rows, world, 1, train=None, val=rows)
    (found,) = trainer.validate(module, data, ckpt_path=ckpt, verbose=False)
    return found["val"]


@pytest.mark.parametrize("name", ["sharded", "one"])
def test_strict_loading(pool: Pool, rows: str, made: Path, name: str) -> None:
    ckpt = str(made / name / "step-2.ckpt")
    same = pool.run(evaluate, 2, rows, ckpt, Trained, True)
    assert pool.run(evaluate, 2, rows, ckpt, Grown, False) == same
    with pytest.raises(WorkerError, match=r"the module has and the checkpoint lacks more\..*strict_loading=False"):
        pool.run(evaluate, 2, rows, ckpt, Grown, True)


# -- what does not fit ------------------------------------------------------------------------------------------------


class Sgd(Trained):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Steps(Trained):
    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["scheduler"] = torch.optim.lr_scheduler.StepLR(made["optimizer"], 2)
        return made


class Constant(Trained):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class More(Grown):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def configure_optimizers(self) -> Any:
        return Trained.configure_optimizers(self)


class Tied(Trained):
    def __init__(self) -> None:
        super().__init__(tie_word_embeddings=True)


class Wide(Trained):
    def __init__(self) -> None:
        super().__init__(intermediate_size=256)


def resume(
    rank: int, world: int, rows: str, ckpt: str, kind: Any, data: dict[str, Any] | None = None, **options: Any
) -> list[float]:
    trainer = tiny_trainer(rank, world, NDStrategy(dp_shard=world), max_steps=6, gradient_clip_val=1.0)
    module = kind()
    trainer.fit(module, make_data(rows, world, 1, **(data or {})), ckpt_path=ckpt, **options)
    return module.story.rates


@pytest.mark.parametrize("name", ["sharded", "one"])
@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (Sgd, {}, "holds the state of AdamW, and configure_optimizers now makes SGD.*lightning-nd export"),
        (Steps, {}, "schedule is a WarmupDecay, and configure_optimizers now makes a StepLR"),
        (Wide, {}, r"shapes differ: .*is \[128, 64\] there and \[256, 64\] here.*intermediate_size was 128 and is 256"),
        (More, {}, r"2 are new \(more.bias, more.weight\)\. strict_loading=False is for names that no optimizer holds"),
        (Tied, {}, r"1 are gone \(model.lm_head.weight\)\. \(model.config.*tie_word_embeddings was False and is True"),
        (
            Trained,
            {"tokenizer": tiny_tokenizer("{# another #}" + TEMPLATE)},
            "not that of the checkpoint: template differ",
        ),
    ],
    ids=["optimizer", "schedule", "model", "grown", "tied", "tokenizer"],
)
def test_what_differs_is_said(
    pool: Pool, rows: str, made: Path, name: str, kind: Any, data: dict[str, Any], said: str
) -> None:
    with pytest.raises(WorkerError, match=f"(?s){said}"):
        pool.run(resume, 2, rows, str(made / name / "step-2.ckpt"), kind, data)


def test_a_schedule_that_is_left_out(pool: Pool, rows: str, made: Path) -> None:
    ckpt = str(made / "sharded" / "step-2.ckpt")
    last = Contents.of(Path(ckpt)).rest()["lightning_nd"]["optimizers"][0]["groups"][0]["lr"]
    assert pool.run(resume, 2, rows, ckpt, Constant) == [[last] * 4] * 2
    assert "WarmupDecay is not used any more" in pool.output(0)


def without_schedule(rank: int, world: int, rows: str, folder: str) -> None:
    callbacks = [SaveAt(folder, (2,))]
    limits = {**SHORT, "max_steps": 2, "gradient_clip_val": 1.0}
    trainer = tiny_trainer(rank, world, NDStrategy(dp_shard=world), callbacks=callbacks, **limits)
    trainer.fit(Constant(), make_data(rows, world, 1))


def test_a_schedule_that_is_added_starts_at_its_beginning(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(without_schedule, 2, rows, str(tmp_path))
    beginning = plain(rows, max_steps=4).rates
    assert pool.run(resume, 2, rows, str(tmp_path / "step-2.ckpt"), Trained) == [beginning] * 2
    assert "WarmupDecay starts at its beginning, at step 2" in pool.output(0)


def save_weights(rank: int, world: int, rows: str, folder: str) -> None:
    callback = SaveAt(folder, (2,), save_weights_only=True)
    run(rank, world, rows, folder, {"dp_shard": 2}, trainer={**SHORT, "max_steps": 3}, callbacks=[callback])


def test_weights_only_checkpoints(pool: Pool, rows: str, made: Path, tmp_path: Path) -> None:
    pool.run(save_weights, 2, rows, str(tmp_path))
    ckpt = str(tmp_path / "step-2.ckpt")
    assert pool.run(evaluate, 1, rows, ckpt, Trained, True)[0] == pytest.approx(
        pool.run(evaluate, 2, rows, str(made / "sharded" / "step-2.ckpt"), Trained, True)[0], rel=1e-6
    )
    with pytest.raises(WorkerError, match=r"holds weights only.*lightning-nd export"):
        pool.run(resume, 2, rows, ckpt, Trained)
    with pytest.raises(WorkerError, match=r"passed over|none is whole"):
        pool.run(going_on, 2, rows, str(tmp_path))


def going_on(rank: int, world: int, rows: str, folder: str) -> None:
    run(rank, world, rows, folder, {"dp_shard": 2}, ckpt="last", trainer=SHORT, callbacks=[SaveAt(folder, ())])


class Odd:
    """An object that weights_only loading does not know."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


class WithObject(Trained):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["odd"] = Odd()
        checkpoint["path"] = Path("a")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["odd"]
        assert checkpoint["path"] == "a"


def save_object(rank: int, world: int, rows: str, folder: str) -> None:
    trainer = tiny_trainer(rank, world, NDStrategy(), max_steps=2, gradient_clip_val=1.0)
    trainer.fit(WithObject(), make_data(rows, 1, 1))
    trainer.save_checkpoint(f"{folder}/odd.ckpt")


def test_objects_need_weights_only_false(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(save_object, 1, rows, str(tmp_path))
    ckpt = str(tmp_path / "odd.ckpt")
    with pytest.raises(WorkerError, match=r"(?s)could run code.*Odd.*weights_only=False"):
        pool.run(resume, 1, rows, ckpt, WithObject)
    assert len(pool.run(resume, 1, rows, ckpt, WithObject, weights_only=False)[0]) == 4


# -- callbacks --------------------------------------------------------------------------------------------------------


def with_throughput(rank: int, world: int, rows: str, folder: str) -> int:
    callback = ThroughputMonitor(lambda batch: len(batch["input_ids"]))
    limits = {"max_steps": 3, "logger": MetricsLog(folder, name="", version=""), "log_every_n_steps": 1}
    degrees = {"dp_shard": 1, "tp": 2}
    return len(run(rank, world, rows, folder, degrees, trainer=limits, callbacks=[callback]).losses)


@pytest.mark.parametrize(
    "callback",
    [StochasticWeightAveraging(1e-2), WeightAveraging(), EMAWeightAveraging()],
    ids=lambda callback: type(callback).__name__,
)
def test_averaging_callbacks_are_refused(callback: Any, rows: str) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=NDStrategy(), callbacks=[callback], logger=False)
    with pytest.raises(ValueError, match=f"{type(callback).__name__} copies the module before it is sharded"):
        trainer.fit(Trained(), make_data(rows, 1, 1))


def saves_on_exception(rank: int, world: int, rows: str, callback: Any) -> None:
    trainer = tiny_trainer(rank, world, NDStrategy(), enable_checkpointing=True, callbacks=[callback])
    trainer.fit(Trained(), make_data(rows, world, 1))


@pytest.mark.parametrize("kind", ["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_no_rank_saves_alone_when_one_fails(pool: Pool, rows: str, tmp_path: Path, kind: str) -> None:
    callback: Any = OnExceptionCheckpoint(str(tmp_path))
    if kind == "ModelCheckpoint":
        callback = ModelCheckpoint(str(tmp_path), save_on_exception=True)
    with pytest.raises(WorkerError) as error:
        pool.run(saves_on_exception, 2, rows, callback)
    assert f"{kind} is to save when a rank fails, and no rank can save alone" in error.value.message  # the last word


def searched(rank: int, world: int, rows: str, folder: str) -> tuple[list[float], list[float]]:
    found = []
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    for callbacks in ([], [finder]):
        limits = {"max_steps": 3}
        found.append(
            run(rank, world, rows, folder, {"dp_shard": 1, "tp": 2}, trainer=limits, callbacks=callbacks).losses
        )
    return found[0], found[1]


def test_the_learning_rate_finder_leaves_the_run_as_it_was(pool: Pool, rows: str, tmp_path: Path) -> None:
    for without, after in pool.run(searched, 2, rows, str(tmp_path)):
        assert after[4:] == without  # behind its own four steps
    assert not list(tmp_path.rglob(".lr_find*"))


def test_throughput_monitor_is_warned_of(pool: Pool, rows: str, tmp_path: Path) -> None:
    assert pool.run(with_throughput, 2, rows, str(tmp_path)) == [3, 3]
    assert "2 times too high" in pool.output(0)


# -- the log of metrics -----------------------------------------------------------------------------------------------


class Logged(Trained):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("loss", loss)
        return loss


class OtherOptimizer(Logged):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class InWindow(ModelCheckpoint):
    """Saves when half of the batches of the third step are done."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2 * (each := trainer.accumulate_grad_batches) + each // 2 - 1:
            trainer.save_checkpoint(f"{self.dirpath}/inside.ckpt")


def logged(
    rank: int,
    world: int,
    rows: str,
    folder: str,
    steps: int,
    ckpt: str | None,
    accumulate: int = 1,
    module: Any = Logged,
) -> None:
    trainer = tiny_trainer(
        rank,
        world,
        NDStrategy(dp_shard=world),
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=MetricsLog(folder, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
        callbacks=[ModelCheckpoint(folder, "four", every_n_train_steps=4), *([InWindow(folder)] if not ckpt else [])],
    )
    trainer.fit(module(), make_data(rows, world, accumulate), ckpt_path=ckpt)


def steps_of(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_e07_one_log_with_every_step_once(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(logged, 2, rows, str(tmp_path), 6, None)
    assert steps_of(tmp_path) == list(range(6))
    pool.run(logged, 2, rows, str(tmp_path), 8, str(tmp_path / "four.ckpt"))
    assert steps_of(tmp_path) == list(range(8))
    assert not (tmp_path / ".metrics.earlier.csv").exists()


def test_a_window_that_is_read_again_is_logged_as_its_step(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(logged, 1, rows, str(tmp_path), 4, None, accumulate=2)
    pool.run(logged, 1, rows, str(tmp_path), 6, str(tmp_path / "inside.ckpt"), accumulate=2)
    assert steps_of(tmp_path) == list(range(6))


def test_a_refused_run_leaves_the_log_as_it_was(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(logged, 1, rows, str(tmp_path), 4, None)
    before = (tmp_path / "metrics.csv").read_text()
    with pytest.raises(WorkerError, match="optimizer"):
        pool.run(logged, 1, rows, str(tmp_path), 8, str(tmp_path / "four.ckpt"), module=OtherOptimizer)
    assert (tmp_path / "metrics.csv").read_text() == before
