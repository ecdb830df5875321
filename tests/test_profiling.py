"""A profile gives every moment to one phase, and bytes to their axis."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import pytest
from pool import Pool, tiny_trainer
from tiny import tiny_model, tiny_tokenizer

from lightning_nd import NDStrategy
from lightning_nd.cli.main import main
from lightning_nd.data import ChatDataModule
from lightning_nd.profiling import Phases, ProfileSteps, StepProfile, covered, read_trace
from lightning_nd.recipes import CausalLM


def test_phases_inside_of_others_are_taken_out() -> None:
    phases = Phases()
    phases.measuring = True
    with phases.profile("[LightningModule]Mine.optimizer_step"):
        time.sleep(0.02)
        with (
            phases.profile("[Strategy]NDStrategy.training_step"),
            phases.profile("[LightningModule]Mine.training_step"),
        ):
            time.sleep(0.05)
    assert phases.seconds["forward"] >= 0.05
    assert 0.02 <= phases.seconds["optimizer"] < phases.seconds["forward"]
    phases.measuring = False
    with phases.profile("[_TrainingEpochLoop].train_dataloader_next"):
        pass
    assert "data" not in phases.seconds


def test_a_trace_of_nccl_tells_axes_and_what_is_exposed() -> None:
    def kernel(name: str, begin: float, length: float, **args: str) -> dict[str, object]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": length, "args": args}

    events = [
        kernel("gemm", 0, 100),
        kernel("ncclDevKernel_AllGather", 50, 100, **{"Process Group Name": "7"}),
        kernel("ncclDevKernel_AllReduce", 140, 20, **{"Process Group Name": "9"}),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500},
    ]
    found = StepProfile({"forward": 2e-4})
    read_trace(events, {"7": "dp_shard"}, found)
    assert found.communicating == pytest.approx(110e-6)
    assert found.exposed == pytest.approx(60e-6)
    assert found.by_axis == {"dp_shard": pytest.approx(100e-6)}
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4


def test_a_trace_of_gloo_tells_what_is_exposed() -> None:
    def event(name: str, begin: float, length: float) -> dict[str, object]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": begin, "dur": length}

    found = StepProfile({"forward": 2e-4})
    within = event("autograd::engine::evaluate_function", 0, 200)  # may wait inside
    read_trace([event("aten::mm", 0, 100), event("gloo:all_reduce", 80, 100), within], {}, found)
    assert found.communicating == pytest.approx(100e-6)
    assert found.exposed == pytest.approx(80e-6)


def write_model_and_rows(folder: Path) -> None:
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]}
    (folder / "rows.jsonl").write_text(8 * (json.dumps(row) + "\n"))


def _profile(rank: int, world_size: int, folder: str) -> dict[str, object] | None:
    phases = Phases()
    steps = ProfileSteps(phases, 1, 1, Path(folder) / "profile")
    trainer = tiny_trainer(
        rank,
        world_size,
        NDStrategy(dp_shard=2, tp=2),
        max_steps=steps.length,
        callbacks=[steps],
        profiler=phases,
        default_root_dir=folder,
    )
    data = ChatDataModule(f"{folder}/rows.jsonl", max_length=32, micro_batch_size=1)
    trainer.fit(CausalLM(f"{folder}/model", export=False), datamodule=data)
    return None if steps.found is None else {"phases": steps.found.phases, "traffic": steps.found.traffic}


def test_bytes_are_told_by_axis(pool: Pool, tmp_path: Path) -> None:
    write_model_and_rows(tmp_path)
    found, *others = pool.run(_profile, 4, str(tmp_path))
    assert others == [None] * 3
    assert {"dp_shard", "tp"} <= set(found["traffic"])
    assert {"forward", "backward", "optimizer", "data"} <= set(found["phases"])
    # every parameter is gathered for the forward pass, and its gradient scattered once, in float32
    whole = 4 * sum(p.numel() for p in tiny_model().parameters()) / 2
    gathered, scattered = (found["traffic"]["dp_shard"][kind] for kind in ("allgather", "reduce_scatter"))
    assert gathered[1] >= whole
    assert scattered[1] >= whole
    assert json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]


def _command(rank: int, world_size: int, folder: str) -> tuple[int, int, str]:
    page = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(page):
        good = main(["profile", "--config", "recipe.yaml", "--steps", "1", "--warmup", "0"])
        return good, main(["profile", "--config", "recipe.yaml", "--steps", "0"]), page.getvalue()


def test_the_command_leaves_a_profile_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    write_model_and_rows(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "trainer: {accelerator: cpu, default_root_dir: out, max_epochs: 1}\n"
        "model: {init_args: {model: model}}\n"
        "data: {init_args: {train: rows.jsonl, max_length: 32}}\n"
        "lr_scheduler: {class_path: lightning_nd.recipes.WarmupDecay, init_args: {warmup: 100}}\n"
    )
    good, refused, page = pool.run(_command, 1, str(tmp_path))[0]
    assert (good, refused) == (0, 2)
    assert "backward" in page
    left = [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert sorted(left) == ["profile/profile.json", "profile/trace.json"]
