"""The learning-rate schedule: every step's rate, and lengths that come from the run."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_nd.recipes import WarmupDecay


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


def test_no_step_runs_at_rate_zero() -> None:
    assert min(rates(7, warmup=3)[:-1]) > 0


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"total_steps": None}, "max_steps or max_epochs"),
        ({"total_steps": 3, "warmup": 3}, "3 steps of 3"),
        ({"total_steps": 3, "warmup": -1}, "-1 steps"),
        ({"total_steps": 3, "decay": "cos"}, "'cosine', 'linear', 'constant'"),
    ],
)
def test_refusals(kwargs: dict[str, object], words: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=words):
        WarmupDecay(optimizer, **kwargs)  # type: ignore[arg-type]
