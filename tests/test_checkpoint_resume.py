"""A run that was saved on one layout goes on with another as if nothing had happened.

Reported elsewhere: C01 (a batch twice), C03 (rates jump), C04 (other degrees), C05 (moments lost, half frozen).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pool import Pool, WorkerError
from resuming import SaveAt, check_continues, check_equal, plain, run, write_rows

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp_shard2": {"dp_shard": 2},
    "dp_replicate2": {"dp_replicate": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "dp_shard2-tp2": {"dp_shard": 2, "tp": 2},
    "dp_replicate2-cp2": {"dp_replicate": 2, "cp": 2},
}


def size(degrees: dict[str, int]) -> int:
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    return ranks


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def whole(rows: str) -> Any:
    return plain(rows)


@pytest.fixture(scope="module")
def saved(pool: Pool, rows: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of steps 4 (in the first epoch) and 9 (at its end), of runs on three layouts."""
    folders = {}
    for name in ("one", "dp_shard2-tp2", "dp_replicate2-cp2"):
        folders[name] = tmp_path_factory.mktemp(name)
        degrees = LAYOUTS[name]
        pool.run(run, size(degrees), rows, str(folders[name]), degrees, save_at=(4, 9), trainer={"max_steps": 10})
    return folders


@pytest.mark.parametrize(
    ("here", "there", "step"),
    [
        ("one", "one", 4),
        ("one", "dp_shard2-tp2", 4),
        ("one", "dp_replicate2-cp2", 9),
        ("dp_shard2-tp2", "one", 4),
        ("dp_shard2-tp2", "dp_shard2", 9),
        ("dp_shard2-tp2", "cp2", 4),
        ("dp_replicate2-cp2", "one", 9),
        ("dp_replicate2-cp2", "tp2", 4),
        ("dp_replicate2-cp2", "dp_shard2", 4),
    ],
)
def test_any_layout_goes_on_with_any_other(
    pool: Pool, rows: str, whole: Any, saved: dict[str, Path], here: str, there: str, step: int, tmp_path: Path
) -> None:
    degrees = LAYOUTS[there]
    after = pool.run(run, size(degrees), rows, str(tmp_path), degrees, ckpt=str(saved[here] / f"step-{step}.ckpt"))
    for story in after:
        check_continues(whole, story, step)


@pytest.mark.parametrize("options", [{}, {"save_distributed_checkpoint": False}, {"async_checkpoint": True}], ids=str)
def test_the_same_layout_goes_on_bit_for_bit(pool: Pool, rows: str, options: dict[str, Any], tmp_path: Path) -> None:
    degrees, short = LAYOUTS["dp_shard2-tp2"], {"max_steps": 12}
    whole = pool.run(run, 4, rows, str(tmp_path), degrees, save_at=(4, 10), strategy=options, trainer=short)[0]
    for step, stop in ((4, 6), (10, 12)):  # in the first epoch and in the second
        ckpt = str(tmp_path / f"step-{step}.ckpt")
        assert Path(ckpt).is_file() is (options.get("save_distributed_checkpoint") is False)
        for story in pool.run(run, 4, rows, str(tmp_path), degrees, ckpt=ckpt, trainer={"max_steps": stop}):
            assert story.rows == whole.rows[step:stop]
            assert story.rates == whole.rates[step:stop]
            assert story.losses == whole.losses[step:stop]
    check_equal(whole, story, 10)


