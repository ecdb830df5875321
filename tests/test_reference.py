"""The reference and its comparison must themselves be right, else every parity test is worth nothing."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, make_model
from reference import IGNORE, compare, make_batches, nll_sum, rows_of, train


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_depends_on_every_parameter(name: str) -> None:
    batches = make_batches(2)
    run = train(make_model(name), batches, accumulate=2)
    again = train(make_model(name), batches, accumulate=2)
    assert compare(run.weights, again.weights)[0][0] == 0  # deterministic
    for parameter, grad in run.grads.items():
        assert grad is not None, parameter
        assert grad.abs().max() > 1e-3, parameter
    assert run.grad_norms[0] > 1, "clipping at 1.0 must act"


def test_loss_is_that_of_transformers_on_full_rows() -> None:
    model = make_model("llama")
    batch = make_batches(1)[0]
    batch["attention_mask"].fill_(1)
    nll, count = nll_sum(model, batch)
    torch.testing.assert_close(nll / count, model(**batch).loss)


def test_single_precision_is_close_to_double() -> None:
    batches = make_batches(2)
    single = train(make_model("qwen3"), batches, accumulate=2)
    double = train(make_model("qwen3", dtype=torch.float64), batches, accumulate=2)
    assert abs(single.losses[0] - double.losses[0]) < 1e-6
    assert compare(double.grads, single.grads)[0][0] < 5e-6


def test_batches_are_unbalanced_and_split_without_loss() -> None:
    batches = make_batches(10)
    counts = torch.tensor([[int((r[1:] != IGNORE).sum()) for r in b["labels"]] for b in batches])
    assert counts.min() == 0
    assert counts.sum(1).min() > 0
    assert counts.sum(1).max() > 2 * counts.sum(1).min()
    assert all((b["attention_mask"] == 0).any() for b in batches)
    joined = torch.cat([rows_of(batches[0], rank, 2)["labels"] for rank in range(2)])
    assert torch.equal(joined, batches[0]["labels"])


def test_compare_reports_errors_relative_to_the_largest_value() -> None:
    expected = {"a": torch.tensor([1.0, 100.0]), "b": torch.tensor([0.01])}
    got = {"a": torch.tensor([1.0, 100.1]), "b": torch.tensor([0.02])}
    (worst, name), (second, _) = compare(expected, got)
    assert name == "b"
    assert worst == pytest.approx(1.0)
    assert second == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("got", "text"),
    [
        ({}, "missing: a"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, "unexpected: b"),
        ({"a": torch.ones(3)}, "shape"),
        ({"a": torch.tensor([1.0, float("nan")])}, "not finite: a"),
        ({"a": None}, "None where a tensor is expected: a"),
    ],
)
def test_compare_refuses(got: dict, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        compare({"a": torch.ones(2)}, got)
