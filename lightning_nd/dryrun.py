"""``Trainer(strategy=NDStrategy(dry_run=True)).fit(...)``: one rank of the wanted world, without devices or weights.

Parameters and activations are fake tensors (shape and dtype without memory), and a fake process group answers for the
other ranks at once. The run's own code is gone through: `configure_model`, the split of the model, every hook, every
collective's shapes, `training_step`, backward, clipping and the optimizer. What shows only in numbers, in time or in
data does not show. Everything happens in a copy of this process; the Trainer and the module stay as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_nd.planner.child import in_children
from lightning_nd.planner.play import Simulation, count, cut, depths, extrapolate, kinds_of

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor

DEFAULT_LENGTH = 2048
"""Tokens of a row, where the data do not bound them."""


class DryRunLauncher(_Launcher):
    """Plays one rank where others would start all of them; the Trainer's function is not called.

    Attributes:
        result: what the last fit showed.
    """

    result: Simulation | None = None

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

        from lightning_nd.planner.report import dry_run_report

        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            what = "this" if trainer is None else f"trainer.{trainer.state.fn.value}"
            rank_zero_warn(f"NDStrategy(dry_run=True) plays trainer.fit only; {what} is left out.")
        else:
            module, loaders, _, data, *_ = [*args, None, None, None, None]
            self.result = dry_run(trainer, module, kwargs.get("datamodule", data), loaders)
            print(dry_run_report(self.result, trainer), flush=True)
        if trainer is not None:
            trainer.state.status, trainer.training = TrainerStatus.FINISHED, False
        return None

    @override
    def kill(self, signum: Any) -> None:
        pass


def dry_run(
    trainer: pl.Trainer,
    module: Any,
    data: LightningDataModule | None = None,
    loaders: Any = None,
    *,
    rank: int = 0,
    steps: int = 2,
) -> Simulation:
    """Play optimizer steps of a fit as one rank, in a copy of this process.

    Deep transformers models are played with fewer of their blocks, at two depths, and extrapolated.

    Args:
        trainer: with an `NDStrategy`, not run yet.
        module: the LightningModule; automatic optimisation.
        data: of a `ChatDataModule` only its ``micro_batch_size``, ``max_length`` and ``packing`` are looked at, and no
            row is read. Of others the first batch is taken.
        loaders: in place of a data module.
        rank: which rank to play.
        steps: optimizer steps; the last one is counted, and from the second on there is optimizer state.

    Raises:
        Exception: what the run would have met, with the phase in its notes.
    """
    given = (trainer, module, data, loaders, rank, steps)
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None
    if getattr(text, "num_hidden_layers", 99) <= 4:  # nothing to leave out
        return in_children([(_play, (*given, 1))])[0]
    more, few = in_children([(_play, (*given, 1)), (_play, (*given, 0))])
    return more if few is None else extrapolate(few, more)


# -- in the copy ------------------------------------------------------------------------------------------------------


def _play(trainer: Any, module: Any, data: Any, loaders: Any, rank: int, steps: int, which: int) -> Simulation | None:
    """One simulation at the smaller (0) or larger (1) depth; None if the smaller one is not needed."""
    place = ["setup"]
    try:
        return _steps(trainer, module, data, loaders, rank, steps, which, place)
    except Exception as error:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            raise RuntimeError(
                f"dry run, {place[0]}: the code looks at the values of a tensor ({error}), and a dry run has shapes"
                " only. The run itself may be in order; `lightning-nd plan` counts without running it."
            ) from error
        error.add_note(f"dry run: rank {rank} of {trainer.strategy.dims.world_size}, {place[0]}")
        raise


def _steps(
    trainer: Any, module: Any, data: Any, loaders: Any, rank: int, steps: int, which: int, place: list[str]
) -> Simulation | None:
    from lightning.pytorch.accelerators import CPUAccelerator

    from lightning_nd.parallelize import partial_gradients
    from lightning_nd.planner.patches import simulation
    from lightning_nd.preflight import preflight

    started = time.perf_counter()
    strategy = trainer.strategy
    _check(module)
    trainer._data_connector.attach_data(module, train_dataloaders=loaders, datamodule=data)
    trainer.callbacks = []  # they would look at numbers, and write
    module.log = module.log_dict = lambda *args, **kwargs: None
    strategy._lightning_module = strategy.model = module
    if which:
        preflight(trainer, None, strategy.dims, strategy._tp_plan, by_document=strategy.attends_by_document)
    batch, packed = _batch(trainer, module, data)
    packed &= not strategy.attends_by_document  # which makes no mask
    strategy._timeout, strategy._compile = None, False
    strategy.accelerator = CPUAccelerator()
    strategy._parallel_devices = [strategy.accelerator.get_parallel_devices(1)[0]] * strategy.num_processes
    with simulation(strategy.dims.world_size, rank, packed=packed) as fake:
        assert fake is not None
        strategy.setup_environment()
        module.setup("fit")
        place[0] = "configure_model"
        module.configure_model()
        depth, layers = _shorten(module, which)
        if not which and layers == depth:
            return None
        optimizer = _prepare(strategy, module, fake)
        batch, tokens = _on_rank(strategy, batch, fake)

        def step(phase: Callable[..., None]) -> None:
            def enter(name: str, times: int = 1) -> None:
                place[0] = name
                phase(name, times)

            _step(trainer, module, optimizer, batch, enter)

        strategy._partial = partial_gradients(module)
        held = [*module.parameters(), *module.buffers(), *_tensors(batch)]
        place[0] = "forward"
        peaks, traffic = count(fake, strategy.meshes, held, step, steps)
        parameters = list(module.parameters())
        sizes = {
            "parameters": float(sum(p.numel() for p in parameters)),
            "trained": float(sum(p.numel() for p in parameters if p.requires_grad)),
            "local": float(sum(_local(p).numel() for p in parameters)),
        }
        return Simulation(peaks, traffic, time.perf_counter() - started, layers, depth, sizes, tokens)


def _check(module: Any) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            f"NDStrategy(dry_run=True) plays automatic optimisation, and {type(module).__name__} optimises by hand:"
            " what its training_step does with fake numbers would not be what it does in a run."
        )


def _prepare(strategy: Any, module: Any, fake: Any) -> Any:
    """Split the module's models and make its optimizer, as `NDStrategy.setup` does."""
    import torch
    from lightning.pytorch.core.optimizer import _configure_optimizers
    from transformers import PreTrainedModel

    from lightning_nd.checkpoint.init import NoSource
    from lightning_nd.loss import install_loss
    from lightning_nd.parallelize import parallelize, roots

    models = roots.find_roots(module, strategy.dims.tp)
    with fake:
        for model in models:
            if isinstance(model, PreTrainedModel):
                torch.nn.Module.to(model, "meta")
                model._nd_source = NoSource()  # type: ignore[assignment]
            else:
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    _set(model, name, fake.from_tensor(tensor))
            parallelize(model, strategy)
        for model in module.modules():
            if roots.is_causal_lm(model):
                roots.check_objective(model, strategy.dims)
                group = strategy.meshes.loss.get_group()
                install_loss(model, strategy.ledger, group, sharded=strategy.attends_by_document, options=strategy.loss)
        optimizers, *_ = _configure_optimizers(module.configure_optimizers())
        roots.check_optimizers(module, optimizers)
    if len(optimizers) != 1:
        raise ValueError(f"NDStrategy(dry_run=True) plays one optimizer; configure_optimizers gave {len(optimizers)}.")
    for group in optimizers[0].param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True  # as on a GPU
    assert isinstance(optimizers[0], torch.optim.Optimizer)
    return optimizers[0]


