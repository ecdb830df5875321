"""Every legal layout and setting, what fits of them, and in which order they are fast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_nd.mesh import ParallelDims
from lightning_nd.planner.hardware import GIB, Cluster, read_gpus
from lightning_nd.planner.layout import Checkpointing, Setting, Work
from lightning_nd.planner.memory import Memory, memory
from lightning_nd.planner.model import ModelFacts
from lightning_nd.planner.steptime import CONSTANTS, Constants, StepTime, step_time

#: Why `fit` would refuse a layout; None if it would run it.
Refusal = Callable[[ParallelDims], str | None]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", 2, "full")


@dataclass(frozen=True)
class Candidate:
    """A setting that fits, with its prediction."""

    setting: Setting
    memory: Memory
    time: StepTime
    notes: tuple[str, ...] = ()


@dataclass
class Rejection:
    """A reason for which settings were not proposed.

    Attributes:
        reason: in words.
        count: settings.
        closest: what came closest, in words.
    """

    reason: str
    count: int = 0
    closest: str = ""
    shortfall: float = field(default=float("inf"), repr=False)


@dataclass(frozen=True)
class Plan:
    """Candidates, best first, and why the others are not among them."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    asked: int


@dataclass(frozen=True)
class Limits:
    """What the user has fixed.

    Attributes:
        micro_batch: rows of a micro-batch; None leaves it open.
        checkpointing: None tries all kinds.
        degrees: by axis.
    """

    micro_batch: int | None = None
    checkpointing: Checkpointing | None = None
    degrees: dict[str, int] = field(default_factory=dict)