OPTIONS: dict[str, dict[str, Any]] = {
    "packed": {"data": {"packing": True, "max_length": 40}},
    "streamed": {"data": {"streaming": True}},
    "workers": {"data": {"num_workers": 2}},
    "streamed-workers": {"data": {"streaming": True, "num_workers": 2}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_data_of_every_kind_goes_on_at_the_next_row(pool: Pool, rows: str, name: str, tmp_path: Path) -> None:
    options, short = OPTIONS[name], {"max_steps": 12}
    whole = plain(rows, **options, **short)
    pool.run(run, 2, rows, str(tmp_path), {"dp_shard": 2}, save_at=(4,), trainer={"max_steps": 5}, **options)
    ckpt = str(tmp_path / "step-4.ckpt")
    for story in pool.run(run, 1, rows, str(tmp_path), {}, accumulate=2, ckpt=ckpt, trainer=short, **options):
        check_continues(whole, story, 4)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"packing": True, "max_length": 40},
        {"streaming": True},
        {"streaming": True, "num_workers": 2},
        {"own_loader": {"shuffle": False}},
        {"own_loader": {"shuffle": False, "num_workers": 2}},
    ],
    ids=str,
)
def test_a_schedule_that_asks_for_the_number_of_steps(
    pool: Pool, rows: str, data: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "module": {"total_steps": None}}
    limits = {"max_steps": 14 if "streaming" in data else -1, "max_epochs": 2}  # a stream's length is not known
    whole = plain(rows, **options, **limits)
    pool.run(run, 2, rows, str(tmp_path), {"dp_shard": 2}, save_at=(4,), trainer=limits, **options)
    ckpt = str(tmp_path / "step-4.ckpt")
    for degrees in ({"dp_shard": 2}, {"tp": 2}):
        for story in pool.run(run, 2, rows, str(tmp_path), degrees, ckpt=ckpt, trainer=limits, **options):
            check_continues(whole, story, 4)


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"shuffle": False}, {"shuffle": True, "num_workers": 2}], ids=str
)
def test_a_loader_of_the_user_goes_on_at_the_next_row(
    pool: Pool, rows: str, options: dict[str, Any], tmp_path: Path
) -> None:
    short, data = {"max_steps": 12}, {"own_loader": options}
    whole = plain(rows, data={"own_loader": {"shuffle": options["shuffle"], "sampler": True}}, **short)
    stop = {"max_steps": 10}
    pool.run(run, 2, rows, str(tmp_path), {"dp_shard": 2}, save_at=(4, 9), trainer=stop, data=data)
    for step, degrees in ((4, {"tp": 2}), (9, {"dp_shard": 2})):
        ckpt = str(tmp_path / f"step-{step}.ckpt")
        for story in pool.run(run, 2, rows, str(tmp_path), degrees, ckpt=ckpt, trainer=short, data=data):
            check_continues(whole, story, step)
    ckpt = str(tmp_path / "step-4.ckpt")
    for story in pool.run(run, 1, rows, str(tmp_path), {}, accumulate=2, ckpt=ckpt, trainer=short, data=data):
        check_continues(whole, story, 4)


def test_a_loader_that_drops_what_fills_no_batch(pool: Pool, rows: str, tmp_path: Path) -> None:
    short = {"max_steps": 12}
    options = {"shuffle": True, "drop_last": True, "count": 38}
    whole = plain(rows, data={"own_loader": {**options, "sampler": True}}, **short)
    data = {"own_loader": options}
    pool.run(run, 2, rows, str(tmp_path), {"dp_shard": 2}, save_at=(7, 9), trainer={"max_steps": 10}, data=data)
    for step in (7, 9):
        ckpt = str(tmp_path / f"step-{step}.ckpt")
        for story in pool.run(run, 1, rows, str(tmp_path), {}, ckpt=ckpt, trainer=short, data=data):
            check_continues(whole, story, step)


def test_accumulation_over_other_micro_batches(pool: Pool, rows: str, tmp_path: Path) -> None:
    short = {"max_steps": 12}
    whole = plain(rows, **short)
    stop = {"max_steps": 10}
    pool.run(run, 1, rows, str(tmp_path), {}, accumulate=4, save_at=(4, 9), trainer=stop)
    for step in (4, 9):
        ckpt = str(tmp_path / f"step-{step}.ckpt")
        for story in pool.run(run, 2, rows, str(tmp_path), {"dp_shard": 2}, ckpt=ckpt, trainer=short):
            check_continues(whole, story, step)


