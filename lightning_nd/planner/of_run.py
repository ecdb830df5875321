"""What the planner knows of a run that has started: its setting, its memory, and what would take less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_nd.mesh import ParallelDims
from lightning_nd.planner.hardware import GIB, Cluster, find_gpu
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.memory import Memory, memory, reserved
from lightning_nd.planner.model import ModelFacts
from lightning_nd.planner.search import Refusal
from lightning_nd.planner.steptime import step_time

#: For comparing times where the table does not have the device; shares matter, and no seconds.
_ANY_GPU = "h100-80gb"


@dataclass(frozen=True)
class RunFacts:
    """A run in the planner's terms.

    Attributes:
        model: its facts.
        refusal: why `fit` would refuse a layout of it.
        setting, work: as it runs.
        ranks_per_node: devices of a node.
    """

    model: ModelFacts
    refusal: Refusal
    setting: Setting
    work: Work
    ranks_per_node: int

    @property
    def memory(self) -> Memory:
        """Predicted, of a rank."""
        return memory(self.model, self.setting, self.work)


def facts_of_run(module: Any, *, rows: int = 0, length: int = 0) -> RunFacts | None:
    """The run of a LightningModule; None where the planner cannot count it.

    It knows `CausalLM` with `ChatDataModule` under `NDStrategy`, without quantized weights.

    Args:
        module: attached to a Trainer.
        rows: of a micro-batch, in place of the data module's.
        length: tokens of a rank's row, in place of the longest that the data module allows.
    """
    from lightning_nd.planner.ask import ask
    from lightning_nd.strategy import NDStrategy

    trainer: Any = getattr(module, "_trainer", None)
    strategy = getattr(trainer, "strategy", None)
    data: Any = getattr(trainer, "datamodule", None)
    config: Any = getattr(module, "config", None)
    lora = getattr(module, "lora", None)
    known = config is not None and hasattr(module, "lora") and hasattr(data, "micro_batch_size")
    if not known or not isinstance(strategy, NDStrategy) or getattr(lora, "quantization", None) is not None:
        return None
    dims = strategy.dims
    length = length * dims.cp or data.max_length or getattr(config.get_text_config(), "max_position_embeddings", 0)
    if not length:
        return None
    setting = Setting(
        dims, rows or data.micro_batch_size, trainer.accumulate_grad_batches, strategy._activation_checkpointing,
        strategy._reshard_after_forward is not False,
    )  # fmt: skip
    precision: Any = trainer.precision or "32-true"
    work = Work(
        length, setting.rows, precision, compiled=strategy._compile, sequence_parallel=strategy._sequence_parallel
    )
    try:
        model, refusal = ask(config, "this model", precision, lora)
    except (ValueError, KeyError):
        return None  # a model that the planner cannot count
    return RunFacts(model, refusal, setting, work, max(1, trainer.num_devices))


def describe_memory(facts: RunFacts, total: float | None = None) -> str:
    """Where the memory of a rank goes, in one line.

    Args:
        facts: of the run.
        total: bytes of the device, if it is a GPU.
    """
    used = facts.memory
    parts = ", ".join(f"{name} {_size(size)}" for name, size in used.parts.items() if size >= 0.005 * used.live)
    words = f"{_size(used.live)} live in the {used.moment}: {parts}"
    if total is not None:
        words += f"; with the allocator's fragments about {_size(used.reserved)} of {_size(total)}"
    return words


@dataclass(frozen=True)
class Change:
    """Something else that would take less memory.

    Attributes:
        words: what to set.
        live: bytes then.
        slower: seconds a token, over those of now.
        same_rows: a step trains the same as before.
    """

    words: str
    live: float
    slower: float
    same_rows: bool = True


def cheaper(facts: RunFacts, most: int = 3, total: float | None = None) -> list[Change]:
    """Changes of one setting that take less memory: those that fit first, and of them those that cost the least time.

    What spares less than a twentieth is left out.

    Args:
        facts: of the run.
        most: how many.
        total: bytes of the device.
    """
    now = facts.memory.live
    spared = [change for change in _changes(facts) if change.live < 0.95 * now]

    def rank(change: Change) -> tuple[bool, float]:
        # a change that costs nothing and spares little is worth less than one that costs little and spares much
        cost = max(0.0, change.slower - 1) + (0.05 if change.same_rows else 0.3)
        return total is not None and reserved(change.live) > total, cost / (1 - change.live / now)

    return sorted(spared, key=rank)[:most]


def _changes(facts: RunFacts) -> Iterator[Change]:
    setting, work, dims = facts.setting, facts.work, facts.setting.dims

    tokens = setting.rows * work.length

    def change(words: str, setting: Setting, work: Work = work) -> Iterator[Change]:
        if facts.refusal(setting.dims) is None:
            slower = _per_token(facts, setting, work) / _per_token(facts, facts.setting, facts.work)
            yield Change(words, memory(facts.model, setting, work).live, slower, setting.rows * work.length == tokens)

    for kind in ("selective", "full"):
        if setting.checkpointing == "none" or (kind == "full" and setting.checkpointing != "full"):
            yield from change(f"nd.activation_checkpointing: {kind}", replace(setting, checkpointing=kind))
    if setting.micro_batch > 1:
        half = setting.micro_batch // 2
        more = setting.accumulation * setting.micro_batch // half
        yield from change(
            f"data.micro_batch_size: {half} and trainer.accumulate_grad_batches: {more}",
            replace(setting, micro_batch=half, accumulation=more),
        )
    if dims.dp_replicate > 1:
        sharded = ParallelDims(1, dims.dp_replicate * dims.dp_shard, dims.cp, dims.tp)
        yield from change(f"nd.dp_replicate: 1 and nd.dp_shard: {sharded.dp_shard}", replace(setting, dims=sharded))
    for axis in ("tp", "cp"):
        degree = 2 * getattr(dims, axis)
        if dims.dp_shard % 2 == 0 and (axis == "cp" or degree <= facts.ranks_per_node):
            other = replace(dims, **{axis: degree, "dp_shard": dims.dp_shard // 2})
            yield from change(
                f"nd.{axis}: {degree} and nd.dp_shard: {other.dp_shard}, with trainer.accumulate_grad_batches:"
                f" {2 * setting.accumulation}",
                replace(setting, dims=other, accumulation=2 * setting.accumulation),
            )
    if work.length > 1024:
        yield from change(f"data.max_length: {work.length // 2}", setting, replace(work, length=work.length // 2))
    wider = replace(dims, dp_shard=2 * dims.dp_shard)
    yield from change(f"twice the devices, nd.dp_shard: {wider.dp_shard}", replace(setting, dims=wider))


def _per_token(facts: RunFacts, setting: Setting, work: Work) -> float:
    """Seconds of a step on every rank, for a token."""
    gpu = find_gpu(_ANY_GPU)
    cluster = Cluster(gpu, setting.dims.world_size, facts.ranks_per_node, gpu.nic_gbs)
    work = replace(work, rows=setting.rows)
    seconds = step_time(facts.model, setting, work, cluster).total
    return seconds * setting.dims.world_size / (setting.rows * work.length)


def out_of_memory_words(module: Any, rows: int, length: int) -> list[str]:
    """What took the memory and what would take less, for a run that has run out of it; empty if it is not known.

    Args:
        module: the LightningModule.
        rows, length: of the micro-batch that was worked on.
    """
    facts = facts_of_run(module, rows=rows, length=length)
    if facts is None:
        return []
    device = getattr(module, "device", torch.device("cpu"))
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    lines = [f"By the plan of this micro-batch a rank holds {describe_memory(facts, total)}."]
    if changes := cheaper(facts, total=total):
        lines.append("Least costly, by the planner:")
        now = facts.memory.live
        for change in changes:
            cost = change.slower - 1
            time = "no more time" if cost < 0.005 else f"{cost:.0%} more time a token"
            fits = ", and fits" if total is not None and reserved(change.live) <= total else ""
            lines.append(f"  {change.words}: {_size(now - change.live)} less, {time}{fits}")
    return lines


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:.1f} MiB"
