"""Train a tiny model under `NDStrategy` inside a pool worker and hand back full tensors to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from families import make_model
from lightning.pytorch import LightningModule
from pool import tiny_trainer
from reference import Batch, Run, adamw, rows_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Layout = tuple[int, int, int]  # dp_replicate, dp_shard, tp


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, on every rank (collective)."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def full_grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else full(p.grad) for n, p in module.named_parameters()}


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.detach()) for n, p in module.named_parameters()}


class ParityModule(LightningModule):
    """What a user's own project has: a causal LM made in `__init__`, and its loss returned."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        optimizer: OptimizerFactory = adamw,
    ) -> None:
        super().__init__()
        self.model = model
        self.batches = batches
        self.optimizer = optimizer
        self.run = Run([], [], [], [], {}, {})

    def train_dataloader(self) -> DataLoader:
        place = self.trainer.strategy.distributed_sampler_kwargs
        rows = [rows_of(batch, place["rank"], place["num_replicas"]) for batch in self.batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.run.micro_losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.run.grads:
            self.run.grads = full_grads(self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        if self.trainer.global_step == len(self.run.losses) + 1:
            self.run.losses.append(float(strategy.step_loss))
            self.run.tokens.append(int(strategy.step_supervised_tokens))
            norm = strategy.last_grad_norm
            self.run.grad_norms.append(float("nan") if norm is None else float(norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(p for p in self.parameters() if p.requires_grad)


def train_parallel(
    rank: int,
    world_size: int,
    family: str,
    layout: Layout,
    batches: Sequence[Batch],
    *,
    overrides: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    module_class: type[ParityModule] = ParityModule,
    optimizer: OptimizerFactory = adamw,
    prepare: Callable[[nn.Module], Any] | None = None,
) -> Run | None:
    """Train `family` on all batches; the numbers of rank 0 (`None` elsewhere, once all ranks were found to agree).

    `prepare` changes the model before anything else sees it (freezes parameters, say).
    """
    from lightning_nd import NDStrategy

    dp_replicate, dp_shard, tp = layout
    nd = NDStrategy(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, **(strategy or {}))
    model = make_model(family, **(overrides or {}))
    if prepare is not None:
        prepare(model)
    module = module_class(model, batches, optimizer)
    fit = tiny_trainer(rank, world_size, nd, max_epochs=1, use_distributed_sampler=False, **(trainer or {}))
    fit.fit(module)
    module.run.weights = full_weights(module.model)
    _check_ranks_agree(module.run)
    return module.run if rank == 0 else None


def _check_ranks_agree(run: Run) -> None:
    """Every rank must hold the same numbers, bit for bit: ranks decide by them (early stopping, best checkpoint)."""
    sums = torch.stack([w.double().sum() for w in run.weights.values()])
    numbers = {
        "losses": run.losses,
        "gradient norms": run.grad_norms,
        "tokens": run.tokens,
        "losses of micro-batches": run.micro_losses,
        "weights": sums.tolist(),
    }
    for what, values in numbers.items():
        own = torch.tensor(values, dtype=torch.float64)
        first = own.clone()
        torch.distributed.broadcast(first, src=0)
        if not torch.equal(own.nan_to_num(-1), first.nan_to_num(-1)):
            raise AssertionError(f"{what} differ between ranks, by {(own - first).abs().max():.2e}")
