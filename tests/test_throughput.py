"""Tokens, operations and time of `Throughput` against counts by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from pool import Pool, tiny_trainer
from tiny import tiny_model

from lightning_nd import NDStrategy
from lightning_nd.callbacks import Throughput
from lightning_nd.callbacks import clock as clocks
from lightning_nd.callbacks.throughput import _facts, count_batch
from lightning_nd.recipes.lora import LoRA

HIDDEN, MLP, LAYERS, VOCABULARY = 32, 64, 2, 264  # of `tiny_model`; 4 heads of 8, 2 key/value heads
PRODUCTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 16 + 3 * HIDDEN * MLP  # weights of a block that multiply


def rates(checkpointing: Any = "none", lora: LoRA | None = None, tokens: int = 10, pairs: int = 55) -> dict[str, float]:
    """What a second of two devices gives at a peak of 10⁻⁶ TFLOP/s."""
    module = SimpleNamespace(lora=lora, config=tiny_model().config)
    trainer: Any = SimpleNamespace(
        world_size=2, precision="32-true", strategy=SimpleNamespace(_activation_checkpointing=checkpointing)
    )
    throughput = Throughput(peak_tflops=1e-6)
    throughput._facts, throughput._windows, throughput._steps = _facts(trainer, module), [None], 1
    return throughput.rates(trainer, [tokens, pairs], 1.0)


def test_operations_of_a_dense_model() -> None:
    found = rates()
    attention = LAYERS * 2 * 55 * 4 * (8 + 8)
    forward = 2 * 10 * (LAYERS * PRODUCTS + HIDDEN * VOCABULARY) + attention
    assert found["tflops_per_device"] * 2e12 == pytest.approx(3 * forward)
    assert found["mfu"] == pytest.approx(3 * forward / 2 / 1e6)
    assert found["hfu"] == found["mfu"]
    assert (found["tokens_per_s"], found["tokens_per_s_per_device"], found["step_time_s"]) == (10, 5, 1)


def test_recomputation_counts_for_hfu_only() -> None:
    blocks = LAYERS * (2 * 10 * PRODUCTS + 2 * 55 * 4 * 16)
    for kind, share in (("full", 1.0), (2, 0.5), ("selective", 0.5)):
        found = rates(kind)
        assert found["mfu"] == rates()["mfu"]
        assert found["hfu"] - found["mfu"] == pytest.approx(share * blocks / 2 / 1e6)


def test_frozen_weights_need_two_products_of_three() -> None:
    attention = LAYERS * 2 * 55 * 4 * (8 + 8)
    pairs = 4 * (2 * HIDDEN + HIDDEN + 16)  # rank 4 beside q (32 → 32) and v (32 → 16)
    needed = LAYERS * (4 * PRODUCTS + 6 * pairs) + 4 * HIDDEN * VOCABULARY
    found = rates(lora=LoRA(r=4, target_modules=["q_proj", "v_proj"]))
    assert found["tflops_per_device"] * 2e12 == pytest.approx(10 * needed + 3 * attention)


def by_hand(documents: list[int], window: int) -> tuple[int, int]:
    places = [place for length in documents for place in range(length)]
    return sum(p + 1 for p in places), sum(min(p + 1, window) for p in places)


@pytest.mark.parametrize(
    ("documents", "batch"),
    [
        ([6, 6], {"input_ids": torch.zeros(2, 6, dtype=torch.long)}),
        ([4, 2], {"input_ids": torch.zeros(1, 6, dtype=torch.long),
                  "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}),
        ([4, 3], {"input_ids": torch.zeros(2, 5, dtype=torch.long),
                  "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}),
    ],
    ids=["rows", "packed", "padded"],
)  # fmt: skip
def test_tokens_and_pairs_of_a_batch(documents: list[int], batch: dict[str, torch.Tensor]) -> None:
    found = count_batch(batch, [None, 3])
    assert found.tolist() == [sum(documents), *by_hand(documents, 3)]
    # under cp each rank has some tokens of every row with their places: the ranks' counts add up
    whole = {**batch, "position_ids": batch.get("position_ids", torch.arange(batch["input_ids"].shape[1]).expand(
        batch["input_ids"].shape))}  # fmt: skip
    if "attention_mask" not in batch:
        parts = [{k: v[:, rank::2] for k, v in whole.items()} for rank in (0, 1)]
        assert torch.equal(sum(count_batch(part, [None, 3]) for part in parts), found)  # type: ignore[arg-type]


def test_the_clock_stands_still_while_it_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"s": 5.0}
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now["s"]))
    clock, cpu = clocks.Clock(), torch.device("cpu")
    clock.restart(cpu)
    now["s"] = 7
    clock.pause()
    now["s"] = 70
    clock.go_on()
    clock.go_on()  # a second time changes nothing
    now["s"] = 71
    assert clock.seconds(cpu) == pytest.approx(3)


class Trains(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


def test_a_run_logs_all_of_it() -> None:
    rows = [{"input_ids": torch.arange(12), "labels": torch.arange(12)} for _ in range(8)]

    class Keep(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.found = {k: float(v) for k, v in trainer.callback_metrics.items()}

    keep = Keep()
    trainer = Trainer(
        accelerator="cpu", max_steps=2, accumulate_grad_batches=2, log_every_n_steps=1, logger=False,
        callbacks=[Throughput(peak_tflops=1.0), keep], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Trains(), torch.utils.data.DataLoader(rows, batch_size=2))
    found = {name.removeprefix("throughput/"): value for name, value in keep.found.items()}
    assert found["tokens_per_s"] * found["step_time_s"] == pytest.approx(2 * 2 * 12)
    assert 0 < found["data_wait_s"] < found["step_time_s"]
    assert found["mfu"] == pytest.approx(found["tflops_per_device"])
    assert found["hfu"] == found["mfu"] > 0
    assert 0.01 < found["peak_memory_gib"] < 100


class KeepShares(Callback):
    """Keeps each value of the share that is logged."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if (share := trainer.callback_metrics.get("throughput/exposed_communication")) is not None:
            self.shares.append(float(share))


