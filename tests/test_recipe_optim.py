"""The learning-rate schedule: every step's rate, and lengths that come from the run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_nd.recipes import WarmupDecay
from lightning_nd.recipes.optim import check_optimizer, check_schedule, configure_optimizers, schedule_bounds
from lightning_nd.recipes.rate import Scaling


def rates(steps: int, **kwargs: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = WarmupDecay(optimizer, total_steps=steps, **kwargs)  # type: ignore[arg-type]
    seen = []
    for _ in range(steps + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_cosine_with_warmup_ends_with_the_last_step() -> None:
    expected = [1 / 3, 2 / 3] + [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(9)]
    assert rates(10, warmup=2) == pytest.approx(expected)


def test_linear_to_a_final_rate_and_constant() -> None:
    assert rates(4, warmup=0, decay="linear", final=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(4, warmup=1, decay="constant") == pytest.approx([0.5, 1, 1, 1, 1])


def test_a_fraction_of_the_run_warms_up() -> None:
    assert rates(10, warmup=0.2) == rates(10, warmup=2)


def test_the_last_part_of_a_run_decays() -> None:
    expected = [1 / 3, 2 / 3, *[1.0] * 4, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(10, warmup=2, decay="linear", decay_over=4) == pytest.approx(expected)
    assert rates(10, warmup=2, decay="linear", decay_over=0.4) == pytest.approx(expected)


def test_no_step_runs_at_rate_zero() -> None:
    assert min(rates(7, warmup=3)[:-1]) > 0


@pytest.mark.parametrize("warmup", [0.05, 0.1, 0.3, 0.45])
def test_fractions_that_make_up_a_run_fit_any_number_of_steps(warmup: float) -> None:
    for total in range(21, 400):
        steps, start = schedule_bounds(total, warmup, 1 - warmup)
        assert start in (steps, steps + 1), total


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"total_steps": None}, "max_steps or max_epochs"),
        ({"total_steps": 3, "warmup": 3}, "3 steps of 3"),
        ({"total_steps": 3, "warmup": -1}, "-1 steps"),
        ({"total_steps": 40, "warmup": -0.01}, "warmup=-0.01"),
        ({"total_steps": 10, "warmup": 0.5, "decay_over": 0.7}, "7 steps of 10, of which 5 warm up"),
        ({"total_steps": 10, "warmup": 2, "decay_over": 9}, "9 steps of 10, of which 2 warm up"),
        ({"total_steps": 10, "decay_over": 0}, "decay_over=0 is 0 steps"),
        ({"total_steps": 3, "decay": "cos"}, "'cosine', 'linear', 'constant'"),
    ],
)
def test_refusals(kwargs: dict[str, object], words: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=words):
        WarmupDecay(optimizer, **kwargs)  # type: ignore[arg-type]


def test_a_schedule_that_does_not_fit_is_refused_before_anything_starts() -> None:
    scheduler = {"class_path": "lightning_nd.recipes.WarmupDecay", "init_args": {"warmup": 100}}
    check_schedule(scheduler, 101)
    with pytest.raises(ValueError, match="100 steps of 100"):
        check_schedule(scheduler, 100)
    check_schedule({"class_path": "torch.optim.lr_scheduler.ConstantLR"}, 1)
    check_schedule(None, 1)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)
        self.adapter = torch.nn.Linear(3, 2, bias=False)
        self.adapter.requires_grad_(False)


def built(module: LightningModule, **optimizer: Any) -> torch.optim.Optimizer:
    path = optimizer.pop("class_path", "torch.optim.AdamW")
    made = configure_optimizers(module, {"class_path": path, "init_args": optimizer}, None)
    return made["optimizer"]


def attached(trainer: SimpleNamespace) -> Net:
    module = Net()
    module._trainer = trainer  # type: ignore[assignment]
    return module


def test_weight_decay_leaves_norms_and_biases_out() -> None:
    module = attached(SimpleNamespace(datamodule=None))
    names = {id(p): name for name, p in module.named_parameters()}
    for given in ({"weight_decay": 0.1}, {}):  # AdamW's own is 0.01
        groups = built(module, lr=0.1, **given).param_groups
        decayed = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
        others = {names[id(p)] for g in groups if not g["weight_decay"] for p in g["params"]}
        assert decayed == {"linear.weight"}
        assert others == {"linear.bias", "norm.weight", "norm.bias"}
    assert len(built(module, lr=0.1, weight_decay=0.0).param_groups) == 1
    assert len(built(module, lr=0.1, class_path="torch.optim.SGD").param_groups) == 1


@pytest.mark.parametrize("steps", [-1, float("inf")])
def test_a_schedule_of_a_run_without_an_end_is_refused(steps: float) -> None:
    module = attached(SimpleNamespace(datamodule=None, estimated_stepping_batches=steps))
    schedule = {"class_path": "lightning_nd.recipes.WarmupDecay"}
    with pytest.raises(ValueError, match=r"needs an end: set trainer.max_steps, .* not with data.streaming"):
        configure_optimizers(module, {"class_path": "torch.optim.AdamW"}, schedule)


def run_of(module: Net, ranks: int, scaling: Scaling) -> Net:
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        datamodule=SimpleNamespace(micro_batch_size=2, max_length=100, packing=True),
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0}),
        accumulate_grad_batches=4,
    )
    module.lr_scaling = scaling  # type: ignore[assignment]
    return module


def test_the_rate_follows_the_batch_and_says_how(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert built(run_of(Net(), 8, Scaling("sqrt", 16)), lr=0.1).param_groups[0]["lr"] == pytest.approx(0.2)
        assert built(run_of(Net(), 1, Scaling("linear", 16)), lr=0.1).param_groups[0]["lr"] == pytest.approx(0.05)
        assert built(run_of(Net(), 8, Scaling()), lr=0.1).param_groups[0]["lr"] == 0.1
    assert "2 packs × 4 accumulated × 8 data ranks = 64 packs, at most 64 × 100 = 6,400 tokens" in caplog.text
    assert "learning rate 0.1 × √(64 / 16) = 0.2" in caplog.text
    with pytest.raises(ValueError, match="OneCycleLR, which sets max_lr itself"):
        configure_optimizers(
            run_of(Net(), 8, Scaling("sqrt", 16)),
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}},
            {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 1.0}},
        )
    module = attached(SimpleNamespace(datamodule=None))
    module.lr_scaling = Scaling("sqrt", 16)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="needs a data module with micro_batch_size"):
        built(module, lr=0.1)
    for wrong in ({"kind": "sqrt"}, {"kind": "none", "reference_batch": 4}, {"kind": "root"}):
        with pytest.raises(ValueError, match=r"reference_batch|not one of"):
            Scaling(**wrong)  # type: ignore[arg-type]


def test_values_that_an_optimizer_does_not_take_are_refused_before_anything_starts() -> None:
    check_optimizer({"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "betas": (0.9, 0.95)}})
    with pytest.raises(ValueError, match=r"optimizer torch\.optim\.AdamW: Invalid learning rate: -1"):
        check_optimizer({"class_path": "torch.optim.AdamW", "init_args": {"lr": -1}})
