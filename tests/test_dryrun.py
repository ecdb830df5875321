"""Dry runs: against real tensors at the allocator, against whole depth, and what they refuse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import make_config
from lightning.pytorch import LightningModule, Trainer
from tiny import tiny_model, tiny_tokenizer
from torch.utils.data import DataLoader

from lightning_nd import NDStrategy
from lightning_nd.cli.main import main
from lightning_nd.mesh import ParallelDims
from lightning_nd.planner.allocator import allocated_peak
from lightning_nd.planner.child import ChildError, in_child, in_children
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.patches import PatchError, simulation
from lightning_nd.planner.play import cut, depths, kinds_of
from lightning_nd.planner.simulate import play_rank, simulate

ROOT = Path(__file__).resolve().parents[1]


def dims(shard: int, tp: int = 1, cp: int = 1, replicate: int = 1) -> ParallelDims:
    return ParallelDims(replicate, shard, cp, tp)


# -- the count ---------------------------------------------------------------------------------------------------------


FP32, BF16 = Work(128, precision="32-true"), Work(128)
ALLOCATED: list[tuple[str, Setting, Work, dict[str, Any] | None]] = [
    ("llama", Setting(dims(1, cp=2)), FP32, None),
    ("gemma3", Setting(dims(1, cp=2)), FP32, None),  # windows under cp
    ("qwen3_moe", Setting(dims(4), micro_batch=2), BF16, None),
    ("gemma3", Setting(dims(1, tp=2)), FP32, None),
    ("llama", Setting(dims(4), checkpointing="selective"), BF16, {"r": 4}),
]


@pytest.mark.parametrize("case", ALLOCATED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_fake_tensors_take_what_the_allocator_gives_real_ones(case: Any) -> None:
    """For each version of torch; `benchmarks/planner_allocator.py` has 80 of them."""
    family, setting, work, lora = case
    given = (make_config(family, num_hidden_layers=2, **SHORT.get(family, {})), setting, work, lora)
    fake, real = in_children([(play_rank, given), (allocated_peak, given)])
    assert fake.peak == pytest.approx(real, rel=1e-3)


SHORT = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}


def test_two_depths_tell_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("llama", num_hidden_layers=6)
    given = (config, Setting(dims(4, replicate=2)), Work(64))
    short = simulate(*given)
    monkeypatch.setenv("LIGHTNING_ND_PLAN_WHOLE", "1")
    whole = simulate(*given)
    assert (short.layers, short.depth, whole.layers) == (4, 6, 6)
    assert short.peaks == whole.peaks
    assert short.traffic == whole.traffic


def test_blocks_repeat_from_some_block_on() -> None:
    assert depths("a" * 32) == (2, 4)
    assert depths("d" + "m" * 31) == (3, 5)
    assert depths("ssf" * 10) == (6, 12)
    assert depths("ssf" * 10 + "s") == (7, 13)
    assert depths("abcdefgh") is None
    assert depths("aaaa") is None
    model = tiny_model(num_hidden_layers=6)
    cut(model, depths(kinds_of(model))[0])  # type: ignore[index]
    assert len(model.model.layers) == model.config.num_hidden_layers == 2


# -- Trainer.fit -------------------------------------------------------------------------------------------------------


def fit(module: LightningModule, devices: int, **options: Any) -> Any:
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(4)]
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=NDStrategy(dry_run=True, **options), logger=False,
        enable_checkpointing=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return trainer


def test_fit_plays_one_rank_and_leaves_the_module_alone(capsys: pytest.CaptureFixture[str]) -> None:
    module = Trains()
    before = module.model.model.embed_tokens.weight.clone()
    trainer = fit(module, 8, tp=2, dp_shard=4)
    found = trainer.strategy._launcher.result
    size = sum(p.numel() for p in module.model.parameters())
    assert found.sizes["parameters"] == found.sizes["trained"] == size
    norms = 5 * 32  # whole on both tp ranks
    assert found.sizes["local"] == ((size - norms) / 2 + norms) / 4
    assert found.traffic["dp_shard reduce_scatter"][1] == 4 * ((size - norms) / 2 + norms)
    assert found.peaks["optimizer"] >= 20 * found.sizes["local"]
    assert found.tokens == 32
    assert "rank of 8" in capsys.readouterr().out
    assert module.model.model.embed_tokens.weight.equal(before)
    assert trainer.state.finished
    assert trainer.global_step == 0
    assert not dist.is_initialized()
    assert trainer.validate(module, DataLoader([])) is None


class Trains(LightningModule):
    """Trains a tiny model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Looks(Trains):
    """Reads its loss at every step."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        return loss if loss.item() < 1e9 else loss * 0


class Manual(Trains):
    """Optimises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Short(Trains):
    """Forgets to cut the labels too."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step({**batch, "input_ids": batch["input_ids"][:, :-1]}, index)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Short, {"tp": 4, "dp_shard": 1}, "logits of shape"),
        (Looks, {"dp_shard": 4}, "looks at the values"),
        (Manual, {"dp_shard": 4}, "automatic optimisation"),
        (Trains, {"tp": 3, "dp_shard": 1}, "tp=3 does not divide"),
    ],
)
def test_what_the_run_would_meet_is_raised(module: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(module(), options.get("tp", 1) * options["dp_shard"], **options)


def test_the_command_needs_no_gpu_no_weights_and_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    recipe = ROOT / "recipes" / "llama-8b-lora.yaml"
    options = ["--model.model", str(tmp_path / "model"), "--nd.dp_shard", "8", "--trainer.devices", "4"]
    options += ["--trainer.num_nodes", "2", "--data.max_length", "64"]
    assert main(["fit", "--config", str(recipe), *options, "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "one rank of 8" in shown
    assert "of them trained" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert main(["fit", "--config", str(recipe), *options[:-2], "--nd.tp", "3", "--dry-run"]) == 2


# -- the process of its own --------------------------------------------------------------------------------------------


def test_patches_are_refused_outside_of_a_child_and_for_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchError, match="a process of its own"), simulation(2):
        pass
    monkeypatch.delattr("transformers.masking_utils.find_packed_sequence_indices")
    with pytest.raises(PatchError, match=r"find_packed_sequence_indices.*transformers 5"):
        in_child(enter)
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    with pytest.raises(PatchError, match=r"torch 3\.1\.0 is not among the versions"):
        in_child(enter)


def enter() -> None:
    with simulation(2):
        pass


def test_a_child_that_dies_is_told() -> None:
    with pytest.raises(ChildError, match="ended with code 7"):
        in_child(os._exit, 7)
