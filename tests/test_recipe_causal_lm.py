"""The causal LM recipe: logged numbers against sums written out by hand, refusals before weights, and the export."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from pool import Pool, tiny_trainer
from reference import nll_sum
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_nd import NDStrategy
from lightning_nd.callbacks import LossPlot, SampleCompletions, ScoreWriter, Throughput
from lightning_nd.callbacks.samples import greedy
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM

PROMPTS = [[260, 97, 98], [260, 99, 100, 101, 102, 103, 104], [260]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    for name, answers in (("train", (1, 9, 3, 14, 2, 6)), ("val", (12, 1, 5, 2, 30))):
        rows = [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "ab" * n}]}
            for n in answers
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fit(folder: Path, out: Path, trainer: Trainer) -> tuple[CausalLM, ChatDataModule]:
    trainer.loggers = [CSVLogger(str(out), name="", version="")]
    module = CausalLM(str(folder / "model"))
    data = ChatDataModule(
        str(folder / "train.jsonl"), str(folder / "val.jsonl"), max_length=100, micro_batch_size=1, shuffle=False
    )
    trainer.fit(module, datamodule=data)
    return module, data


def run_rank(rank: int, world: int, folder: Path, out: Path, degrees: dict[str, int]) -> list[list[int]]:
    samples: list[list[int]] = []

    class Sample(SampleCompletions):
        def _show(self, when: str, trainer: Trainer, pl_module: Any) -> None:
            samples.extend(greedy(pl_module, PROMPTS, 8))

    trainer = tiny_trainer(
        rank,
        world,
        NDStrategy(**degrees),
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        default_root_dir=str(out),
        callbacks=[Throughput(), LossPlot(), Sample(["hello"])],
    )
    fit(folder, out, trainer)
    return samples


def metrics(out: Path) -> tuple[list[dict[str, float]], dict[str, float]]:
    with open(out / "metrics.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "train/loss" in row], next(row for row in rows if "val/loss" in row)


def batches(data: ChatDataModule, name: str) -> list[dict[str, torch.Tensor]]:
    loader = data._loader(name, shuffle=False, micro_batch_size=1)
    return list(loader)


@torch.no_grad()
def greedy_reference(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}], ids=["dp_shard=2", "tp=2"])
def test_numbers_samples_and_export_equal_one_process(
    pool: Pool, folder: Path, tmp_path: Path, degrees: dict[str, int]
) -> None:
    samples = pool.run(run_rank, 2, folder, tmp_path, degrees)
    assert samples[0] == samples[1]
    assert samples[0][:3] == greedy_reference(folder)

    # losses of the first window and of the validation, by sums written out
    data = ChatDataModule(
        str(folder / "train.jsonl"), str(folder / "val.jsonl"), max_length=100, tokenizer=str(folder / "model")
    )
    data.setup("fit")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    window = 2 * degrees.get("dp_shard", 1)
    with torch.no_grad():
        sums = [nll_sum(model, batch) for batch in batches(data, "train")[:window]]
    nll, tokens = sum(float(s[0]) for s in sums), sum(s[1] for s in sums)
    train, val = metrics(tmp_path)
    assert train[0]["train/loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert train[0]["train/supervised_tokens"] == tokens
    assert train[0]["train/grad_norm"] > 0
    assert train[0]["lr"] == pytest.approx(1e-5)
    assert train[0]["throughput/tokens_per_s"] > 0
    assert train[0]["throughput/step_time_s"] > 0
    assert len(train) == 6 // window + (6 % window > 0)

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        sums = [nll_sum(exported, batch) for batch in batches(data, "val")]
    loss = sum(float(s[0]) for s in sums) / sum(s[1] for s in sums)
    assert val["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert val["val/perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def context_rank(rank: int, world: int, folder: Path, out: Path) -> None:
    trainer = tiny_trainer(
        rank, world, NDStrategy(), max_epochs=1, log_every_n_steps=1, default_root_dir=str(out),
        logger=CSVLogger(str(out), name="", version=""),
    )  # fmt: skip
    data = ChatDataModule(str(out / "rows.jsonl"), max_length=100, micro_batch_size=1, shuffle=False)
    trainer.fit(CausalLM(str(folder / "model"), export=False), datamodule=data)


def test_a_step_without_supervised_tokens_logs_zero(pool: Pool, folder: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]}
    rows = [row, row, row | {"train": False}, row | {"train": False}, row, row | {"train": False}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool.run(context_rank, 2, folder, tmp_path)
    with open(tmp_path / "metrics.csv", newline="") as file:
        found = [(float(row["train/loss"]), float(row["train/supervised_tokens"])) for row in csv.DictReader(file)]
    assert [loss > 0 for loss, _ in found] == [True, False, True]
    assert found[1] == (0.0, 0.0)
    assert found[2][1] == found[0][1] / 2


def test_a_plain_lightning_strategy_works_too(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
        callbacks=[Throughput()],
    )
    module, data = fit(folder, tmp_path, trainer)
    assert module.exported_to == tmp_path / "export"
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        sums = [nll_sum(model, batch) for batch in batches(data, "train")[:2]]
    with open(tmp_path / "metrics.csv", newline="") as file:
        first = next(csv.DictReader(file))
    tokens = sum(s[1] for s in sums)
    assert float(first["train/loss"]) == pytest.approx(sum(float(s[0]) for s in sums) / tokens, rel=1e-5)
    assert float(first["train/supervised_tokens"]) == tokens
    assert float(first["train/grad_norm"]) > 0


def test_scores_of_rows(folder: Path) -> None:
    module = CausalLM(str(folder / "model"))
    module.model = AutoModelForCausalLM.from_pretrained(folder / "model")
    data = ChatDataModule(predict=str(folder / "val.jsonl"), tokenizer=str(folder / "model"), max_length=100)
    data.setup("predict")
    batch = next(iter(data._loader("predict", shuffle=False, micro_batch_size=3)))
    with torch.no_grad():
        scores = module.predict_step(batch, 0)
        for row in range(3):
            nll, tokens = nll_sum(module.model, {name: value[row : row + 1] for name, value in batch.items()})
            assert float(scores["nll"][row]) == pytest.approx(float(nll), rel=1e-5)
            assert int(scores["supervised_tokens"][row]) == tokens


def predict_rank(rank: int, world: int, folder: Path, out: Path, degrees: dict[str, int]) -> None:
    writer = ScoreWriter(str(out / "scores.jsonl"))
    trainer = tiny_trainer(rank, world, NDStrategy(**degrees), callbacks=[writer])
    data = ChatDataModule(predict=str(folder / "val.jsonl"), max_length=100, micro_batch_size=1)
    trainer.predict(CausalLM(str(folder / "model")), datamodule=data, return_predictions=False)


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}], ids=["dp_shard=2", "tp=2", "cp=2"])
def test_every_row_is_scored_once_in_order(pool: Pool, folder: Path, tmp_path: Path, degrees: dict[str, int]) -> None:
    pool.run(predict_rank, 2, folder, tmp_path, degrees)
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [score["row"] for score in scores] == [0, 1, 2, 3, 4]
    data = ChatDataModule(predict=str(folder / "val.jsonl"), tokenizer=str(folder / "model"), max_length=100)
    data.setup("predict")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for score, batch in zip(scores, batches(data, "predict"), strict=True):
            nll, tokens = nll_sum(model, batch)
            assert score["nll"] == pytest.approx(float(nll), rel=1e-5)
            assert score["supervised_tokens"] == tokens


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda f: CausalLM("./nowhere"), "no folder .*/nowhere; give a model folder or a hub id"),
        (lambda f: CausalLM(str(f)), "has no config.json"),
        (
            lambda f: CausalLM(str(f / "model"), config_overrides={"rope_thetta": 1.0}),
            "LlamaConfig has no 'rope_thetta'",
        ),
        (lambda f: CausalLM(str(f / "model"), config_overrides={"vocab_size": 260}), "ids up to 263.*260 embeddings"),
        (lambda f: CausalLM(str(f / "model"), tokenizer="./nowhere"), "cannot read a tokenizer"),
    ],
)
def test_refused_before_weights_are_loaded(folder: Path, build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(folder)


def test_an_export_folder_with_files_is_refused_before_weights_are_loaded(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    module = CausalLM(str(folder / "model"), export_dir=str(tmp_path))
    with pytest.raises(ValueError, match="already holds files"):
        module.setup("fit")
    module.setup("validate")
