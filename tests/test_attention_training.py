"""Lightning under cp: hand-written models, evaluation and prediction, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from families import make_model
from lightning.pytorch import LightningModule
from pool import WorkerError, tiny_trainer
from reference import make_batches, nll_sum
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_nd
from lightning_nd import NDStrategy
from lightning_nd.attention.kernels import choose_kernel
from lightning_nd.loss import causal_lm_loss


class Layer(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class HandWritten(nn.Module):
    """A model that is nobody's: positions are learned, attention is called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, 256)

    def forward(self, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


class Module(LightningModule):
    def __init__(self, attend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.attend, self.grads = HandWritten(), attend, {}

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.attend == "local":
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return lightning_nd.context_parallel_attention(q, k, v, batch["cp_context"])

        logits = self.net(batch["input_ids"], batch["position_ids"], attend)
        if self.attend == "unshifted":
            return causal_lm_loss(logits, batch["labels"], self.trainer.strategy)
        return causal_lm_loss(logits, batch["shift_labels"], self.trainer.strategy, shifted=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = {n: p.grad.full_tensor() for n, p in self.net.named_parameters()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank: int, world_size: int, attend: str = "right") -> dict[str, Tensor]:
    batch = make_batches(1, silent_row=False)[0]
    module = Module(attend)
    trainer = tiny_trainer(rank, world_size, NDStrategy(cp=2), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader([batch], batch_size=None))
    return module.grads


def test_a_hand_written_model(pool):
    torch.manual_seed(0)
    net, batch = HandWritten(), make_batches(1, silent_row=False)[0]
    positions = torch.arange(24).expand(4, -1)
    logits = net(
        batch["input_ids"],
        positions,
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    )
    targets = batch["labels"][:, 1:]
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).backward()
    for grads in pool.run(_fit, 2):
        for name, parameter in net.named_parameters():
            error = (grads[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert error <= 1e-5, (name, error)


class CallsTorch(nn.Module):
    """A model as people write them: its layers call torch's attention, and know nothing of ranks."""

    def __init__(self, how: str = "causal") -> None:
        super().__init__()
        self.net, self.how = HandWritten(), how

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sdpa = nn.functional.scaled_dot_product_attention
        if self.how == "bidirectional":
            return sdpa(q, k, v)
        if self.how == "mask":
            return sdpa(q, k, v, attn_mask=torch.ones(q.shape[2], k.shape[2]).tril().bool())
        if self.how == "dropout":
            return sdpa(q, k, v, dropout_p=0.1, is_causal=True)
        if self.how == "torch's layer":
            layer = nn.MultiheadAttention(8, 1, batch_first=True)
            return layer(q[:, 0], k[:, 0], v[:, 0], need_weights=False)[0]
        return sdpa(q, k[:, ::2], v[:, ::2], is_causal=True, scale=0.3, enable_gqa=True)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.net(ids, positions, self.attend)


class Routed(LightningModule):
    def __init__(self, how: str = "causal") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.grads = CallsTorch(how), {}
        self.how = how

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        positions = batch["position_ids"]
        if self.how == "positions of its own":
            positions = torch.arange(positions.shape[1]).expand_as(positions)
        logits = self.net(batch["input_ids"], positions)
        return causal_lm_loss(logits, batch["shift_labels"], self.trainer.strategy, shifted=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = {n: p.grad.full_tensor() for n, p in self.net.named_parameters()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _routed(rank: int, world_size: int, how: str = "causal", **options: Any) -> dict[str, Tensor]:
    batches = make_batches(2, silent_row=False)
    module = Routed(how)
    strategy = NDStrategy(cp=2, cp_sdpa=True, **options)
    trainer = tiny_trainer(
        rank, world_size, strategy, max_epochs=1, accumulate_grad_batches=2, use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    # Outside the model nothing has changed.
    q = torch.randn(1, 1, 3, 4)
    assert torch.equal(nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, :, 0], q[:, :, 0])
    return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in module.grads.items()}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_model_that_calls_torchs_attention(pool, recompute):
    torch.manual_seed(0)
    net, batches = CallsTorch(), make_batches(2, silent_row=False)
    total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    for batch in batches:
        logits = net(batch["input_ids"], torch.arange(24).expand(4, -1))
        targets = batch["labels"][:, 1:].flatten()
        (nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum") / total).backward()
    for grads in pool.run(_routed, 2, activation_checkpointing=recompute):
        for name, parameter in net.named_parameters():
            error = (grads[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert error <= 1e-5, (name, error)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("bidirectional", "is_causal=False"),
        ("mask", r"attn_mask of shape \[12, 12\]"),
        ("dropout", "dropout_p=0.1"),
        ("torch's layer", "torch.nn.MultiheadAttention"),
        ("positions of its own", "without the batch's position_ids"),
    ],
)
def test_attention_calls_that_cannot_be_split_are_refused(pool, how, text):
    with pytest.raises(WorkerError, match=text):
        pool.run(_routed, 2, how)
    if how == "mask":
        with pytest.raises(WorkerError, match="cannot look into compiled blocks"):
            pool.run(_routed, 2, compile=True)


@pytest.mark.parametrize(
    ("attend", "text"),
    [("local", "never called context-parallel attention"), ("unshifted", "pass batch\\['shift_labels'\\]")],
)
def test_silent_mistakes_are_refused(pool, attend, text):
    with pytest.raises(WorkerError, match=text):
        pool.run(_fit, 2, attend)


class Evaluated(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.means = make_model("qwen3"), []

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        loss = self.model(**batch).loss
        self.means.append(loss.item())
        self.log("loss", loss)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Any], index: int) -> Tensor:
        return lightning_nd.gather_sequence(self.model(**batch).logits, batch)


def _evaluate(rank: int, world_size: int) -> tuple[list[float], list[Tensor]]:
    module = Evaluated()
    loader = DataLoader(make_batches(3, length=23), batch_size=None)
    trainer = tiny_trainer(rank, world_size, NDStrategy(cp=world_size), use_distributed_sampler=False)
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    predictions = trainer.predict(module, loader)
    return module.means, [p.detach() for p in predictions]


@pytest.mark.parametrize("cp", [2, 4])
def test_validate_test_and_predict(pool, cp):
    model, batches = make_model("qwen3").eval(), make_batches(3, length=23)
    with torch.no_grad():
        sums = [nll_sum(model, batch) for batch in batches]
        means = [(nll / count).item() for nll, count in sums]
        logits = [model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits for b in batches]
    for got, predictions in pool.run(_evaluate, cp):
        assert got == pytest.approx([*means, *means], rel=1e-5)
        for mine, want, batch in zip(predictions, logits, batches, strict=True):
            real = batch["attention_mask"].bool()
            assert mine.shape == want.shape
            torch.testing.assert_close(mine[real], want[real], atol=1e-4, rtol=1e-4)


class Predicts(LightningModule):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.model, self.how, self.kept = make_model("qwen3"), how, None

    def predict_step(self, batch: Any, index: int) -> Any:
        one = batch["chosen"] if self.how == "pair" else batch
        logits = self.model(**one).logits
        if self.how == "wrong tensor":
            logits = logits[:, :-1]
        self.kept = logits if self.kept is None else self.kept
        return one["row"], lightning_nd.gather_sequence(logits)

    def on_predict_epoch_end(self) -> None:
        if self.how == "too late":
            lightning_nd.gather_sequence(self.kept)


def numbered(rows: int, length: int = 23) -> dict[str, Any]:
    batch = make_batches(1, rows=rows, length=length)[0]
    return batch | {"row": torch.arange(rows)}


def _predict(rank: int, world_size: int, cp: int, how: str = "") -> list[tuple[Tensor, Tensor]]:
    batch = numbered(8)
    rows = [{name: value[i] for name, value in batch.items()} for i in range(8)]
    if how == "pair":
        rows = [{"chosen": row, "rejected": row} for row in rows]
    module = Predicts(how)
    trainer = tiny_trainer(rank, world_size, NDStrategy(cp=cp, dp_shard=world_size // cp))
    predictions = trainer.predict(module, DataLoader(rows, batch_size=2, shuffle=False))
    return [(row, logits.detach()) for row, logits in predictions]


@pytest.mark.parametrize(("cp", "world_size"), [(2, 4), (1, 2)])
def test_predict_returns_each_row_once_in_whole(pool, cp, world_size):
    batch = numbered(8)
    with torch.no_grad():
        want = make_model("qwen3").eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    answers = pool.run(_predict, world_size, cp)
    for peers in range(cp):  # ranks of one place along cp share out the rows, and cp peers return the same
        found = [
            (int(r), x) for answer in answers[peers::cp] for rows, y in answer for r, x in zip(rows, y, strict=True)
        ]
        assert sorted(row for row, _ in found) == list(range(8))
        for row, logits in found:
            assert logits.shape == want[row].shape
            real = batch["attention_mask"][row].bool()
            torch.testing.assert_close(logits[real], want[row][real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("pair", "the step's batch holds 2 sequences"),
        ("wrong tensor", r"this rank holds \[2, 12\]"),
        ("too late", "is gone"),
    ],
)
def test_gathering_without_knowing_the_batch_is_refused(pool, how, text):
    with pytest.raises(WorkerError, match=text):
        pool.run(_predict, 2, 2, how)


def _announced(rank: int, world_size: int) -> None:
    choose_kernel.cache_clear()
    module = Evaluated()
    trainer = tiny_trainer(rank, world_size, NDStrategy(cp=2), use_distributed_sampler=False)
    trainer.validate(module, DataLoader(make_batches(1) * 3, batch_size=None), verbose=False)


def test_choices_are_logged_once_with_their_reason(pool):
    pool.run(_announced, 2)
    said = [line for line in pool.output(0).splitlines() if line.startswith("NDStrategy: c")]
    assert len(said) == 3, said
    assert re.match(r"NDStrategy: cp_layout='auto' picks '\w+': max/mean work 1.*would cost", said[0])
    assert re.match(r"NDStrategy: cp_method='auto' picks '\w+': estimated .* ms a layer for direct", said[1])
    assert said[2] == "NDStrategy: context-parallel attention uses the cpu-flash kernel for cpu float32, head dim 16."
    assert "NDStrategy: c" not in pool.output(1)


class Misused(Evaluated):
    how = ""

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        if self.how == "derived":
            self.model(input_ids=batch["input_ids"] + 1)
        elif self.how == "no positions":
            self.model(input_ids=batch["input_ids"])
        elif self.how == "labels only":
            self.model(**{key: value for key, value in batch.items() if key != "shift_labels"})
        elif self.how == "4-D mask":
            self.model(**batch | {"attention_mask": torch.zeros(4, 1, 12, 12)})
        elif self.how == "sliced":
            self.model(**batch | {"input_ids": batch["input_ids"][:, :5]})


def _misuse(rank: int, world_size: int, how: str) -> None:
    module = Misused()
    module.how = how
    trainer = tiny_trainer(rank, world_size, NDStrategy(cp=2), use_distributed_sampler=False)
    trainer.validate(module, DataLoader(make_batches(1), batch_size=None), verbose=False)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("derived", "not a batch of the strategy's"),
        ("no positions", "without position_ids"),
        ("labels only", "shift_labels=batch"),
        ("4-D mask", "2-D attention_mask"),
        ("sliced", "this rank holds"),
    ],
)
def test_misuse_is_refused(pool, how, text):
    with pytest.raises(WorkerError, match=text):
        pool.run(_misuse, 2, how)


@pytest.mark.parametrize(("option", "value"), [("cp_method", "star"), ("cp_layout", "striped"), ("cp_kernel", "fast")])
def test_unknown_options_are_refused_at_once(option, value):
    with pytest.raises(ValueError, match=f"NDStrategy: {option}='{value}': choose one of 'auto'"):
        NDStrategy(cp=2, **{option: value})
