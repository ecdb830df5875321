"""The loss without all logits on several ranks: one process in float64, by the definitions written out."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from families import make_model
from formula import formula
from lightning.pytorch.plugins import DoublePrecision
from parity import Layout, ParityModule, train_parallel
from pool import Pool, tiny_trainer
from reference import Batch, Run, adamw, compare, make_batches, relative, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_nd import NDStrategy
from lightning_nd.loss import LossOptions, nll_sum, token_scores
from lightning_nd.loss.pending import PendingLogits, Product

OPTIONS = {"chunk": 5, "label_smoothing": 0.1, "z_loss": 1e-2}


def expected(family: str, batches: list[Batch], accumulate: int, clip: float, options: dict[str, Any]) -> Run:
    """One process in float64: the formula summed over each window."""
    model = make_model(family, dtype=torch.float64)
    extras = (options.get("label_smoothing", 0.0), options.get("z_loss", 0.0))
    run, optimizer = Run([], [], [], [], {}, {}), adamw(model.parameters())
    for first in range(0, len(batches), accumulate):
        parts = [formula(model, batch, *extras) for batch in batches[first : first + accumulate]]
        nll, count = (torch.stack([part[i] for part in parts]).sum() for i in range(2))
        (nll / count).backward()
        run.losses.append(float(nll / count))
        run.grads = run.grads or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        run.grad_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def unpadded(count: int) -> list[Batch]:
    return [{key: batch[key] for key in ("input_ids", "labels")} for batch in make_batches(count)]


@pytest.mark.parametrize(
    ("family", "layout", "cp"),
    [
        ("gemma2", (1, 1, 2), 1),
        ("gemma2", (1, 2, 2), 1),
        ("granite", (2, 1, 1), 1),
        ("granite", (1, 1, 1), 2),
        ("llama", (1, 1, 2), 2),
    ],
)
def test_label_smoothing_and_z_loss_on_every_axis(pool: Pool, family: str, layout: Layout, cp: int) -> None:
    batches = unpadded(5)
    want = expected(family, batches, 2, 0.5, OPTIONS)
    got = pool.run(
        train_parallel,
        math.prod(layout) * cp,
        family,
        layout,
        batches,
        strategy={"loss": LossOptions(**OPTIONS), "cp": cp},
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        timeout=120,
    )[0]
    assert max(map(relative, want.losses, got.losses)) < 1e-5
    assert max(map(relative, want.grad_norms, got.grad_norms)) < 2e-5
    assert compare(want.grads, got.grads)[0][0] < 1e-5
    assert compare(want.weights, got.weights)[0][0] < 1e-4


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)])
def test_float64_is_exact_under_tp(pool: Pool, layout: Layout) -> None:
    """What the ranks exchange for a token's loss rounds nothing (norms compute in float32 in any precision)."""
    batches = unpadded(2)
    want = expected("llama", batches, 2, 1e9, OPTIONS)
    got = pool.run(
        train_parallel,
        math.prod(layout),
        "llama",
        layout,
        batches,
        strategy={"loss": LossOptions(**OPTIONS)},
        trainer={"accumulate_grad_batches": 2, "plugins": [DoublePrecision()]},
    )[0]
    assert relative(want.losses[0], got.losses[0]) < 1e-7
    assert compare(want.grads, got.grads)[0][0] < 1e-6


class ReadsLogits(ParityModule):
    """Makes a loss of its own from ``outputs.logits``, beside the model's."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        output = self.model(**batch)
        self.shape = tuple(output.logits.shape)
        logits: Tensor = output.logits
        mine = logits.square().mean()
        self.seen = logits.detach().clone()
        return output.loss + mine


def read_logits(rank: int, world_size: int, degrees: dict[str, int]) -> tuple[Tensor, dict[str, Tensor | None]]:
    from lightning_nd import gather_sequence

    batch = unpadded(1)
    module = ReadsLogits(make_model("granite", vocab_size=257), batch)
    strategy = NDStrategy(**degrees, loss=LossOptions(chunk=5))  # type: ignore[arg-type]
    whole: list[Tensor] = []
    module.on_after_backward = lambda: whole.append(gather_sequence(module.seen))  # type: ignore[method-assign]
    tiny_trainer(rank, world_size, strategy, max_epochs=1, use_distributed_sampler=False).fit(module)
    return whole[0], module.run.grads


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_shard": 1, "cp": 2}])
def test_logits_that_a_module_reads_are_whole(pool: Pool, degrees: dict[str, int]) -> None:
    """Over tp; under cp they are those of the rank's tokens."""
    batch = unpadded(1)[0]
    plain = make_model("granite", vocab_size=257)
    logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
    nll, count = formula(plain, batch)
    (nll / count + logits.square().mean()).backward()
    for seen, got in pool.run(read_logits, 2, degrees):
        assert (seen - logits).abs().max() < 1e-5 * logits.abs().max()
        assert compare({name: p.grad for name, p in plain.named_parameters()}, got)[0][0] < 1e-5


