"""Models that are not from transformers: FSDP2 by repeated blocks, tensor parallelism by a given plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from parity import Layout, full_grads, full_weights
from pool import Pool, WorkerError, tiny_trainer
from reference import Batch, compare, make_batches, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

PLAN = {
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    def __init__(self, width: int = 32, vocab: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_plain() -> Plain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Plain()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].roll(-1, 1).flatten())


def even_batches() -> list[Batch]:
    """Equal token counts everywhere: the mean over ranks of a user's own loss is the global mean."""
    batches = make_batches(4)
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
    return batches


class PlainModule(pl.LightningModule):
    own_loss = True

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.model = make_plain()
        self.batches = batches
        self.grads: dict[str, Tensor | None] = {}

    def train_dataloader(self) -> DataLoader:
        place = self.trainer.strategy.distributed_sampler_kwargs
        rows = [rows_of(b, place["rank"], place["num_replicas"]) for b in self.batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if self.own_loss:
            return token_mean(self.model, batch)
        from lightning_nd.loss import causal_lm_loss

        return causal_lm_loss(self.model(batch["input_ids"]), batch["labels"], self.trainer.strategy)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.grads = self.grads or full_grads(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OurLossModule(PlainModule):
    own_loss = False


def _fit(
    rank: int,
    world_size: int,
    layout: Layout,
    batches: list[Batch],
    module_class: Callable[[list[Batch]], PlainModule] = PlainModule,
    **kwargs: Any,
) -> tuple[Any, Any, int]:
    from torch.distributed.fsdp import FSDPModule

    from lightning_nd import NDStrategy

    strategy = NDStrategy(dp_replicate=layout[0], dp_shard=layout[1], tp=layout[2], **kwargs)
    module = module_class(batches)
    trainer = tiny_trainer(
        rank, world_size, strategy, max_epochs=1, accumulate_grad_batches=2, use_distributed_sampler=False
    )
    trainer.fit(module)
    sharded = sum(isinstance(layer, FSDPModule) for layer in module.model.layers)
    return module.grads, full_weights(module.model), sharded


def one_process(
    batches: list[Batch], weigh_by_tokens: bool, model: nn.Module | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    model, grads = model or make_plain(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, len(batches), 2):
        window = batches[first : first + 2]
        labels = [b["labels"][:, 1:] for b in window]
        total = sum(int((x != -100).sum()) for x in labels)
        for batch, label in zip(window, labels, strict=True):
            if weigh_by_tokens:
                logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
                (F.cross_entropy(logits, label.flatten(), reduction="sum") / total).backward()
            else:
                (token_mean(model, batch) / 2).backward()
        grads = grads or {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    assert grads is not None
    return grads, {n: p.detach() for n, p in model.named_parameters()}


def size(layout: Layout) -> int:
    return layout[0] * layout[1] * layout[2]


def ids(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (2, 2, 1)], ids=ids)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", 2])
def test_sharded_by_its_repeated_blocks(pool: Pool, layout: Layout, checkpointing: Any) -> None:
    batches = even_batches()
    grads, weights, sharded = pool.run(_fit, size(layout), layout, batches, activation_checkpointing=checkpointing)[0]
    assert sharded == 3
    expected_grads, expected_weights = one_process(batches, weigh_by_tokens=False)
    rename = {name.replace("_checkpoint_wrapped_module.", ""): name for name in grads}
    assert compare(expected_grads, {new: grads[old] for new, old in rename.items()})[0][0] <= 1e-5
    assert compare(expected_weights, {new: weights[old] for new, old in rename.items()})[0][0] <= 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4)], ids=ids)
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
def test_tensor_parallel_with_a_given_plan(pool: Pool, layout: Layout, sequence_parallel: bool) -> None:
    batches = even_batches()
    grads, weights, _ = pool.run(
        _fit, size(layout), layout, batches, tp_plan=PLAN, sequence_parallel=sequence_parallel
    )[0]
    expected_grads, expected_weights = one_process(batches, weigh_by_tokens=False)
    assert compare(expected_grads, grads)[0][0] <= 1e-5
    assert compare(expected_weights, weights)[0][0] <= 1e-5


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2)], ids=ids)
def test_our_loss_weighs_by_tokens(pool: Pool, layout: Layout) -> None:
    batches = make_batches(4)
    plan: Any = PLAN if layout[2] > 1 else "auto"
    grads, weights, _ = pool.run(_fit, size(layout), layout, batches, OurLossModule, tp_plan=plan)[0]
    expected_grads, expected_weights = one_process(batches, weigh_by_tokens=True)
    assert compare(expected_grads, grads)[0][0] <= 1e-5
    assert compare(expected_weights, weights)[0][0] <= 1e-5


