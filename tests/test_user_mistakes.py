"""Mistakes that would train on wrong numbers, or hide a failure, without a word."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from families import make_config, make_model
from pool import Pool, WorkerError, tiny_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM

from lightning_nd import NDStrategy

ROOT = Path(__file__).resolve().parents[1]
Batch = dict[str, Tensor]


def batch(seed: int = 0, rows: int = 2, length: int = 12) -> Batch:
    ids = torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model, self.given = model, given

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return self.model(**batch, **self.given).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Outside(Module):
    def training_step(self, batch: Batch, index: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def fit(rank: int, world_size: int, module: pl.LightningModule, degrees: dict[str, Any], batches: Any) -> None:
    trainer = tiny_trainer(rank, world_size, NDStrategy(**degrees), max_epochs=1)
    trainer.fit(module, batches if isinstance(batches, DataLoader) else DataLoader(batches, batch_size=None))


# -- ranks that must read the same rows --------------------------------------------------------------------------------


class OwnShuffle(IterableDataset[Batch]):
    """Each rank shuffles for itself, as `random` does where nobody has seeded it."""

    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.random.sample([batch(i) for i in range(8)], 8))


def fit_on_own_rows(rank: int, world_size: int, degrees: dict[str, Any]) -> None:
    fit(rank, world_size, Module(make_model("llama")), degrees, OwnShuffle(rank))


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_peers_that_read_different_rows_are_stopped(pool: Pool, axis: str) -> None:
    with pytest.raises(WorkerError, match=f"ranks that differ only in {axis} have read different rows"):
        pool.run(fit_on_own_rows, 2, {axis: 2})


class AllRows(IterableDataset[Batch]):
    """Every rank reads everything."""

    def __iter__(self) -> Iterator[Batch]:
        return iter([batch(0), batch(1)])


def fit_on_all_rows(rank: int, world_size: int, degrees: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(rank, world_size, Module(make_model("llama")), degrees, AllRows())
    return [str(w.message) for w in seen]


@pytest.mark.parametrize(("degrees", "expected"), [({"dp_shard": 2}, 1), ({"dp_replicate": 2}, 1), ({"tp": 2}, 0)])
def test_data_ranks_that_read_the_same_rows_are_told(pool: Pool, degrees: dict[str, int], expected: int) -> None:
    told = [text for text in pool.run(fit_on_all_rows, 2, degrees)[0] if "have read the same rows" in text]
    assert len(told) == expected


def look_for_anomalies(rank: int, world_size: int, degrees: dict[str, Any]) -> None:
    trainer = tiny_trainer(rank, world_size, NDStrategy(**degrees), max_steps=1, detect_anomaly=True)
    trainer.fit(Module(make_model("llama")), DataLoader([batch()], batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_anomalies_can_be_looked_for(pool: Pool, degrees: dict[str, int]) -> None:
    pool.run(look_for_anomalies, 2, degrees)


class LightningsNorm(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.log_dict(grad_norm(self, 2))


def log_lightnings_norm(rank: int, world_size: int) -> str:
    trainer = tiny_trainer(rank, world_size, NDStrategy(), max_steps=1)
    try:
        trainer.fit(LightningsNorm(make_model("llama")), DataLoader([batch()], batch_size=None))  # type: ignore[arg-type]
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return "it works"


def test_lightnings_own_norm_of_gradients_leads_to_ours(pool: Pool) -> None:
    assert "self.trainer.strategy.grad_norm()" in pool.run(log_lightnings_norm, 2)[0]


# -- the loss ----------------------------------------------------------------------------------------------------------


def fit_with(rank: int, world_size: int, degrees: dict[str, Any], kind: str) -> list[str]:
    model = make_model("mixtral" if kind == "router_logits" else "llama")
    given: dict[str, Any] = {}
    data = batch()
    if kind == "loss_function":
        model.loss_function = lambda logits, labels, **_: logits.mean()
    elif kind == "ignore_index":
        given = {"ignore_index": 7}
    elif kind == "num_items_in_batch":
        given = {"num_items_in_batch": torch.tensor(5)}
    elif kind == "hidden_states":
        given = {"output_hidden_states": True}
    elif kind == "attentions":
        given = {"output_attentions": True}
    elif kind == "router_logits":
        given = {"output_router_logits": True}
    elif kind == "padding":
        data["attention_mask"] = torch.ones_like(data["input_ids"])
        data["attention_mask"][1, 8:] = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(rank, world_size, (Outside if kind == "outside" else Module)(model, **given), degrees, [data])
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("degrees", "kind", "said"),
    [
        ({"dp_shard": 2}, "loss_function", "was given a loss_function of its own .*<lambda>.* would be replaced"),
        ({"dp_shard": 2}, "ignore_index", "was called with ignore_index=7"),
        ({"tp": 2}, "num_items_in_batch", "was called with num_items_in_batch"),
        ({"tp": 2}, "hidden_states", "output_hidden_states.*sequence_parallel=False"),
        ({"tp": 2, "sequence_parallel": False}, "attentions", "LlamaForCausalLM was asked for output_attentions.*tp=1"),
        ({"dp_shard": 2}, "router_logits", "output_router_logits=True in the call of the model.*2 data ranks"),
        ({"cp": 2}, "padding", r"3 tokens that attention_mask hides are supervised \(the first: row 1, token 8"),
    ],
)
def test_what_would_change_the_loss_is_refused(pool: Pool, degrees: dict[str, Any], kind: str, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        pool.run(fit_with, 2, degrees, kind)


def test_hidden_states_are_whole_without_sequence_parallelism(pool: Pool) -> None:
    pool.run(fit_with, 2, {"tp": 2, "sequence_parallel": False}, "hidden_states")


def test_a_loss_of_ones_own_under_cp_is_warned_of(pool: Pool) -> None:
    said = pool.run(fit_with, 2, {"cp": 2}, "outside")[0]
    assert [text for text in said if "this loss is not the strategy's" in text]
    assert not [text for text in pool.run(fit_with, 2, {"cp": 2}, "plain")[0] if "not the strategy's" in text]


# -- what a run leaves behind ------------------------------------------------------------------------------------------


def two_models_of_one_config(rank: int, world_size: int) -> tuple[str, float]:
    config = make_config("llama")
    torch.manual_seed(0)
    fit(rank, world_size, Module(AutoModelForCausalLM.from_config(config)), {"cp": 2}, [batch()])
    assert config._attn_implementation in (None, "sdpa")
    model = AutoModelForCausalLM.from_config(config)
    return model.config._attn_implementation, float(model(**batch()).loss)


def test_the_config_of_the_user_is_left_alone(pool: Pool) -> None:
    name, loss = pool.run(two_models_of_one_config, 2)[0]
    assert name == "sdpa"
    assert 0 < loss < 20


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
from lightning.pytorch import Trainer
from test_user_mistakes import Module, Uneven, batch, DataLoader, make_model
from lightning_nd import NDStrategy

def trainer(**degrees):
    return Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(**degrees), max_epochs=1, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

loader = DataLoader([batch(i) for i in range(2)], batch_size=None)
{body}
"""
CAUGHT = """
bad = make_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
for model in (bad, bad, make_model("llama")):
    try:
        trainer(tp=2).fit(Module(model), loader)
        print("trained")
    except ValueError as error:
        print("refused:", error)
"""
UNEVEN = """
trainer(dp_shard=2).fit(Module(make_model("llama")), DataLoader(Uneven(), batch_size=None))
print("trained")
"""


class Uneven(IterableDataset[Batch]):
    """Rank 1 has more batches than rank 0."""

    def __iter__(self) -> Iterator[Batch]:
        return (batch(i) for i in range(2 + 2 * int(os.environ.get("LOCAL_RANK", "0"))))


def script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(tests=str(ROOT / "tests"), body=body))
    keep = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")}
    environ = {**keep, "PYTHONPATH": os.pathsep.join([str(ROOT), keep.get("PYTHONPATH", "")])}
    command = [sys.executable, str(path)]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)


def test_a_script_that_catches_a_refusal_can_go_on(tmp_path: Path) -> None:
    result = script(tmp_path, CAUGHT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("refused: NDStrategy: tp=2 does not divide num_attention_heads=3") == 4  # two a rank
    assert result.stdout.count("trained") == 2


def test_a_rank_that_fails_after_rank_0_has_ended_is_not_lost(tmp_path: Path) -> None:
    result = script(tmp_path, UNEVEN)
    assert result.returncode != 0
    assert "give every data rank the same number" in result.stderr, result.stderr[-2000:]
    assert "rank 1" in result.stderr