def validate(rank: int, world_size: int, degrees: dict[str, int]) -> list[float]:
    class Validates(ParityModule):
        def validation_step(self, batch: Batch, index: int) -> None:
            output = self.model(**batch)
            self.run.losses.append(float(output.loss))
            self.run.losses.append(float((output.logits.argmax(-1) == batch["input_ids"]).double().mean()))

        def val_dataloader(self) -> Any:
            place = self.trainer.strategy.distributed_sampler_kwargs
            rows = [rows_of(batch, place["rank"], place["num_replicas"]) for batch in self.batches]
            return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    module = Validates(make_model("llama"), unpadded(2))
    strategy = NDStrategy(**degrees, loss=LossOptions(**OPTIONS))  # type: ignore[arg-type]
    tiny_trainer(rank, world_size, strategy, use_distributed_sampler=False).validate(module, verbose=False)
    return module.run.losses


def test_validation_reports_the_plain_nll_and_reads_logits(pool: Pool) -> None:
    model = make_model("llama")
    want = []
    with torch.no_grad():
        for batch in unpadded(2):
            nll, count = formula(model, batch)
            right = model(input_ids=batch["input_ids"]).logits.argmax(-1) == batch["input_ids"]
            want += [float(nll / count), float(right.double().mean())]
    for got in pool.run(validate, 2, {"dp_shard": 1, "tp": 2}):
        assert got == pytest.approx(want, rel=1e-5)


def test_options_from_a_configuration() -> None:
    options = LossOptions(chunk=64, z_loss=1e-4)
    assert NDStrategy(loss={"chunk": 64, "z_loss": 1e-4}).loss == options  # type: ignore[arg-type]
    assert NDStrategy(loss=options).loss is options
    assert NDStrategy().loss == LossOptions()
    with pytest.raises(ValueError, match=r"there is no 'chunks'; options are chunk, kernel, label_smoothing, z_loss"):
        NDStrategy(loss={"chunks": 64})  # type: ignore[arg-type]


def uneven_slices(rank: int, world_size: int) -> tuple[float, Tensor]:
    from lightning_nd.loss import options
    from lightning_nd.loss.chunked import VocabularySlice

    x, weight, targets = uneven_inputs()
    part = VocabularySlice(torch.distributed.group.WORLD, 129 * rank, 257)  # type: ignore[arg-type]
    own = weight[129 * rank : 129 * (rank + 1)].clone().requires_grad_()
    # 20 tokens of 128 logits each would fit, 19 of 129
    with mock.patch.dict(options._BUDGET, cpu=4 * 128 * 20), mock.patch.object(options, "_FEWEST", 1):
        nll, _ = nll_sum(PendingLogits(((Product(x, own, None), 1.0),), part=part), targets)
    nll.backward()
    assert own.grad is not None
    return nll.item(), own.grad


def scored(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    from lightning_nd.loss.chunked import VocabularySlice

    x, weight, targets = tied_inputs()
    part = VocabularySlice(torch.distributed.group.WORLD, 129 * rank, 257)  # type: ignore[arg-type]
    own = weight[129 * rank : 129 * (rank + 1)].clone()
    logits = PendingLogits(((Product(x[None], own, None), 1.0),), part=part)
    return token_scores(logits, targets[None], LossOptions(chunk=7))


def tied_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Two tokens of the vocabulary, one in each slice, always have the same logit, and often the largest."""
    x, weight, _ = uneven_inputs()
    weight[200] = weight[5] = weight[5] * 3
    return x, weight, torch.tensor([5, 200, -100, 17, 130] * 80)


def test_scores_from_slices_of_the_vocabulary(pool: Pool) -> None:
    x, weight, targets = tied_inputs()
    logits = x @ weight.t()
    first = (logits == logits.amax(1, keepdim=True)).double().argmax(1)  # the first of equal ones
    right = first == targets
    assert int((right & (targets == 5)).sum()) > 10
    for nll, hit in pool.run(scored, 2):
        torch.testing.assert_close(nll[0], F.cross_entropy(logits, targets, reduction="none"))
        assert hit[0].tolist() == right.tolist()
    nll, hit = token_scores(logits[None], targets[None])
    assert hit[0].tolist() == right.tolist()


def uneven_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator) for n in (400, 257))
    return x, weight, torch.randint(257, (400,), generator=generator)


def test_tp_ranks_with_unequal_slices_make_the_same_chunks(pool: Pool) -> None:
    x, weight, targets = uneven_inputs()
    weight = weight.double().requires_grad_()
    nll = F.cross_entropy(x.double() @ weight.t(), targets, reduction="sum")
    nll.backward()
    (first, top), (second, bottom) = pool.run(uneven_slices, 2)
    assert first == second == pytest.approx(nll.item(), rel=1e-6)
    assert weight.grad is not None
    assert (torch.cat([top, bottom]) - weight.grad).abs().max() < 1e-6 * weight.grad.abs().max()