def _set(model: Any, name: str, tensor: Any) -> None:
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    (owner._parameters if last in owner._parameters else owner._buffers)[last] = tensor


def _shorten(module: Any, which: int) -> tuple[int, int]:
    """Leave out blocks of the module's only model; the number that it has, and that is left."""
    from lightning_nd.parallelize import roots

    models = roots.find_roots(module, 1)
    kinds = kinds_of(models[0]) if len(models) == 1 else []
    chosen = depths(kinds)
    if chosen is None:
        return len(kinds), len(kinds)
    cut(models[0], chosen[which])
    return len(kinds), chosen[which]


def _step(trainer: Any, module: Any, optimizer: Any, batch: Any, phase: Callable[..., None]) -> None:
    from contextlib import nullcontext

    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    micros = min(trainer.accumulate_grad_batches, 2)  # the others repeat the first
    for micro in range(micros):
        last = micro == micros - 1
        times = 1 if last else trainer.accumulate_grad_batches - 1
        with nullcontext() if last else strategy.block_backward_sync():
            phase("forward", times)
            strategy.ledger.discard()
            with plugin.train_step_context():
                output = module.training_step(batch, micro)
            loss: Tensor = output["loss"] if isinstance(output, dict) else output
            del output
            phase("backward", times)
            strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
            del loss
    phase("optimizer")
    module._window = None  # of `CausalLM`: sums to log
    strategy.grad_norm()
    if trainer.gradient_clip_val:
        plugin.clip_gradients(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm or "norm")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _batch(trainer: Any, module: Any, data: Any) -> tuple[Any, bool]:
    """A micro-batch of a data rank, and whether its rows are packs of documents."""
    import torch

    rows = getattr(data, "micro_batch_size", None)
    if isinstance(rows, int) and hasattr(data, "packing"):
        length = data.max_length or DEFAULT_LENGTH
        ids = torch.arange(rows * length).view(rows, length) % min(module.config.get_text_config().vocab_size, 1000)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if data.packing:
            return {**batch, "position_ids": torch.arange(length).expand(rows, length).clone()}, True
        # one row alone is never padded
        return (batch if rows == 1 else {**batch, "attention_mask": torch.ones_like(ids)}), False
    if data is not None:
        data.setup("fit")
    loader = trainer.fit_loop._data_source.dataloader()
    batch = next(iter(loader))
    return batch, isinstance(batch, dict) and "position_ids" in batch and "attention_mask" not in batch


def _on_rank(strategy: Any, batch: Any, fake: Any) -> tuple[Any, int]:
    import torch
    from lightning.fabric.utilities.apply_func import apply_to_collection

    if strategy._context is not None:
        batch = strategy._context.shard(batch)
    tokens = batch["input_ids"].numel() if isinstance(batch, dict) and "input_ids" in batch else 0
    batch = apply_to_collection(batch, torch.Tensor, fake.from_tensor)
    if strategy._context is not None:
        strategy._context.remember(batch)
    return batch, int(tokens)


def _tensors(batch: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [item for item in tree_leaves(batch) if isinstance(item, torch.Tensor)]


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


__all__ = ["DryRunLauncher", "dry_run"]
