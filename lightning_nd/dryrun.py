"""One optimizer step of one rank of any layout, without its devices, its weights or its peers.

Parameters and activations are fake tensors (shape and dtype without memory), and a fake process group answers for the
other ranks at once. All the code of a run is gone through: the split of the model, every hook, every collective's
shapes, loss, backward, clipping and the optimizer. What shows only in numbers, in time or in memory does not show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch._subclasses.fake_tensor import FakeTensorMode

DEFAULT_LENGTH = 2048
"""Tokens of a row, where the data do not bound them."""


@dataclass(frozen=True)
class DryRun:
    """What a dry run has seen.

    Attributes:
        layout: the degrees, in words.
        parameters: of the whole model.
        trained: those of them that are trained.
        local: held by the rank that was played.
        tokens: of a micro-batch that the rank computes with (under cp its part of each row).
        seconds: that it took.
    """

    layout: str
    parameters: int
    trained: int
    local: int
    tokens: int
    seconds: float


@contextmanager
def simulated(world_size: int, rank: int = 0) -> Iterator[FakeTensorMode]:
    """A process group of `world_size` ranks in which only this one exists, and a mode for fake tensors.

    Raises:
        RuntimeError: if this process is part of a group already.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("A dry run needs a process of its own: this one is part of a process group.")
    joined = DeviceMesh._concatenate

    def outside(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():  # it computes ranks with real tensors
            return joined(*args, **kwargs)

    dist.init_process_group("fake", world_size=world_size, rank=rank, store=FakeStore())
    try:
        with (
            mock.patch.object(DeviceMesh, "_concatenate", staticmethod(outside)),
            # Under fake tensors transformers takes itself to be traced and would build a mask that no run builds.
            mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),
            # Fake labels have no values: every token counts as supervised, and as one of the vocabulary.
            mock.patch("lightning_nd.loss.causal._supervised", lambda targets: torch.arange(len(targets))),
            mock.patch("lightning_nd.loss.causal.check_targets"),
        ):
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


def dry_run(trainer: pl.Trainer, module: Any, data: Any, *, rank: int = 0) -> DryRun:
    """Play one optimizer step of a recipe as one rank.

    Args:
        trainer: with an `NDStrategy`, not run yet.
        module: a `CausalLM`; its model is built from its configuration only.
        data: a `ChatDataModule`; only its ``micro_batch_size`` and ``max_length`` are looked at, no row is read.
        rank: which rank to play.

    Raises:
        ValueError: what a run refuses before its first step.
    """
    from lightning_nd import gradients
    from lightning_nd.checkpoint.init import NoSource
    from lightning_nd.loss import install_loss
    from lightning_nd.parallelize import parallelize, partial_gradients
    from lightning_nd.preflight import preflight
    from lightning_nd.recipes.optim import DEFAULT_OPTIMIZER, configure_optimizers
    from lightning_nd.recipes.overrides import check_length

    started = time.perf_counter()
    strategy: Any = trainer.strategy
    rows, length = data.micro_batch_size, data.max_length or DEFAULT_LENGTH
    trainer.datamodule = data  # type: ignore[attr-defined]
    strategy._lightning_module = module
    module._trainer = trainer
    preflight(trainer, None, strategy.dims, strategy._tp_plan, strategy.attends_by_document)
    check_length(module.config, data.max_length)
    strategy._timeout, strategy._compile = None, False
    with simulated(strategy.dims.world_size, rank) as fake:
        strategy.setup_environment()
        model = module.skeleton(module._weight_dtype())
        model._nd_source = NoSource()
        module.model = model
        with fake:
            parallelize(model, strategy)
            group = strategy.meshes.loss.get_group()
            install_loss(model, strategy.ledger, group, sharded=strategy.attends_by_document)
            made = configure_optimizers(module, {**DEFAULT_OPTIMIZER}, None)["optimizer"]
        batch = _batch(rows, length, module.config.get_text_config().vocab_size)
        if strategy._context is not None:
            batch = strategy._context.shard(batch)
        tokens = batch["input_ids"].numel()
        batch = {key: fake.from_tensor(v) if isinstance(v, Tensor) else v for key, v in batch.items()}
        with fake:
            loss = module(**batch).loss
            loss.backward()
            partial = partial_gradients(module)
            if partial:
                gradients.average_partial_gradients(partial, strategy.meshes.tp.get_group())
            parameters = list(module.parameters())
            gradients.clip_by_norm(parameters, 1.0, gradients.global_norm(parameters))
            made.step()
        whole = list(model.parameters())
        return DryRun(
            layout=str(strategy.dims),
            parameters=sum(p.numel() for p in whole),
            trained=sum(p.numel() for p in whole if p.requires_grad),
            local=sum(int(p.to_local().numel() if hasattr(p, "to_local") else p.numel()) for p in whole),
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )


def _batch(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % min(vocabulary, 1000)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


__all__ = ["DryRun", "dry_run", "simulated"]