class Waits(Trains):
    """One rank comes late to the communication of the third step."""

    def training_step(self, batch: Any, index: int) -> Any:
        time.sleep(2.0 * self.global_rank * (index == 2))
        return super().training_step(batch, index)


def _shares(rank: int, world: int, module: type[LightningModule]) -> tuple[list[float], float]:
    keep = KeepShares()
    throughput = Throughput(communication_every=2)
    trainer = tiny_trainer(
        rank, world, NDStrategy(), max_steps=4, log_every_n_steps=1, callbacks=[throughput, keep], limit_val_batches=0
    )
    rows = [{"input_ids": torch.arange(12), "labels": torch.arange(12)} for _ in range(8)]
    trainer.fit(module(), torch.utils.data.DataLoader(rows, batch_size=1))
    values = {k.removeprefix("throughput/"): float(v) for k, v in trainer.callback_metrics.items()}
    return keep.shares, values["tokens_per_s"] * values["step_time_s"]


def test_communication_that_nothing_hides(pool: Pool) -> None:
    (shares, tokens), (other, _) = pool.run(_shares, 2, Waits)
    assert shares == other  # the largest of the ranks
    assert len(set(shares)) == 1  # of the third step: the first is not traced
    assert 0.5 < shares[0] < 1
    assert tokens == pytest.approx(24)  # of a step that was not traced
    ((alone, _),) = pool.run(_shares, 1, Trains)
    assert set(alone) == {0.0}


def test_a_peak_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Throughput(peak_tflops=0)
    with pytest.raises(ValueError, match="--gpu h1000"):
        Throughput(gpu="h1000")
    with pytest.raises(ValueError, match="0 or more"):
        Throughput(communication_every=-1)
