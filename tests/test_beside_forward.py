"""What training steps do beside one call of the model: other calls, other losses, other gradients, other samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from families import make_model
from parity import Layout, full_grads, full_weights
from pool import Pool, WorkerError, tiny_trainer
from reference import Batch, compare, make_batches, relative, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler

Step = Callable[[nn.Module, Batch, int], Tensor]


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def nll(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over the supervised tokens, of plain transformers."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def supervised(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * torch.stack([full(p.pow(2).sum()) for p in model.parameters()]).sum()


def probe() -> Batch:
    return make_batches(1, rows=8, seed=9)[0]


class Module(pl.LightningModule):
    def __init__(self, batches: list[Batch], kind: str) -> None:
        super().__init__()
        self.model = make_model("qwen3")
        self.batches, self.kind = batches, kind
        self.grads: dict[str, Tensor | None] = {}
        self.norms: list[float] = []
        self.losses: list[float] = []

    def train_dataloader(self) -> DataLoader:
        place = self.trainer.strategy.distributed_sampler_kwargs
        rows = [rows_of(b, place["rank"], place["num_replicas"]) for b in self.batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if self.kind == "probe" and index % 2 == 0:
            with torch.no_grad():
                self.model(**probe())
        loss = self.model(**batch).loss
        return loss + penalty(self.model) if self.kind == "penalty" else loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        strategy: Any = self.trainer.strategy
        self.grads = self.grads or full_grads(self.model)
        self.losses.append(float(strategy.step_loss))
        if self.kind == "changed":
            strategy.grad_norm()
            for name, parameter in self.model.named_parameters():
                if "mlp" in name:
                    parameter.grad.zero_()
        self.norms.append(float(strategy.grad_norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        some = [p for p in self.model.parameters() if p.dim() == 2 or self.kind != "some"]
        return torch.optim.SGD(some, lr=0.1)


def _fit(rank: int, world_size: int, layout: Layout, batches: list[Batch], kind: str) -> tuple[Any, ...]:
    from lightning_nd import NDStrategy

    module = Module(batches, kind)
    trainer = tiny_trainer(
        rank,
        world_size,
        NDStrategy(dp_replicate=layout[0], dp_shard=layout[1], tp=layout[2]),
        max_epochs=1,
        accumulate_grad_batches=2 if kind == "probe" else 1,
        gradient_clip_val=0.1 if kind == "changed" else None,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    return module.grads, module.norms, module.losses, full_weights(module.model)


def one_process(batches: list[Batch], kind: str) -> tuple[Any, ...]:
    model = make_model("qwen3")
    some = [p for p in model.parameters() if p.dim() == 2 or kind != "some"]
    optimizer = torch.optim.SGD(some, lr=0.1)
    grads: dict[str, Tensor | None] = {}
    norms, losses = [], []
    window = 2 if kind == "probe" else 1
    for first in range(0, len(batches), window):
        total = sum(map(supervised, batches[first : first + window]))
        sums = [nll(model, batch) / total for batch in batches[first : first + window]]
        loss = torch.stack(sums).sum()
        (loss + penalty(model) if kind == "penalty" else loss).backward()
        grads = grads or {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        if kind == "changed":
            for name, parameter in model.named_parameters():
                if "mlp" in name:
                    parameter.grad.zero_()  # type: ignore[union-attr]
        having = [p for p in model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm([p.grad for p in having if p.grad is not None])))
        losses.append(loss.item())
        if kind == "changed":
            nn.utils.clip_grad_norm_(having, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return grads, norms, losses, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (2, 1, 2)], ids=lambda v: "x".join(map(str, v)))
@pytest.mark.parametrize("kind", ["penalty", "probe", "changed", "some"])
def test_gradients_norms_and_losses_are_those_of_one_process(pool: Pool, kind: str, layout: Layout) -> None:
    """A penalty on weights; a call under no_grad; gradients changed by a hook; parameters that nobody zeroes."""
    batches = make_batches(4)
    grads, norms, losses, weights = pool.run(_fit, layout[0] * layout[1] * layout[2], layout, batches, kind)[0]
    expected = one_process(batches, kind)
    assert compare(expected[0], grads)[0][0] <= 1e-5
    assert max(map(relative, expected[1], norms)) <= 1e-5
    assert max(map(relative, expected[2], losses)) <= 1e-5
    assert compare(expected[3], weights)[0][0] <= 1e-4


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = make_model("qwen3")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.value = nn.Linear(256, 1)


class Wrapped(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = Wrapper(), how

    def configure_model(self) -> None:
        from lightning_nd import parallelize

        strategy: Any = self.trainer.strategy
        if self.how == "model":
            parallelize(self.net.lm, strategy)
        elif self.how == "inner":
            parallelize(self.net.lm.model, strategy)
        elif self.how == "twice":
            parallelize(self.net.lm, strategy)
            parallelize(self.net, strategy)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        ids = batch["input_ids"]
        if self.how == "parts":
            hidden = self.net.lm.model(input_ids=ids).last_hidden_state
            return self.net.lm.lm_head(hidden).square().mean()
        return self.net.value(self.net.lm(input_ids=ids).logits).square().mean()

    def train_dataloader(self) -> DataLoader:
        place = self.trainer.strategy.distributed_sampler_kwargs
        rows = [rows_of(b, place["rank"], place["num_replicas"]) for b in make_batches(1)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _wrapped(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    from lightning_nd import NDStrategy

    module = Wrapped(how)
    trainer = tiny_trainer(rank, world_size, NDStrategy(dp_shard=2), max_steps=1, use_distributed_sampler=False)
    trainer.fit(module)
    return full_weights(module.net)


def test_what_the_user_has_not_parallelised_is_split_by_the_strategy(pool: Pool) -> None:
    first, second = pool.run(_wrapped, 2, "model")
    net = Wrapper()
    loss = net.value(net.lm(input_ids=make_batches(1)[0]["input_ids"]).logits).square().mean()
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    want = {name: parameter.detach() for name, parameter in net.named_parameters()}
    assert compare(want, first)[0][0] <= 1e-5
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("inner", r"net\.lm\.model has been parallelised, and the rest of net\.lm \(Qwen3ForCausalLM\) has not"),
        ("twice", r"lm of Wrapper has been parallelised by itself"),
        ("parts", r"model\.embed_tokens was called by itself.*Qwen3ForCausalLM"),
    ],
)
def test_parts_are_refused_by_name(pool: Pool, how: str, text: str) -> None:
    with pytest.raises(WorkerError, match=text):
        pool.run(_wrapped, 2, how)


class Descending(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


def drawn(seed: int) -> RandomSampler:
    return RandomSampler(range(12), replacement=True, num_samples=8, generator=torch.Generator().manual_seed(seed))


class Reader(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("qwen3")
        self.seen: list[int] = []

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.seen += batch["input_ids"][:, 0].tolist()
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _read(rank: int, world_size: int, kind: str) -> list[int]:
    from lightning_nd import NDStrategy

    rows = [{"input_ids": torch.full((8,), i), "labels": torch.full((8,), i)} for i in range(12)]
    # Each rank draws from its own state, as it does without seed_everything.
    sampler = {"descending": Descending(12), "drawn": drawn(rank)}[kind]
    module = Reader()
    loader: Any = DataLoader(rows, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    tiny_trainer(rank, world_size, NDStrategy(dp_shard=2), max_epochs=1).fit(module, loader)
    return module.seen


def test_a_samplers_order_is_kept(pool: Pool) -> None:
    assert pool.run(_read, 2, "descending") == [[11, 9, 7, 5, 3, 1], [10, 8, 6, 4, 2, 0]]


def test_rows_drawn_at_random_are_drawn_once_for_all_ranks(pool: Pool) -> None:
    got = pool.run(_read, 2, "drawn")
    assert sorted(got[0] + got[1]) == sorted(drawn(0))


def _adafactor(rank: int, world_size: int) -> None:
    from lightning_nd import NDStrategy

    class Wrong(Reader):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adafactor(self.parameters())

    rows = [{"input_ids": torch.full((8,), i), "labels": torch.full((8,), i)} for i in range(4)]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    tiny_trainer(rank, world_size, NDStrategy(dp_shard=2), max_epochs=1).fit(Wrong(), loader)


def test_an_optimizer_that_needs_whole_matrices_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="Adafactor takes means over the rows and columns of whole matrices"):
        pool.run(_adafactor, 2)


class ValueHead(Module):
    """A second layer that reads the logits of the call that gave the loss."""

    def __init__(self, batches: list[Batch], how: str) -> None:
        super().__init__(batches, how)
        self.value = value_head()

    def training_step(self, batch: Batch, index: int) -> Tensor:
        out = self.model(**batch)
        logits = out.logits if self.kind == "as they are" else out.logits.float() * 1.0
        return out.loss + 0.1 * self.value(logits).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def value_head() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(256, 1)


def _fit_value_head(rank: int, world_size: int, batches: list[Batch], how: str) -> Any:
    from lightning_nd import NDStrategy

    module = ValueHead(batches, how)
    fit = tiny_trainer(rank, world_size, NDStrategy(), max_epochs=1, use_distributed_sampler=False)
    fit.fit(module)
    return full_weights(module.model), full_weights(module.value)


@pytest.mark.parametrize("how", ["as they are", "scaled"])
def test_a_value_head_reads_the_logits(pool: Pool, how: str) -> None:
    batches = make_batches(2)
    model, value = make_model("qwen3"), value_head()
    optimizer = torch.optim.SGD([*model.parameters(), *value.parameters()], lr=0.1)
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        (nll(model, batch) / supervised(batch) + 0.1 * value(logits).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    of_model, of_value = pool.run(_fit_value_head, 2, batches, how)[0]
    assert compare({n: p.detach() for n, p in model.named_parameters()}, of_model)[0][0] <= 1e-5
    assert compare({n: p.detach() for n, p in value.named_parameters()}, of_value)[0][0] <= 1e-5
