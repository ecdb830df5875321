"""Models under context parallelism train like one process with plain transformers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import make_model
from parity import ParityModule, train_parallel
from reference import Batch, Run, adamw, compare, make_batches, relative, train
from torch import Tensor, nn

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "gpt_neox", "olmo2")


def packed(batches: list[Batch], seed: int = 0) -> list[Batch]:
    """The same tokens as documents laid end to end: positions restart, there is no mask."""
    random = torch.Generator().manual_seed(seed)
    out = []
    for batch in batches:
        rows, length = batch["input_ids"].shape
        positions = torch.arange(length).repeat(rows, 1)
        for row in range(rows):
            for cut in sorted(torch.randint(1, length, (2,), generator=random).tolist()):
                positions[row, cut:] = torch.arange(length - cut)
        out.append({"input_ids": batch["input_ids"], "position_ids": positions, "labels": batch["labels"]})
    return out


def document_by_document(model: nn.Module) -> nn.Module:
    """Let a model run every document of a pack on its own, so that none can see another.

    Transformers' own way to pack leaks between documents in some families.
    """
    whole = model.forward

    def forward(input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is None:
            return whole(input_ids=input_ids, **kwargs)
        rows = []
        for ids, positions in zip(input_ids, position_ids, strict=True):
            cuts = [0, *((positions.diff() != 1).nonzero().flatten() + 1).tolist(), len(ids)]
            parts = [whole(input_ids=ids[None, a:b], **kwargs).logits[0] for a, b in pairwise(cuts)]
            rows.append(torch.cat(parts))
        return SimpleNamespace(logits=torch.stack(rows))

    model.forward = forward
    return model


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike Adam, it shows a gradient that is off by a factor, and none is too small for it."""
    return torch.optim.SGD(parameters, lr=0.02)


def run(
    pool: Any,
    family: str,
    batches: list[Batch],
    layout: tuple[int, int, int] = (1, 1, 1),
    cp: int = 2,
    *,
    overrides: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    reference: dict[str, Any] | None = None,
    optimizer: Any = sgd,
    **strategy: Any,
) -> tuple[Run, Run]:
    """One process by the reference, and the layout with cp."""
    model = document_by_document(make_model(family, **(overrides or {})))
    expected = train(model, batches, optimizer=optimizer, **(reference or {}))
    world_size = layout[0] * layout[1] * layout[2] * cp
    got = pool.run(
        train_parallel,
        world_size,
        family,
        layout,
        batches,
        overrides=overrides,
        strategy={"cp": cp} | strategy,
        trainer=trainer,
        optimizer=optimizer,
        timeout=180,
    )[0]
    return expected, got


def check(expected: Run, got: Run) -> None:
    assert got.tokens == expected.tokens
    assert max(map(relative, expected.losses, got.losses)) <= 1e-4
    assert relative(expected.losses[0], got.losses[0]) <= 1e-5
    assert compare(expected.grads, got.grads)[0][0] <= 1e-5, compare(expected.grads, got.grads)[:3]
    assert compare(expected.weights, got.weights)[0][0] <= 1e-4, compare(expected.weights, got.weights)[:3]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_families_on_two_ranks(pool, family, kind):
    batches = make_batches(2)
    check(*run(pool, family, packed(batches) if kind == "packed" else batches))


# dp_replicate, dp_shard, tp, cp
PRODUCTS = [
    (1, 2, 1, 2),
    (2, 1, 1, 2),
    (1, 1, 2, 2),
    (1, 1, 1, 4),
    (1, 2, 2, 2),
    (2, 2, 1, 2),
    (1, 1, 2, 4),
    (1, 1, 1, 8),
]


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: "x".join(map(str, product)))
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_products_with_other_axes(pool, family, product):
    *layout, cp = product
    batches = make_batches(2) + packed(make_batches(2, seed=3))
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    reference = {"accumulate": 2, "clip_norm": 1.0}
    expected, got = run(pool, family, batches, tuple(layout), cp, trainer=trainer, reference=reference)
    check(expected, got)
    assert max(map(relative, expected.grad_norms, got.grad_norms)) <= 1e-5