class InWindow(SaveAt):
    """Saves after every batch, as a callback that goes by the clock may do."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 36 in (1, 13):  # two of the four batches of step 1, or 4, of the epoch are done
            trainer.save_checkpoint(f"{self.dirpath}/in-window-{trainer.global_step}.ckpt")


def test_a_window_that_was_not_complete_is_read_again(pool: Pool, rows: str, tmp_path: Path) -> None:
    short = {"max_steps": 8}
    whole = plain(rows, **short)
    callback = InWindow(str(tmp_path), ())
    limits = {"max_steps": 4, "enable_checkpointing": True}
    pool.run(run, 1, rows, str(tmp_path), {}, accumulate=4, trainer=limits, callbacks=[callback])
    ckpt = str(tmp_path / "in-window-3.ckpt")
    for degrees, accumulate in (({}, 4), ({"dp_shard": 2}, 1)):
        for story in pool.run(
            run, size(degrees), rows, str(tmp_path), degrees, accumulate=accumulate, ckpt=ckpt, trainer=short
        ):
            check_continues(whole, story, 3)


@pytest.mark.parametrize("limits", [{"max_steps": 20}, {"max_steps": -1, "max_epochs": 3}], ids=["steps", "epochs"])
def test_a_run_that_goes_on_from_the_end_of_an_epoch_goes_on_from_the_next_one(
    pool: Pool, rows: str, tmp_path: Path, limits: dict[str, int]
) -> None:
    folder = str(tmp_path)
    whole = pool.run(run, 1, rows, folder, {}, save_at=(9,), trainer=limits)[0]
    options: dict[str, Any] = {"trainer": limits, "ckpt": str(tmp_path / "step-9.ckpt")}
    check_equal(whole, pool.run(run, 1, rows, folder, {}, save_at=(10, 18), **options)[0], 9)
    for step in (10, 18):
        options["ckpt"] = str(tmp_path / f"step-{step}.ckpt")
        check_equal(whole, pool.run(run, 1, rows, folder, {}, **options)[0], step)


def test_a_window_of_a_stream_is_read_again(pool: Pool, rows: str, tmp_path: Path) -> None:
    windows: dict[str, Any] = {"accumulate": 4, "data": {"streaming": True}}
    save: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [InWindow(str(tmp_path), ())]}
    whole = pool.run(run, 1, rows, str(tmp_path), {}, trainer={"max_steps": 13, **save}, **windows)[0]
    for step in (3, 9):
        ckpt = str(tmp_path / f"in-window-{step}.ckpt")
        story = pool.run(run, 1, rows, str(tmp_path), {}, ckpt=ckpt, trainer={"max_steps": 13}, **windows)[0]
        check_equal(whole, story, step)


def test_a_window_of_a_loader_that_only_knows_its_own_place(pool: Pool, rows: str, tmp_path: Path) -> None:
    data = {"own_loader": {"shuffle": False, "counting": True}}
    whole = plain(rows, data={"own_loader": {"shuffle": False}}, max_steps=14)
    windows = {"accumulate": 4, "data": data}
    save: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [InWindow(str(tmp_path), ())]}
    pool.run(run, 1, rows, str(tmp_path), {}, trainer={"max_steps": 13, **save}, **windows)
    # from the first window after a resume, too
    again = {"ckpt": str(tmp_path / "in-window-3.ckpt"), "trainer": {"max_steps": 4, **save}}
    (tmp_path / "in-window-3.ckpt").rename(tmp_path / "first.ckpt")
    pool.run(run, 1, rows, str(tmp_path), {}, **{**again, "ckpt": str(tmp_path / "first.ckpt")}, **windows)
    for step in (0, 3, 9, 12):
        ckpt = str(tmp_path / f"in-window-{step}.ckpt")
        for story in pool.run(run, 1, rows, str(tmp_path), {}, ckpt=ckpt, trainer={"max_steps": 14}, **windows):
            check_continues(whole, story, step)


def test_a_loader_of_unknown_length_that_only_knows_its_own_place(pool: Pool, rows: str, tmp_path: Path) -> None:
    data = {"own_loader": {"shuffle": False, "counting": True, "unsized": True}}
    whole = plain(rows, data={"own_loader": {"shuffle": False}}, max_steps=14)
    folder, save = str(tmp_path), [InWindow(str(tmp_path), ())]
    pool.run(run, 1, rows, folder, {}, save_at=(1, 4, 8, 10), trainer={"max_steps": 11}, data=data)
    limits = {"max_steps": 4, "enable_checkpointing": True}
    pool.run(run, 1, rows, folder, {}, accumulate=4, trainer=limits, data=data, callbacks=save)
    for name, step, accumulate in (("step-1", 1, 1), ("step-4", 4, 1), ("step-8", 8, 1), ("in-window-3", 3, 4)):
        options: dict[str, Any] = {"accumulate": accumulate, "ckpt": str(tmp_path / f"{name}.ckpt"), "data": data}
        for story in pool.run(run, 1, rows, folder, {}, trainer={"max_steps": 14}, **options):
            check_continues(whole, story, step)


@pytest.mark.parametrize("unsized", [False, True])
@pytest.mark.parametrize("limits", [{"max_steps": 12}, {"max_steps": -1, "max_epochs": 2}], ids=["steps", "epochs"])
def test_no_epoch_is_lost_behind_the_end_of_one(
    pool: Pool, rows: str, tmp_path: Path, limits: dict[str, int], unsized: bool
) -> None:
    data = {"own_loader": {"shuffle": False, "counting": True, "unsized": unsized}}
    whole = plain(rows, data={"own_loader": {"shuffle": False}}, **limits)
    pool.run(run, 1, rows, str(tmp_path), {}, save_at=(9,), trainer={"max_steps": 10}, data=data)
    ckpt = str(tmp_path / "step-9.ckpt")
    check_continues(whole, pool.run(run, 1, rows, str(tmp_path), {}, ckpt=ckpt, trainer=limits, data=data)[0], 9)


def test_a_step_is_not_saved_again_in_the_window_after_it(pool: Pool, rows: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    pool.run(run, 1, rows, folder, {}, accumulate=2, save_at=(2,), trainer={"max_steps": 2})
    before = (tmp_path / "step-2.ckpt").stat().st_ino
    options: dict[str, Any] = {"accumulate": 2, "save_at": (2, 3), "ckpt": str(tmp_path / "step-2.ckpt")}
    pool.run(run, 1, rows, folder, {}, trainer={"max_steps": 3}, **options)
    assert (tmp_path / "step-2.ckpt").stat().st_ino == before  # nor in its place
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step-2.ckpt", "step-3.ckpt"]


class AtTheEnd(ModelCheckpoint):
    """Lightning's own checkpoint at the end of an epoch, and one after the fit."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **{"filename": "epoch-end", **options})

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        trainer.save_checkpoint(f"{self.dirpath}/after.ckpt")