def layouts(gpus: int) -> Iterator[ParallelDims]:
    """Every way to lay four axes over so many ranks."""
    for tp in _divisors(gpus):
        for cp in _divisors(gpus // tp):
            for shard in _divisors(gpus // tp // cp):
                yield ParallelDims(gpus // tp // cp // shard, shard, cp, tp)


def search(
    model: ModelFacts,
    work: Work,
    cluster: Cluster,
    refusal: Refusal,
    limits: Limits | None = None,
    constants: Constants = CONSTANTS,
) -> Plan:
    """Rank every setting that `fit` would run on this cluster and that fits into its memory; deterministic."""
    limits = limits or Limits()
    found: list[Candidate] = []
    rejected: dict[str, Rejection] = {}
    asked = 0
    for dims in layouts(cluster.gpus):
        if any(getattr(dims, axis) != degree for axis, degree in limits.degrees.items()):
            continue
        if (why := refusal(dims)) is not None:
            asked += 1
            _note_refusal(rejected, dims, why)
            continue
        batches = list(_batches(dims, work, limits))
        if not batches:
            asked += 1
            _note_batch(rejected, dims, work, limits)
        for checkpointing in (limits.checkpointing,) if limits.checkpointing is not None else CHECKPOINTING:
            for micro_batch, accumulation in batches:
                asked += 1
                setting = Setting(dims, micro_batch, accumulation, checkpointing)
                used = memory(model, setting, work)
                if used.reserved > cluster.gpu.memory_gib * GIB:
                    _note_memory(rejected, setting, used, cluster)
                    continue
                time = step_time(model, setting, work, cluster, constants)
                found.append(Candidate(setting, used, time, notes_on(model, setting, cluster)))
    found.sort(key=lambda c: (-round(c.time.tokens_per_gpu, 6), c.memory.live, str(c.setting)))
    return Plan(tuple(found), tuple(sorted(rejected.values(), key=lambda r: (-r.count, r.reason))), asked)


def notes_on(model: ModelFacts, setting: Setting, cluster: Cluster) -> tuple[str, ...]:
    """What is worth knowing about a layout that runs."""
    notes: list[str] = []
    dims = setting.dims
    if dims.tp > cluster.gpus_per_node:
        notes.append(f"tp={dims.tp} crosses nodes of {cluster.gpus_per_node} GPUs")
    elif dims.tp * dims.cp > cluster.gpus_per_node and dims.cp > 1:
        notes.append(f"cp={dims.cp} crosses nodes")
    grouped = sum(block.count * block.parameters.grouped for block in model.blocks)
    heads = max((block.parameters.groups for block in model.blocks), default=1)
    if dims.tp > 1 and grouped and heads % dims.tp:
        more = grouped * (1 - 1 / dims.tp)
        notes.append(
            f"KV heads {heads}, tp {dims.tp}: replicated, {more / 1e6:,.0f} M more parameters a tp group's rank"
        )
    if setting.accumulation > 1 and setting.shards * dims.dp_replicate > 1:
        whole = 4 * model.trainable.on(dims.tp) / GIB
        notes.append(f"accumulation keeps {whole:.1f} GiB of gradients that are not sharded")
    return tuple(notes)


def suggestions(
    model: ModelFacts, work: Work, cluster: Cluster, refusal: Refusal, limits: Limits | None = None
) -> list[str]:
    """What would make an impossible request possible: more GPUs, shorter rows, a larger GPU, checkpointing."""
    limits = limits or Limits()
    found: list[str] = []

    def fits(work: Work, cluster: Cluster, limits: Limits) -> bool:
        return bool(search(model, work, cluster, refusal, limits).candidates)

    gpus = cluster.gpus
    for _ in range(6):
        gpus *= 2
        if fits(replace(work, rows=_at_least(work.rows, gpus)), cluster.on(gpus), limits):
            found.append(f"{gpus} GPUs of this kind")
            break
    length = work.length
    while length > 512:
        length //= 2
        if fits(replace(work, length=length), cluster, limits):
            found.append(f"rows of {length:,} tokens instead of {work.length:,}")
            break
    if limits.checkpointing not in (None, "full") and fits(work, cluster, replace(limits, checkpointing="full")):
        found.append("--checkpointing full")
    if limits.micro_batch not in (None, 1) and fits(work, cluster, replace(limits, micro_batch=1)):
        found.append("--micro-batch 1")
    larger = sorted(read_gpus().values(), key=lambda gpu: gpu.memory_gib)
    for gpu in larger:
        if gpu.memory_gib > 1.02 * cluster.gpu.memory_gib and fits(work, replace(cluster, gpu=gpu), limits):
            found.append(f"{cluster.gpus} × {gpu.name}")
            break
    if work.precision == "bf16-mixed" and fits(replace(work, precision="bf16-true"), cluster, limits):
        found.append("--precision bf16-true (weights and optimizer state in bf16: small steps are rounded away)")
    return found


def _at_least(rows: int | None, gpus: int) -> int | None:
    return None if rows is None else max(rows, gpus)


def _batches(dims: ParallelDims, work: Work, limits: Limits) -> Iterator[tuple[int, int]]:
    if work.rows is None:
        for size in (limits.micro_batch,) if limits.micro_batch else _powers(64):
            yield size, 1
        return
    if work.rows % dims.data:
        return
    per_rank = work.rows // dims.data
    for size in (limits.micro_batch,) if limits.micro_batch else _powers(min(per_rank, 64)):
        if per_rank % size == 0:
            yield size, per_rank // size


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _note_refusal(rejected: dict[str, Rejection], dims: ParallelDims, why: str) -> None:
    """Refusals that differ in the degree only are one class."""
    entry = rejected.setdefault(why.replace(f"tp={dims.tp} ", "tp "), Rejection(why))
    entry.count += 1
    if (named := re.search(r"tp=(\d+(?:, \d+)*) ", entry.reason)) and str(dims.tp) not in named[1].split(", "):
        entry.reason = entry.reason.replace(named[0], f"tp={named[1]}, {dims.tp} ", 1)


def _note_batch(rejected: dict[str, Rejection], dims: ParallelDims, work: Work, limits: Limits) -> None:
    rows = work.rows or 0
    size = f" in micro-batches of {limits.micro_batch}" if limits.micro_batch else ""
    if dims.data > rows:
        reason = f"more data ranks than the {rows} rows of a step"
    else:
        reason = f"the {rows} rows of a step cannot be shared evenly by the data ranks{size}"
    entry = rejected.setdefault(reason, Rejection(reason))
    entry.count += 1
    if dims.data < entry.shortfall:
        entry.shortfall, entry.closest = dims.data, f"{dims.data} data ranks"


def _note_memory(rejected: dict[str, Rejection], setting: Setting, used: Memory, cluster: Cluster) -> None:
    state = sum(used.parts[part] for part in ("parameters", "optimizer"))
    dominant = max(used.parts, key=lambda part: used.parts[part])
    if state > 0.9 * cluster.gpu.memory_gib * GIB:
        reason = "weights and optimizer state alone do not fit"
    else:
        reason = f"out of memory, mostly {dominant}"
    entry = rejected.setdefault(reason, Rejection(reason))
    entry.count += 1
    if used.reserved < entry.shortfall:
        entry.shortfall = used.reserved
        entry.closest = f"{setting}: {used.reserved / GIB:.1f} of {cluster.gpu.memory_gib:g} GiB"


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
