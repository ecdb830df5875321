"""What silently goes wrong elsewhere: shown to be right here, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from families import make_model
from pool import Pool, WorkerError, tiny_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_nd import NDStrategy

Batch = dict[str, Tensor]


def rows(count: int = 2, length: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (count, 2, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


class Module(pl.LightningModule):
    """Holds a model, returns its loss, keeps what it saw."""

    def __init__(self, make: Callable[[], nn.Module], batches: list[Batch] | None = None) -> None:
        super().__init__()
        self.model = make()
        self.batches = batches or rows()
        self.losses: list[float] = []

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(rank: int, world_size: int, module: Module, strategy: NDStrategy, **kwargs: Any) -> pl.Trainer:
    trainer = tiny_trainer(rank, world_size, strategy, max_epochs=1, use_distributed_sampler=False, **kwargs)
    trainer.fit(module)
    return trainer


# -- refusals ---------------------------------------------------------------------------------------------------------


def _llama_with_dropout() -> nn.Module:
    return make_model("llama", attention_dropout=0.1)


def _llama_with_wrapped_layers() -> nn.Module:
    model = make_model("llama")

    class Wrapped(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base
            self.in_features, self.out_features = base.in_features, base.out_features

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x)

    for layer in model.model.layers:
        layer.self_attn.q_proj = Wrapped(layer.self_attn.q_proj)
    return model


def _mixtral_with_router_loss() -> nn.Module:
    return make_model("mixtral", output_router_logits=True)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0)
    config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def _three_heads() -> nn.Module:
    return make_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)


def _odd_width() -> nn.Module:
    return make_model("llama", intermediate_size=129)


def _run_refused(rank: int, world_size: int, make: Callable[[], nn.Module], degrees: dict[str, int]) -> None:
    fit(rank, world_size, Module(make), NDStrategy(**degrees))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "degrees", "said"),
    [
        (_llama_with_dropout, {"tp": 2}, ["tp=2", "dropout", "attention_dropout", "tp=1"]),
        (_llama_with_wrapped_layers, {"tp": 2}, ["tp=1", "q_proj", "Wrapped", "adapter"]),
        (_mixtral_with_router_loss, {"dp_shard": 2}, ["load-balancing", "output_router_logits=False"]),
        (_gpt2, {"tp": 2}, ["GPT2LMHeadModel", "plan", "tp=1", "tp_plan"]),
        (_three_heads, {"tp": 2}, ["tp=2", "num_attention_heads=3", "1, 3"]),
        (_odd_width, {"tp": 2}, ["tp=2", "129", "mlp."]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_with_reason(
    pool: Pool, make: Callable[[], nn.Module], degrees: dict[str, int], said: list[str]
) -> None:
    with pytest.raises(WorkerError) as refusal:
        pool.run(_run_refused, 2, make, degrees)
    for part in said:
        assert part in refusal.value.message


# -- memory and dtypes ------------------------------------------------------------------------------------------------


def _fraction(rank: int, world_size: int, degrees: dict[str, int]) -> float:
    module = Module(lambda: make_model("llama"))
    fit(rank, world_size, module, NDStrategy(**degrees))  # type: ignore[arg-type]
    parameters = list(module.parameters())
    return sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("world", "degrees", "expected"),
    [
        (2, {"dp_shard": 2}, 0.5),
        (2, {"dp_replicate": 2, "dp_shard": 1}, 1.0),
        (4, {"dp_replicate": 2, "dp_shard": 2}, 0.5),
    ],
)
def test_each_rank_holds_its_share_of_the_parameters(
    pool: Pool, world: int, degrees: dict[str, int], expected: float
) -> None:
    for share in pool.run(_fraction, world, degrees):
        assert share == pytest.approx(expected, rel=1e-2)


def _bf16_with_fp32_norms() -> nn.Module:
    model = make_model("llama").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    return model


def _mixed_dtypes(rank: int, world_size: int) -> tuple[dict[str, str], float]:
    module = Module(_bf16_with_fp32_norms)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    fit(rank, world_size, module, NDStrategy())
    after = dict(module.model.named_parameters())
    moved = min((after[name].full_tensor() - value).abs().max().item() for name, value in before.items())
    return {name: str(p.dtype) for name, p in after.items()}, moved


def test_fp32_norms_in_a_bf16_model_train_and_stay_fp32(pool: Pool) -> None:
    dtypes, moved = pool.run(_mixed_dtypes, 2)[0]
    assert {d for name, d in dtypes.items() if "norm" in name} == {"torch.float32"}
    assert {d for name, d in dtypes.items() if "norm" not in name} == {"torch.bfloat16"}
    assert moved > 0


# -- losses -----------------------------------------------------------------------------------------------------------


def _nothing_supervised(rank: int, world_size: int) -> tuple[list[float], float]:
    batches = rows(1)
    batches[0]["labels"].fill_(-100)
    module = Module(lambda: make_model("llama"), batches)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}

    def plain_sgd() -> Any:
        return torch.optim.SGD(module.parameters(), lr=1.0)

    module.configure_optimizers = plain_sgd  # type: ignore[method-assign]
    fit(rank, world_size, module, NDStrategy(tp=2))
    moved = max((p.full_tensor() - before[n]).abs().max().item() for n, p in module.model.named_parameters())
    return module.losses, moved


def test_a_step_without_supervised_tokens_has_no_loss_and_moves_nothing(pool: Pool) -> None:
    for losses, moved in pool.run(_nothing_supervised, 4):
        assert all(math.isnan(loss) for loss in losses)  # there is no such mean: not 0.0
        assert moved == 0.0


def _own_checkpointing(rank: int, world_size: int) -> list[float]:
    def make() -> nn.Module:
        model = make_model("llama")
        model.gradient_checkpointing_enable()
        return model

    module = Module(make, rows(2, length=15))
    fit(rank, world_size, module, NDStrategy(tp=2, activation_checkpointing="full"))
    assert module.model.model.layers[0].gradient_checkpointing  # type: ignore[union-attr, index]
    return module.losses


def _without_checkpointing(rank: int, world_size: int) -> list[float]:
    module = Module(lambda: make_model("llama"), rows(2, length=15))
    fit(rank, world_size, module, NDStrategy(tp=2))
    return module.losses


def test_the_models_own_checkpointing_switch_is_taken_over(pool: Pool) -> None:
    assert pool.run(_own_checkpointing, 2)[0] == pytest.approx(pool.run(_without_checkpointing, 2)[0], rel=1e-6)


# -- metrics ----------------------------------------------------------------------------------------------------------


def _metric(rank: int, world_size: int) -> float:
    from torchmetrics import SumMetric

    class Counting(Module):
        def __init__(self) -> None:
            super().__init__(lambda: make_model("llama"))
            self.seen = SumMetric()

        def training_step(self, batch: Batch, index: int) -> Tensor:
            self.seen.update(batch["input_ids"].shape[0])
            return super().training_step(batch, index)

    module = Counting()
    fit(rank, world_size, module, NDStrategy(dp_shard=2, tp=2))
    return float(module.seen.compute())


def test_torchmetrics_do_not_count_tp_peers(pool: Pool) -> None:
    # Two data ranks, two batches of two rows each.
    assert pool.run(_metric, 4) == [8.0] * 4


# -- order of rows ----------------------------------------------------------------------------------------------------


def _order(rank: int, world_size: int, shuffle: bool) -> list[int]:
    class Watching(Module):
        def __init__(self) -> None:
            super().__init__(lambda: make_model("llama"))
            self.seen: list[int] = []

        def training_step(self, batch: Batch, index: int) -> Tensor:
            self.seen += batch["input_ids"][:, 0].tolist()
            return super().training_step(batch, index)

        def train_dataloader(self) -> Any:
            ids = torch.arange(8)[:, None].expand(8, 6)
            return DataLoader([{"input_ids": i, "labels": i} for i in ids], batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]

    module = Watching()
    tiny_trainer(rank, world_size, NDStrategy(), max_epochs=1).fit(module)
    return module.seen


def test_a_loader_that_is_not_shuffled_stays_so(pool: Pool) -> None:
    assert pool.run(_order, 1, False) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # The global batch of a step is the next rows, as one process with twice the batch size would read them.
    assert pool.run(_order, 2, False) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_shuffled_loader_gives_each_row_to_one_data_rank(pool: Pool) -> None:
    first, second = pool.run(_order, 2, True)
    assert sorted(first + second) == list(range(8))
    assert first != [0, 2, 4, 6]
