"""Evaluation: the numbers of one process on every layout and batch size, and completions while training goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, tiny_trainer
from test_recipe_causal_lm import folder as folder
from tiny import EOS
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_nd import NDStrategy
from lightning_nd.callbacks import GenerateSamples
from lightning_nd.data import ChatDataModule
from lightning_nd.recipes import CausalLM

LAYOUTS: list[dict[str, int]] = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}]
PROMPTS = ["a", "hello there"]


def name_of(degrees: dict[str, int]) -> str:
    return "x".join(f"{axis}{degree}" for axis, degree in degrees.items())


def evaluate(rank: int, world: int, folder: Path, degrees: dict[str, int]) -> list[dict[str, float]]:
    """Metrics of a test and a validation, for two batch sizes."""
    found = []
    for size in (1, 3):
        trainer = tiny_trainer(rank, world, NDStrategy(**degrees))  # type: ignore[arg-type]
        val = str(folder / "val.jsonl")
        data = ChatDataModule(val=val, test=val, max_length=100, eval_micro_batch_size=size)
        module = CausalLM(str(folder / "model"))
        metrics = {**trainer.test(module, data, verbose=False)[0], **trainer.validate(module, data, verbose=False)[0]}
        found.append(metrics)
    return found


@torch.no_grad()
def by_hand(folder: Path) -> dict[str, float]:
    """In float64, row by row."""
    data = ChatDataModule(test=str(folder / "val.jsonl"), max_length=100, tokenizer=str(folder / "model"))
    data.setup("test")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    nll, tokens, right = 0.0, 0, 0
    for batch in data._loader("test", shuffle=False, micro_batch_size=1):
        logits = model(batch["input_ids"]).logits[0, :-1]
        targets = batch["labels"][0, 1:]
        kept = targets != -100
        nll -= float(logits.log_softmax(-1)[kept].gather(1, targets[kept, None]).sum())
        tokens += int(kept.sum())
        right += int((logits.argmax(-1) == targets)[kept].sum())
    loss = nll / tokens
    return {"loss": loss, "perplexity": float(torch.tensor(loss).exp()), "tokens": tokens, "accuracy": right / tokens}


@pytest.mark.parametrize("degrees", LAYOUTS, ids=name_of)
def test_loss_tokens_and_accuracy_are_those_of_one_process(
    pool: Pool,
    folder: Path,
    degrees: dict[str, int],
) -> None:
    expected = by_hand(folder)
    for ranks in pool.run(evaluate, 2, folder, degrees, timeout=120):
        for metrics in ranks:
            assert metrics["test/loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert metrics["val/loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert metrics["val/perplexity"] == pytest.approx(expected["perplexity"], rel=5e-6)
            assert metrics["test/perplexity"] == pytest.approx(expected["perplexity"], rel=5e-6)
            assert metrics["test/tokens"] == expected["tokens"]
            assert metrics["test/accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)


class TextLogger:
    """What TensorBoard's logger has of text."""

    def __init__(self) -> None:
        self.experiment, self.texts = self, []

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))


def train(
    rank: int, world: int, folder: Path, out: Path, degrees: dict[str, int], sample: bool = True
) -> tuple[list[float], bool]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    losses: list[float] = []

    class Module(CausalLM):
        def on_train_batch_end(self, *args: Any) -> None:
            losses.append(float(self.trainer.strategy.step_loss))  # type: ignore[attr-defined]
            super().on_train_batch_end(*args)

    callbacks = [GenerateSamples(str(out / "prompts.txt"), max_new_tokens=6)] if sample else []
    trainer = tiny_trainer(
        rank,
        world,
        NDStrategy(**degrees),  # type: ignore[arg-type]
        max_steps=3,
        val_check_interval=1,
        default_root_dir=str(out),
        callbacks=callbacks,
    )
    train_file, val = str(folder / "train.jsonl"), str(folder / "val.jsonl")
    data = ChatDataModule(
        train_file, val, max_length=100, micro_batch_size=2 // degrees.get("dp_shard", 1), shuffle=False
    )
    trainer.fit(Module(str(folder / "model"), export=False), datamodule=data)
    return losses, trainer.lightning_module.training


@torch.no_grad()
def completions(folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        made: list[int] = []
        while len(made) < 6 and EOS not in made:
            made.append(int(model(torch.tensor([ids + made])).logits[0, -1].argmax()))
        text = " ".join(tokenizer.decode([i for i in made if i != EOS], skip_special_tokens=True).split())
        answers.append((text or "(nothing)") + ("" if EOS in made else " …"))
    return answers


@pytest.mark.parametrize("degrees", LAYOUTS, ids=name_of)
def test_G06_completions_during_validation_change_nothing(
    pool: Pool,
    folder: Path,
    tmp_path: Path,
    degrees: dict[str, int],
) -> None:
    (tmp_path / "prompts.txt").write_text("a\n\nhello there\n")
    losses, training = pool.run(train, 2, folder, tmp_path, degrees, timeout=120)[0]
    assert training
    assert losses == pool.run(train, 2, folder, tmp_path, degrees, sample=False, timeout=120)[0][0]
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (1, 2, 3) for p in PROMPTS]
    # at the small default rate two steps do not change what is likeliest
    assert [row["completion"] for row in rows[:2]] == completions(folder)


def test_loggers_that_take_text_get_it() -> None:
    from lightning_nd.callbacks.samples import _log_text

    logger = TextLogger()
    _log_text(logger, [("a", "b"), ("c", "d")], 7)
    assert logger.texts == [("samples", "**a**\n\nb\n\n**c**\n\nd", 7)]
