"""The command line as a user runs it: real processes, few runs."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

from lightning_nd.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
trainer:
  accelerator: cpu
  max_steps: 3
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: out
model: {init_args: {model: model}}
data: {init_args: {train: train.jsonl, val: train.jsonl, max_length: 64, micro_batch_size: 2}}
optimizer: {init_args: {lr: 1e-3}}
nd: {dp_shard: 2}
"""
FAILING = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_nd import NDStrategy
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM

class Module(CausalLM):
    def {hook}(self, *args):
        if self.trainer.global_step == 1 and self.global_rank == 1:
            {action}
        return super().{hook}(*args)

Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(dp_shard=2), max_steps=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=1, num_sanity_val_steps=0,
        default_root_dir={root!r}, callbacks=[ModelCheckpoint(every_n_train_steps=1)]).fit(
    Module("model", export=False), datamodule=ChatDataModule("train.jsonl", "train.jsonl", max_length=64))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    tiny_model().save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ab" * n}]}
        for n in range(1, 9)
    ]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "recipe.yaml").write_text(RECIPE)
    return path


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    keep = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")}
    environ = {**keep, "PYTHONPATH": path, **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, *command)
    try:
        out, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def test_fit_refuse_a_second_run_and_validate_from_the_saved_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = ("-m", "lightning_nd.cli")
    first = run(folder, *cli, "fit", "--config", "recipe.yaml")
    assert first.returncode == 0, first.stderr
    for name in ("export", "loss.png", "metrics.csv", "config.yaml"):
        assert f"out/{name}" in first.stdout
        assert (folder / "out" / name).exists()
    with open(folder / "out" / "metrics.csv", newline="") as file:
        columns = set(next(csv.reader(file)))
    assert columns >= {
        "train/loss",
        "train/grad_norm",
        "train/supervised_tokens",
        "lr",
        "val/loss",
        "val/perplexity",
        "throughput/tokens_per_s",
        "throughput/step_time_s",
    }

    monkeypatch.chdir(folder)
    assert main(["fit", "--config", "out/config.yaml"]) == 2
    refusal = capsys.readouterr().err
    assert "earlier run" in refusal
    assert "Traceback" not in refusal

    metrics = (folder / "out" / "metrics.csv").read_text()
    validation = ("validate", "--config", "out/config.yaml", "--model.model", "out/export", "--nd.dp_shard", "1")
    again = run(folder, *cli, *validation)
    assert again.returncode == 0, again.stderr
    assert "val/perplexity" in again.stdout
    assert (folder / "out" / "metrics.csv").read_text() == metrics


def losses(folder: Path) -> list[tuple[float, float]]:
    with open(folder / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    return [(float(row["train/loss"]), float(row["train/grad_norm"])) for row in rows]


def test_torchrun_and_slurm_give_the_numbers_of_one_process(folder: Path) -> None:
    options = ("--config", "recipe.yaml", "--model.export", "false")
    cli = ("-m", "lightning_nd.cli", "fit", *options)
    one = run(folder, *cli, "--nd.dp_shard", "1", "--data.micro_batch_size", "4", "--trainer.default_root_dir", "one")
    assert one.returncode == 0, one.stderr
    torchrun = run(
        folder, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *cli,
        "--trainer.default_root_dir", "torchrun",
    )  # fmt: skip
    assert torchrun.returncode == 0, torchrun.stderr
    srun = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "train",
            "SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost",
            "MASTER_PORT": str(free_port())}  # fmt: skip
    tasks = [
        start(folder, *cli, "--trainer.default_root_dir", "slurm", **srun, SLURM_PROCID=task, SLURM_LOCALID=task)
        for task in ("0", "1")
    ]
    for task in tasks:
        _, errors = task.communicate(timeout=240)
        assert task.returncode == 0, errors
    want = losses(folder / "one")
    assert len(want) == 3
    for started in ("torchrun", "slurm"):
        for got, expected in zip(losses(folder / started), want, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("hook", "action", "words"),
    [
        (
            "training_step",
            'raise ValueError("row 17 is odd")',
            ["rank 1 on ", "failed first, at step 2 (forward): ValueError: row 17 is odd"],
        ),
        (
            "on_before_batch_transfer",
            'assert not self.trainer.training, "row 17 is odd"',
            ["rank 1 on ", "failed first, at step 2 (data): AssertionError: row 17 is odd"],
        ),
        (
            "validation_step",
            'raise ValueError("row 17 is odd")',
            ["rank 1 on ", "failed first, at step 1 (validation): ValueError: row 17 is odd"],
        ),
        (
            "on_save_checkpoint",
            'raise OSError("no space left")',
            ["rank 1 on ", "failed first, at step 1 (saving): OSError: no space left"],
        ),
    ],
    ids=["raises", "data", "validation", "saving"],
)
def test_one_failing_rank_ends_the_job_and_its_error_is_what_is_shown(
    folder: Path, tmp_path: Path, hook: str, action: str, words: list[str]
) -> None:
    script = FAILING.format(tests=str(ROOT / "tests"), hook=hook, action=action, root=str(tmp_path))
    (folder / "train.py").write_text(script)
    began = time.monotonic()
    result = run(folder, "train.py")
    assert result.returncode not in (0, -9), result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), result.stderr[-3000:]
    assert time.monotonic() - began < 200