@pytest.mark.parametrize("limit", ["steps", "epochs"])
@pytest.mark.parametrize(
    ("name", "stop"),
    [("rows", 4), ("streamed", 4), ("rows", 9), ("streamed", 9), ("rows", 10)],  # 9 is the end of an epoch
)
def test_a_run_that_was_stopped_goes_on_where_it_was(
    pool: Pool, rows: str, tmp_path: Path, name: str, stop: int, limit: str
) -> None:
    options: dict[str, Any] = {"data": {"streaming": True}} if name == "streamed" else {}
    further: dict[str, Any] = {"max_steps": 12} if limit == "steps" else {"max_steps": -1, "max_epochs": 2}
    whole = pool.run(run, 1, rows, str(tmp_path), {}, trainer=further, **options)[0]
    limits = {"max_steps": stop, "enable_checkpointing": True}
    pool.run(run, 1, rows, str(tmp_path), {}, trainer=limits, callbacks=[AtTheEnd(str(tmp_path))], **options)
    for file in ("epoch-end.ckpt", "after.ckpt"):
        story = pool.run(run, 1, rows, str(tmp_path), {}, ckpt=str(tmp_path / file), trainer=further, **options)[0]
        assert story.rows == whole.rows[stop:], file
        check_equal(whole, story, stop)