@pytest.mark.parametrize(
    ("family", "product"),
    [
        ("deepseek_v3", (1, 2, 2, 2)),
        ("mixtral", (1, 2, 2, 2)),
        ("gemma3", (1, 2, 2, 2)),
        ("mistral", (2, 1, 2, 2)),
        ("llama", (2, 2, 1, 2)),
    ],
)
def test_families_with_every_axis(pool, family, product):
    """23 tokens: no row divides by 2 · cp · tp."""
    *layout, cp = product
    batches = make_batches(1, length=23) + packed(make_batches(1, length=23, seed=3))
    options: dict[str, Any] = {"activation_checkpointing": "full"}
    options["trainer"] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    options["reference"] = {"accumulate": 2, "clip_norm": 1.0}
    expected, got = run(pool, family, batches, tuple(layout), cp, **options)
    check(expected, got)
    assert max(map(relative, expected.grad_norms, got.grad_norms)) <= 1e-5


@pytest.mark.parametrize("mode", ["full", "selective", 2])
@pytest.mark.parametrize("method", ["direct", "ring", "ulysses"])
def test_activation_checkpointing_recomputes_with_the_same_plan(pool, mode, method):
    batches = packed(make_batches(2)) + make_batches(2, seed=5)
    trainer, reference = {"accumulate_grad_batches": 2}, {"accumulate": 2}
    options = {"activation_checkpointing": mode, "cp_method": method, "trainer": trainer, "reference": reference}
    check(*run(pool, "gemma3", batches, **options))


class CountsSteps(ParityModule):
    """Notes how often keys were waited for, forward and backward, under cp."""

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        self.run.tokens.append(sum(what == "wait" for what, _ in batch["cp_context"].traffic.events))


def count_waits(rank: int, world_size: int, mode: Any) -> list[float]:
    strategy = {"cp": 2, "activation_checkpointing": mode}
    run = train_parallel(
        rank, world_size, "llama", (1, 1, 1), make_batches(1), strategy=strategy, module_class=CountsSteps
    )
    return run.tokens if run is not None else []


def test_selective_checkpointing_exchanges_no_keys_again(pool):
    none, selective, full = (pool.run(count_waits, 2, mode)[0][-1] for mode in ("none", "selective", "full"))
    assert 0 < none == selective < full


@pytest.mark.parametrize("layout", ["zigzag", "chunks", "contiguous"])
def test_odd_short_and_silent_rows(pool, layout):
    """Lengths that do not divide, rows shorter than the ranks, one row, ranks that hold nothing but padding."""
    batches = make_batches(1, length=23)
    batches += make_batches(1, rows=1, length=5, silent_row=False)
    batches += make_batches(1, rows=2, length=4, silent_row=False)
    for batch in (*make_batches(1, rows=1, length=24, silent_row=False), *make_batches(1, rows=2, length=37)):
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, 6:] = -100  # the later ranks have no supervised token
        batches.append(batch)
    padded = make_batches(1, rows=1, length=40, silent_row=False)[0]
    padded["labels"] = padded["input_ids"].clone()
    for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        padded[name][:, 9:] = fill  # only the first rank holds tokens at all
    check(*run(pool, "qwen3", [*batches, padded], cp=4, cp_layout=layout))


def test_left_padding(pool):
    batches = make_batches(2)
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            shift = int((batch["attention_mask"][row] == 0).sum())
            for name in batch:
                batch[name][row] = batch[name][row].roll(shift)
    assert (batches[0]["attention_mask"][:, 0] == 0).any()
    check(*run(pool, "llama", batches))


def test_tied_weights_and_an_odd_vocabulary(pool):
    check(
        *run(pool, "llama", make_batches(2), (1, 1, 2), 2, overrides={"tie_word_embeddings": True, "vocab_size": 257})
    )


def test_adamw_and_clipping(pool):
    trainer, reference = {"gradient_clip_val": 1.0}, {"clip_norm": 1.0}
    options = {"optimizer": adamw, "trainer": trainer, "reference": reference}
    check(*run(pool, "mistral", make_batches(4), (1, 2, 1), 2, **options))
