"""Noise on embeddings: a row's own, whatever the layout, and in training only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, WorkerError, tiny_trainer
from reference import make_batches, rows_of
from test_recipe_causal_lm import folder as folder
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_nd import NDStrategy
from lightning_nd.recipes import CausalLM
from lightning_nd.recipes.neftune import noise


def test_noise_belongs_to_the_row_and_the_step() -> None:
    batch = make_batches(1)[0]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    made = noise(ids, mask, 32, 5.0, 3, 0)
    assert not made[mask == 0].any()
    for row in range(len(ids)):
        length = int(mask[row].sum())
        alone = noise(ids[row : row + 1, :length], None, 32, 5.0, 3, 0)
        assert torch.equal(made[row, :length], alone[0])
        bound = 5.0 / (length * 32) ** 0.5
        assert 0.9 * bound < float(alone.abs().max()) <= bound
        assert float(alone.std()) == pytest.approx(bound / 3**0.5, rel=0.1)  # of a uniform distribution
    assert not torch.equal(made, noise(ids, mask, 32, 5.0, 3, 1))
    assert not torch.equal(made, noise(ids, mask, 32, 5.0, 4, 0))


def test_noise_of_a_row_is_the_same_in_a_pack() -> None:
    ids, rows = torch.arange(40).reshape(1, 40) % 23, (9, 17, 14)
    positions = torch.cat([torch.arange(n) for n in rows])[None]
    made = noise(ids, None, 32, 5.0, 3, 0, positions)[0]
    start = 0
    for length in rows:
        alone = noise(ids[:, start : start + length], None, 32, 5.0, 3, 0)[0]
        assert torch.equal(made[start : start + length], alone)
        start += length


def fit(rank: int, world: int, folder: Path, degrees: dict[str, int]) -> tuple[float, float]:
    os.environ["PL_GLOBAL_SEED"] = "3"
    batch = make_batches(1)[0]
    found: dict[str, float] = {}

    class Module(CausalLM):
        def on_train_batch_end(self, *args: Any) -> None:
            found["train"] = float(self.trainer.strategy.step_loss)  # type: ignore[attr-defined]
            super().on_train_batch_end(*args)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = tiny_trainer(
        rank,
        world,
        NDStrategy(**degrees),  # type: ignore[arg-type]
        max_steps=1,
        use_distributed_sampler=False,
    )
    rows = DataLoader([rows_of(batch, rank, world)], batch_size=None)  # type: ignore[arg-type]
    module = Module(str(folder / "model"), neftune=5.0, export=False)
    trainer.fit(module, rows, rows)
    return found["train"], float(trainer.callback_metrics["val/loss"])


def test_the_loss_is_that_of_noisy_embeddings_in_one_process(pool: Pool, folder: Path) -> None:
    batch = make_batches(1)[0]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    targets = batch["labels"][:, 1:]

    def loss(extra: torch.Tensor | float) -> float:
        embeddings = model.get_input_embeddings()(batch["input_ids"]) + extra
        logits = model(inputs_embeds=embeddings, attention_mask=batch["attention_mask"]).logits[:, :-1]
        return float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets))

    with torch.no_grad():
        noisy = loss(noise(batch["input_ids"], batch["attention_mask"], 32, 5.0, 3, 0))
        plain = loss(0.0)
    assert abs(noisy - plain) > 1e-4
    for world in (1, 2):
        train, val = pool.run(fit, world, folder, {"dp_shard": world}, timeout=120)[0]
        assert train == pytest.approx(noisy, rel=1e-6)
        assert val == pytest.approx(plain, rel=1e-6)


def test_split_embeddings_are_refused(pool: Pool, folder: Path) -> None:
    with pytest.raises(WorkerError, match="under cp=1, tp=2 ranks hold parts of the embeddings"):
        pool.run(fit, 2, folder, {"tp": 2}, timeout=120)
    with pytest.raises(ValueError, match="neftune is -1"):
        CausalLM(str(folder / "model"), neftune=-1)
