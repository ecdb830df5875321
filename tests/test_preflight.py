"""What is refused before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tiny import tiny_model
from torch import nn

from lightning_nd import NDStrategy
from lightning_nd.data import ChatDataModule, DataError
from lightning_nd.launch import LocalLauncher, _same_error
from lightning_nd.recipes import CausalLM


class Holder(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def _no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalLauncher) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(LocalLauncher, "_call_children_scripts", refuse)


def fit(
    module: pl.LightningModule, devices: int, trainer: dict[str, Any] | None = None, data: Any = None, **degrees: Any
) -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", **(trainer or {})}
    given = {"datamodule": data} if data is not None else {"train_dataloaders": [{}]}
    pl.Trainer(devices=devices, strategy=NDStrategy(**degrees), **options).fit(module, **given)


def test_a_model_made_in_init_is_checked() -> None:
    with pytest.raises(ValueError, match=r"tp=3 does not divide num_attention_heads=4"):
        fit(Holder(tiny_model()), 3, tp=3)
    with pytest.raises(ValueError, match="attention_dropout"):
        fit(Holder(tiny_model(attention_dropout=0.1)), 2, tp=2)
    with pytest.raises(ValueError, match="needs a tensor-parallel plan"):
        fit(Holder(nn.Linear(2, 2)), 2, tp=2)


def test_a_model_that_is_still_to_be_loaded_is_checked_by_its_configuration() -> None:
    module = CausalLM("lightning_nd://quickstart/model")
    with pytest.raises(ValueError, match=r"tp=3 does not divide num_attention_heads=8.*1, 2, 4, 8"):
        fit(module, 3, tp=3)
    assert module.model is None


def test_no_accumulation_of_nothing() -> None:
    with pytest.raises(ValueError, match="accumulate_grad_batches is 0; it must be at least 1"):
        fit(Holder(tiny_model()), 2, {"accumulate_grad_batches": 0})


def test_rows_are_checked_before_processes_start(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    data = ChatDataModule(str(rows), max_length=64, micro_batch_size=1)
    with pytest.raises(DataError, match=rf"{rows}:2"):
        fit(CausalLM("lightning_nd://quickstart/model"), 2, data=data)


def test_what_is_right_goes_on_to_start_processes() -> None:
    with pytest.raises(AssertionError, match="about to be started"):
        fit(Holder(tiny_model()), 2, tp=2)


def test_the_same_refusal_of_another_rank_is_not_told_as_its_failure() -> None:
    report = "Traceback ...\nValueError: tp=3 is bad.\nrank 1 failed first: ValueError: tp=3 is bad."
    assert _same_error(ValueError("tp=3 is bad."), report)
    assert not _same_error(ValueError("another thing"), report)
    assert not _same_error(ValueError(), report)