@pytest.mark.parametrize("late", [True, False], ids=["after-the-epoch", "after-validation"])
def test_a_validation_at_the_end_of_the_epoch_is_not_counted_as_a_step(
    pool: Pool, rows: str, tmp_path: Path, late: bool
) -> None:
    options: dict[str, Any] = {"data": {"val": rows}}
    further = {"max_steps": 11, "limit_val_batches": 1, "enable_checkpointing": True}
    names = {"filename": "{step}", "auto_insert_metric_name": False, "save_top_k": -1}
    callback = AtTheEnd(str(tmp_path), save_on_train_epoch_end=late, **names)
    whole = pool.run(run, 1, rows, str(tmp_path), {}, trainer=further, callbacks=[callback], **options)[0]
    ckpt = str(tmp_path / "9.ckpt")
    story = pool.run(run, 1, rows, str(tmp_path), {}, ckpt=ckpt, trainer=further, **options)[0]
    check_equal(whole, story, 9)


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" in name


MODELS: dict[str, dict[str, Any]] = {
    "packed-experts": {"family": "mixtral", "num_local_experts": 3},  # split along a later dim
    "tied": {"family": "gemma3"},
    "lora": {"prepare": lora},
    "half-frozen": {"prepare": freeze},
}


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "one-file"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind(pool: Pool, rows: str, name: str, sharded: bool, tmp_path: Path) -> None:
    """Several ranks and one process, there and back, against one process of plain Lightning."""
    module, short = MODELS[name], {"max_steps": 6}
    whole = plain(rows, module=module, **short)
    # one file is gathered shard by shard: of which axes is proven above
    both, options = LAYOUTS["dp_shard2-tp2" if sharded else "tp2"], {"save_distributed_checkpoint": sharded}
    there, back, ranks = str(tmp_path / "there"), str(tmp_path / "back"), size(both)
    stop = {"max_steps": 3}
    pool.run(run, ranks, rows, there, both, save_at=(2,), trainer=stop, module=module, strategy=options)
    here = pool.run(
        run,
        1,
        rows,
        back,
        {},
        save_at=(4,),
        ckpt=f"{there}/step-2.ckpt",
        trainer=short,
        module=module,
        strategy=options,
    )
    check_continues(whole, here[0], 2)
    for story in pool.run(run, ranks, rows, back, both, ckpt=f"{back}/step-4.ckpt", trainer=short, module=module):
        check_continues(whole, story, 4)


def test_settings_that_give_way_to_the_checkpoints_are_told(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(run, 1, rows, str(tmp_path), {}, save_at=(4,), trainer={"max_steps": 5})
    ckpt = str(tmp_path / "step-4.ckpt")
    told = pool.run(going_on_otherwise, 1, rows, str(tmp_path), ckpt, {"lr": 5e-2})[0]
    assert "the optimizer goes on with the checkpoint's settings: lr 0.01 (configured: 0.05)" in told
    told = pool.run(going_on_otherwise, 1, rows, str(tmp_path), ckpt, {"total_steps": 36})[0]
    assert "schedule is not that of the checkpoint" in told
    assert "step 5 would have had a rate of 0.00989 and has 0.00998" in told
    assert pool.run(going_on_otherwise, 1, rows, str(tmp_path), ckpt, {}) == [""]


def going_on_otherwise(rank: int, world: int, path: str, folder: str, ckpt: str, module: dict[str, Any]) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(rank, world, path, folder, {}, ckpt=ckpt, trainer={"max_steps": 6}, module=module)
    return "\n".join(str(w.message) for w in seen if "NDStrategy" in str(w.message))


def test_other_rows_are_refused_in_the_middle_of_an_epoch(pool: Pool, rows: str, tmp_path: Path) -> None:
    pool.run(run, 1, rows, str(tmp_path), {}, save_at=(4, 9), trainer={"max_steps": 10})
    other = tmp_path / "other.jsonl"
    other.write_text(Path(rows).read_text().replace("q5", "q6"))
    with pytest.raises(WorkerError, match=r"stands at row 16 of an epoch with .*tokens=.* it now has .*tokens="):
        pool.run(run, 1, str(other), str(tmp_path), {}, ckpt=str(tmp_path / "step-4.ckpt"))
    pool.run(run, 1, str(other), str(tmp_path), {}, ckpt=str(tmp_path / "step-9.ckpt"), trainer={"max_steps": 10})
