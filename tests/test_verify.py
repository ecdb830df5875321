"""The comparison behind `lightning-nd verify`: what it must catch, and that the reference is the plain one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from families import make_config
from reference import train

from lightning_nd.verify import Numbers, Plan, compare, no_dropout, shrink, table, train_reference, write_random_model

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


def numbers() -> Numbers:
    return Numbers(
        losses=[2.0, 1.5],
        grad_norms=[1.0, 0.5],
        gradients={"a": torch.tensor([1.0, -2.0]), "bias": torch.tensor([1e-9])},
        weights={"a": torch.tensor([1.0, 0.5]), "bias": torch.tensor([0.0])},
    )


def test_equal_numbers_hold() -> None:
    assert all(line.ok and line.error == 0 for line in compare(numbers(), numbers()))


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        (lambda n: n.losses.__setitem__(1, 1.5001), "loss", "step 2"),
        (lambda n: n.losses.__setitem__(0, math.nan), "loss", "step 1"),
        (lambda n: n.losses.pop(), "loss", "1 steps instead of 2"),
        (lambda n: n.grad_norms.__setitem__(0, 2.0), "gradient norm", "step 1"),
        (lambda n: n.gradients["a"].mul_(1.0001), "gradient", "a"),
        (lambda n: n.gradients["bias"].fill_(1e-3), "gradient", "bias"),
        (lambda n: n.gradients["a"].fill_(math.nan), "gradient", "a"),
        (lambda n: n.gradients.pop("bias"), "gradient", "bias (missing from this layout)"),
        (lambda n: n.gradients.update(b=torch.ones(1)), "gradient", "b (only in this layout)"),
        (lambda n: n.weights.update(a=torch.ones(3)), "weight", "a ((3,), not (2,))"),
        (lambda n: n.weights["a"].add_(0.001), "weight", "a"),
    ],
)
def test_every_mismatch_is_named(change: object, what: str, where: str) -> None:
    got = numbers()
    change(got)  # type: ignore[operator]
    wrong = [line for line in compare(numbers(), got) if not line.ok]
    assert [(line.what, line.where) for line in wrong] == [(what, where)]
    assert "MISMATCH" in table(wrong)


def test_rounding_noise_of_a_gradient_that_is_zero_is_no_mismatch() -> None:
    got = numbers()
    got.gradients["bias"].neg_()
    assert all(line.ok for line in compare(numbers(), got))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "gpt_neox"])
def test_shrinking_keeps_the_architecture(family: str) -> None:
    config = make_config(family, vocab_size=1001)
    small = shrink(config)
    assert small.vocab_size == 512 + 1001 % 8
    assert small.num_attention_heads == config.num_attention_heads
    assert set(getattr(small, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])
    assert not any(no_dropout(small).values())


def test_the_reference_is_plain_training(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    small = shrink(make_config("llama"))
    write_random_model(small, tmp_path)
    plan = Plan(SGD, steps=2, accumulate=2, clip=1.0, vocabulary=small.vocab_size)
    ours = train_reference(tmp_path, plan)
    theirs = train(
        AutoModelForCausalLM.from_pretrained(tmp_path),
        plan.batches(),
        accumulate=2,
        clip_norm=1.0,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    gradients = {name: grad for name, grad in theirs.grads.items() if grad is not None}
    expected = Numbers(theirs.losses, theirs.grad_norms, gradients, theirs.weights)
    assert all(line.ok for line in compare(expected, ours, 1e-6))