def test_tensor_parallel_without_a_plan_is_refused(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"tp=2 needs a tensor-parallel plan.*Plain.*tp_plan=") as caught:
        pool.run(_fit, 2, (1, 1, 2), even_batches())
    assert caught.value.type_name == "ValueError"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.upp": "colwise", "layers.*.down": "rowwise"}, r"layers\.\*\.upp"),
        ({"layers.*.up": "colwize", "layers.*.down": "rowwise"}, "colwize"),
        ({"layers.*.up": "colwise"}, r"output of 'layers\.0\.up' in slices, and no layer within 'layers\.0' is"),
        ({"layers.*.down": "rowwise"}, r"'layers\.0\.down', which takes slices, and no layer within"),
        (PLAN | {"head": "colwise"}, "output of 'head' in slices, and no layer beside it"),
    ],
    ids=["unknown-module", "unknown-style", "no-rowwise", "no-colwise", "split-head"],
)
def test_wrong_plans_are_refused(pool: Pool, plan: dict[str, str], message: str) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        pool.run(_fit, 2, (1, 1, 2), even_batches(), tp_plan=plan)
    assert caught.value.type_name == "ValueError"


class Attention(nn.Module):
    """Heads follow from the width of the layer, and lie as ``interleaved`` says."""

    def __init__(self, width: int, head_dim: int, interleaved: bool) -> None:
        super().__init__()
        self.head_dim, self.interleaved = head_dim, interleaved
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.interleaved:
            q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        else:
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FusedBlock(nn.Module):
    def __init__(self, width: int, interleaved: bool) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width, 8, interleaved)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def make_fused(interleaved: bool) -> Plain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Plain()
        model.layers = nn.ModuleList(FusedBlock(32, interleaved) for _ in range(2))
    return model


class FusedModule(PlainModule):
    def __init__(self, batches: list[Batch], interleaved: bool) -> None:
        super().__init__(batches)
        self.model = make_fused(interleaved)


FUSED = {"layers.*.attn.qkv": "qkv_colwise", "layers.*.attn.out": "rowwise"}


@pytest.mark.parametrize("interleaved", [False, True], ids=["blocks", "interleaved"])
def test_fused_queries_keys_and_values(pool: Pool, interleaved: bool) -> None:
    batches = even_batches()
    style = "qkv_interleaved_colwise" if interleaved else "qkv_colwise"
    module = partial(FusedModule, interleaved=interleaved)
    grads, weights, _ = pool.run(_fit, 2, (1, 1, 2), batches, module, tp_plan=FUSED | {"layers.*.attn.qkv": style})[0]
    expected_grads, expected_weights = one_process(batches, weigh_by_tokens=False, model=make_fused(interleaved))
    assert compare(expected_grads, grads)[0][0] <= 1e-5
    assert compare(expected_weights, weights)[0][0] <= 1e-5


def test_a_fused_layer_cut_as_one_is_refused(pool: Pool) -> None:
    plan = FUSED | {"layers.*.attn.qkv": "colwise"}
    module = partial(FusedModule, interleaved=False)
    with pytest.raises(WorkerError, match=r"holds queries, keys and values.*'qkv_colwise'"):
        pool.run(_fit, 2, (1, 1, 2), even_batches(), module, tp_plan=plan)
