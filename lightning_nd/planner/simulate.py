"""One rank's optimizer steps on fake tensors, for ``plan --verify``: the strategy's own code, counted.

`simulate` plays in processes of their own. Deep models are played at two small depths and extrapolated.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_nd.planner.child import in_children
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.play import Simulation, count, depths, extrapolate, kinds_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def simulate(
    config: PretrainedConfig, setting: Setting, work: Work, lora: Mapping[str, Any] | None = None
) -> Simulation:
    """Play one rank in a process of its own.

    Raises:
        Exception: what the run itself would have raised.
    """
    from lightning_nd.planner.facts import skeleton

    kinds = kinds_of(skeleton(config, _dtype()))
    found = None if os.environ.get("LIGHTNING_ND_PLAN_WHOLE") else depths(kinds)
    layers = [config.get_text_config().num_hidden_layers] if found is None else [found[1], found[0]]
    runs = in_children([(play_rank, (shortened(config, n), setting, work, lora)) for n in layers])
    if found is None:
        return runs[0]
    depth = config.get_text_config().num_hidden_layers
    return extrapolate(*(Simulation(**{**vars(run), "depth": depth}) for run in reversed(runs)))


def _dtype() -> Any:
    import torch

    return torch.bfloat16


def shortened(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The config of the model's first blocks."""
    made = copy.deepcopy(config)
    text: Any = made.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return made


def play_rank(
    config: PretrainedConfig,
    setting: Setting,
    work: Work,
    lora: Mapping[str, Any] | None = None,
    steps: int = 2,
    real: bool = False,
) -> Simulation:
    """Optimizer steps of rank 0 under the strategy's own code, in this process, which is a child.

    Args:
        config: of the model.
        setting: the layout.
        work: rows and precision.
        lora: fields of a `LoRA`.
        steps: the last one is counted.
        real: with tensors that have memory.
    """
    from contextlib import nullcontext

    import torch

    from lightning_nd.checkpoint.init import NoSource
    from lightning_nd.loss import LossOptions, TokenLedger, install_loss
    from lightning_nd.parallelize import ParallelConfig, ShardingOptions, parallelize, partial_gradients
    from lightning_nd.parallelize.context import ContextParallel
    from lightning_nd.parallelize.data import fsdp_modules
    from lightning_nd.planner.ask import build
    from lightning_nd.planner.patches import simulation
    from lightning_nd.recipes.lora import LoRA

    started = time.perf_counter()
    dims = setting.dims
    with simulation(dims.world_size, real=real) as fake:
        meshes = dims.build_meshes("cpu")
        model: Any = build(config, work.precision, None if lora is None else LoRA.of(dict(lora)), weights=True)
        model._nd_source = NoSource()
        context = None
        if dims.cp > 1:
            multiple = dims.tp if work.sequence_parallel else 1
            context = ContextParallel(meshes.cp.get_group(), multiple=multiple)
        options = ParallelConfig(
            meshes=meshes,
            sequence_parallel=work.sequence_parallel,
            activation_checkpointing=setting.checkpointing,
            context=context,
            sharding=ShardingOptions(_mixed(work), reshard_after_forward=setting.reshard),
        )
        ledger = TokenLedger()
        loss_options = LossOptions(chunk="auto" if work.chunked_loss else None, kernel="torch")
        with nullcontext() if fake is None else fake:
            parallelize(model, options)
            install_loss(model, ledger, meshes.loss.get_group(), sharded=dims.cp > 1, options=loss_options)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        ids = torch.zeros(setting.micro_batch, work.length, dtype=torch.long)
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        if context is not None:
            batch = context.shard(batch)
        if fake is not None:
            batch = {key: fake.from_tensor(v) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}
        if context is not None:
            context.remember(batch)
        units, partial = fsdp_modules(model), partial_gradients(model)
        micros = min(setting.accumulation, 2)

        def step(phase: Any) -> None:
            for micro in range(micros):
                last = micro == micros - 1
                for unit in units:
                    unit.set_requires_gradient_sync(last, recurse=False)
                times = 1 if last else setting.accumulation - 1
                phase("forward", times)
                loss = model(**batch, use_cache=False).loss
                phase("backward", times)
                loss.backward()
                del loss
                ledger.close_micro_batch()
            phase("optimizer")
            _finish(model, optimizer, partial, ledger, meshes)

        if real:  # what splitting the model left in cycles would be taken for a step's
            gc.collect()
        held = [*model.parameters(), *model.buffers(), *batch.values()]
        peaks, traffic = count(fake, meshes, held, step, steps)
    layers = config.get_text_config().num_hidden_layers
    return Simulation(peaks, traffic, time.perf_counter() - started, layers, layers)


def _finish(model: Any, optimizer: Any, partial: list[Any], ledger: Any, meshes: Any) -> None:
    from lightning_nd import gradients

    if partial:
        gradients.average_partial_gradients(partial, meshes.tp.get_group())
    ledger.close_window()
    parameters = list(model.parameters())
    gradients.clip_by_norm(parameters, 1.0, gradients.global_norm(parameters))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _mixed(work: Work) -> Any:
    from lightning_nd.precision import NDHalfPrecision, NDMixedPrecision, NDPrecision

    plugins: dict[str, Any] = {"bf16-mixed": NDMixedPrecision, "bf16-true": NDHalfPrecision, "32-true": NDPrecision}
    return plugins[work.precision].sharding
