"""The command line as a user runs it: real processes, few runs."""

from __future__ import annotations

import csv
import json
import os
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
from lightning_nd import NDStrategy
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM

class Module(CausalLM):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            {action}
        return super().training_step(batch, batch_idx)

Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(dp_shard=2), max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(
    Module("model", export=False), datamodule=ChatDataModule("train.jsonl", max_length=64))
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


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    keep = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")}
    environ = {**keep, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )


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


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (
            'raise ValueError("row 17 is odd")',
            ["rank 1 on ", "failed first, at step 1 (train): ValueError: row 17 is odd"],
        ),
        ("os._exit(9)", ["rank 1 on ", "ended with exit code 9"]),
    ],
    ids=["raises", "exits"],
)
def test_one_failing_rank_ends_the_job_and_its_error_is_what_is_shown(
    folder: Path, action: str, words: list[str]
) -> None:
    (folder / "train.py").write_text(FAILING.format(tests=str(ROOT / "tests"), action=action))
    began = time.monotonic()
    result = run(folder, "train.py")
    assert result.returncode not in (0, -9), result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), result.stderr[-3000:]
    assert time.monotonic() - began < 200
