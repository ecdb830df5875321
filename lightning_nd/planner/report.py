"""Plans as text and as JSON."""

from __future__ import annotations

import textwrap
from typing import Any

from lightning_nd.planner.hardware import GIB, Cluster
from lightning_nd.planner.layout import Setting, Work
from lightning_nd.planner.memory import CATEGORIES, reserved
from lightning_nd.planner.model import ModelFacts
from lightning_nd.planner.play import Simulation
from lightning_nd.planner.search import Candidate, Plan

_WIDTH = 118


def describe_request(model: ModelFacts, work: Work, cluster: Cluster) -> str:
    """What was asked, in two lines."""
    trained = model.trainable.total
    share = "" if trained == model.parameters.total else f", {trained / 1e6:,.1f} M of them trained"
    rows = f"{work.rows} rows ({work.rows * work.length:,} tokens) a step" if work.rows else "any number of rows a step"
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {min(cluster.gpus, cluster.gpus_per_node)}"
    return (
        f"{model.name}: {model.parameters.total / 1e9:,.3f} B parameters{share}; rows of {work.length:,} tokens,"
        f" {rows}, {work.precision}\n"
        f"{cluster.gpus} × {cluster.gpu.name} ({nodes}; {cluster.gpu.memory_gib:g} GiB,"
        f" {cluster.gpu.bf16_tflops:g} TFLOP/s bf16, {cluster.nic_gbs:g} GB/s a GPU between nodes)"
    )


def table(plan: Plan, cluster: Cluster, top: int) -> str:
    """The best settings, and why the others are not there."""
    head = ["", "dp", "cp", "tp", "batch", "ckpt", "live", "reserved", "step", "exposed", "tok/s/GPU", "MFU"]
    lines: list[list[str]] = []
    for place, c in enumerate(plan.candidates[:top], start=1):
        d, t = c.setting.dims, c.time
        checkpointing = c.setting.checkpointing
        lines.append([
            str(place), f"{d.dp_replicate}×{d.dp_shard}", str(d.cp), str(d.tp),
            f"{c.setting.micro_batch}×{c.setting.accumulation}",
            checkpointing if isinstance(checkpointing, str) else f"every {checkpointing}",
            f"{c.memory.live / GIB:.1f}", f"{c.memory.reserved / GIB:.1f}", seconds(t.total),
            f"{100 * sum(t.exposed.values()) / t.total:.0f}%", f"{t.tokens_per_gpu:,.0f}", f"{100 * t.mfu:.1f}%",
        ])  # fmt: skip
    text = columns([head, *lines])
    text += (
        "\ndp: replicas × shards; batch: rows × accumulation; memory in GiB; exposed: communication that nothing hides"
    )
    notes: dict[str, list[int]] = {}
    for place, c in enumerate(plan.candidates[:top], 1):
        for note in c.notes:
            notes.setdefault(note, []).append(place)
    if notes:
        text += "\n\n" + "\n".join(f"  {', '.join(map(str, places))}: {note}" for note, places in notes.items())
    text += f"\n\n{len(plan.candidates)} of {plan.asked} settings fit.{_rejections(plan)}"
    return text


def _rejections(plan: Plan) -> str:
    if not plan.rejected:
        return ""
    text = " Why not the others:"
    for rejection in plan.rejected:
        closest = f" (closest: {rejection.closest})" if rejection.closest else ""
        line = f"{rejection.count:6}  {rejection.reason}{closest}"
        text += "\n" + textwrap.fill(line, _WIDTH, subsequent_indent=" " * 8)
    return text


def explain(candidate: Candidate, model: ModelFacts, work: Work, cluster: Cluster) -> str:
    """Where the bytes and the milliseconds of a setting go."""
    m, t, s = candidate.memory, candidate.time, candidate.setting
    lines = [str(s), "", f"Memory of one rank, at its worst moment ({m.moment}):"]
    lines += bars([(name, m.parts[name] / GIB, f"{m.parts[name] / GIB:8.2f} GiB") for name in CATEGORIES])
    fits = "fits" if m.reserved <= cluster.gpu.memory_gib * GIB else "does not fit"
    lines += [
        f"  {'live':16}{m.live / GIB:8.2f} GiB",
        f"  {'reserved':16}{m.reserved / GIB:8.2f} GiB of {cluster.gpu.memory_gib:g}: it {fits}",
        "",
        "Live memory at the other moments:",
        *(f"  {name:26}{size / GIB:8.2f} GiB" for name, size in m.moments.items() if name != m.moment),
        "",
        f"Time of one step of {t.tokens:,.0f} tokens:",
    ]
    parts = [(name, value) for name, value in t.compute.items() if value]
    parts += [(f"waits for {axis}", value) for axis, value in t.exposed.items() if value]
    parts += [("waits for ranks", t.waiting)] if t.waiting else []
    lines += bars([(name, value, f"{1e3 * value:9.1f} ms  {100 * value / t.total:4.1f}%") for name, value in parts])
    lines += [
        f"  {'step':16}{1e3 * t.total:9.1f} ms",
        f"  {t.tokens_per_gpu:,.0f} tokens/s/GPU, {t.tokens_per_gpu * cluster.gpus:,.0f} in all;"
        f" MFU {100 * t.mfu:.1f}%",
        "",
        *batch_lines(s, work),
    ]
    lines += [f"Note: {note}." for note in candidate.notes]
    return "\n".join(lines)


def packed_rows(candidate: Candidate, work: Work) -> str:
    """What is counted of the masks of packed rows."""
    if candidate.setting.dims.cp > 1:
        return "Under cp attention goes document by document: packed rows need no mask."
    if work.documents is None:
        pairs = candidate.setting.micro_batch * work.length**2 / GIB
        return (
            "A row counts as one document. Packed rows make a mask under torch's own attention, which is not counted:\n"
            f"{pairs:.2g} GiB, and {2 * pairs:.2g} more for every block that is kept. --documents-mean N counts it;"
            " document_attention: true needs none."
        )
    return f"Rows are packs of documents of {work.documents:,} tokens; their masks are counted."


def verified(candidate: Candidate, simulation: Simulation) -> str:
    """What one simulated rank held and sent, beside what the plan says."""
    closed = candidate.memory.live
    lines = [
        f"Simulated one rank of {candidate.setting.dims.world_size} on fake tensors ({_played(simulation)}):",
        *_phases(simulation),
        f"  {'peak':16}{simulation.peak / GIB:8.2f} GiB; the plan says {closed / GIB:.2f}"
        f" ({100 * (closed / simulation.peak - 1):+.1f}%)",
        "",
        *_traffic(simulation),
    ]
    return "\n".join(lines)


def dry_run_report(simulation: Simulation, trainer: Any) -> str:
    """What a rank of a fit would hold and send."""
    dims, accumulate = trainer.strategy.dims, trainer.accumulate_grad_batches
    sizes = simulation.sizes
    share = "" if sizes["trained"] == sizes["parameters"] else f", {sizes['trained']:,.0f} of them trained"
    lines = [
        f"Dry run of one rank of {dims.world_size} ({dims}) on fake tensors: {_played(simulation)}.",
        f"{sizes['parameters']:,.0f} parameters{share}; this rank holds {sizes['local']:,.0f}.",
        (f"A micro-batch is {simulation.tokens:,} tokens on this rank" if simulation.tokens else "One batch is played")
        + (f", {accumulate} of them a step." if accumulate > 1 else "."),
        "",
        "Live memory of one rank, counted as on a GPU; the largest of each phase:",
        *_phases(simulation),
        f"  {'peak':16}{simulation.peak / GIB:8.2f} GiB live; about"
        f" {reserved(simulation.peak) / GIB:.1f} GiB with the allocator's fragments, CUDA and NCCL",
        "",
        *_traffic(simulation),
        "",
        "No error was met. Not seen: values, time, data files, kernels that only a GPU has.",
    ]
    return "\n".join(lines)


def _played(simulation: Simulation) -> str:
    part = f"{simulation.layers} of {simulation.depth} blocks played, the others extrapolated"
    what = part if simulation.layers < simulation.depth else "every block played"
    return f"{what}, {simulation.seconds:.0f} s"


def _phases(simulation: Simulation) -> list[str]:
    return bars([(name, size / GIB, f"{size / GIB:8.2f} GiB") for name, size in simulation.peaks.items()])


def _traffic(simulation: Simulation) -> list[str]:
    lines = ["Collectives of a step, and the bytes of their whole messages:"]
    for key, (calls, size) in sorted(simulation.traffic.items(), key=lambda item: -item[1][1]):
        axis, _, kind = key.partition(" ")
        lines.append(f"  {axis:14}{kind:16}{calls:8,.0f}  {size / GIB:10.3f} GiB")
    return lines if len(lines) > 1 else ["No collectives."]


def batch_lines(setting: Setting, work: Work) -> list[str]:
    """The arithmetic of the batch."""
    rows, data = setting.rows, setting.dims.data
    return [
        f"Batch: {setting.micro_batch} rows × {setting.accumulation} micro-batches × {data} data ranks = {rows} rows"
        f" = {rows * work.length:,} tokens a step.",
        f"An epoch of N rows takes N / {rows} steps. Against a recipe tuned with B rows a step, Adam's learning rate"
        f" scales with the root: lr × √({rows} / B) (Malladi et al. 2022).",
    ]


def bars(parts: list[tuple[str, float, str]]) -> list[str]:
    """Lines with a bar each."""
    most = max((value for _, value, _ in parts), default=0.0) or 1.0
    return [f"  {name:16}{text}  {'█' * round(30 * max(value, 0) / most)}" for name, value, text in parts]


def seconds(value: float) -> str:
    """With a unit that suits."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def columns(rows: list[list[str]]) -> str:
    """Right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_json(plan: Plan, model: ModelFacts, work: Work, cluster: Cluster, top: int) -> dict[str, Any]:
    """Plain values, bytes and seconds."""
    return {
        "model": {"name": model.name, "parameters": round(model.parameters.total),
                  "trainable": round(model.trainable.total)},
        "work": {"length": work.length, "rows": work.rows, "precision": work.precision},
        "cluster": {"gpu": cluster.gpu.name, "gpus": cluster.gpus, "gpus_per_node": cluster.gpus_per_node,
                    "nic_gbs": cluster.nic_gbs},
        "asked": plan.asked,
        "fit": len(plan.candidates),
        "candidates": [candidate_json(c) for c in plan.candidates[:top]],
        "rejected": [{"reason": r.reason, "count": r.count, "closest": r.closest} for r in plan.rejected],
    }  # fmt: skip


def candidate_json(c: Candidate) -> dict[str, Any]:
    """One setting with its prediction."""
    return {
        "dims": c.setting.dims.as_dict(),
        "micro_batch": c.setting.micro_batch,
        "accumulation": c.setting.accumulation,
        "checkpointing": c.setting.checkpointing,
        "memory": {"live": round(c.memory.live), "reserved": round(c.memory.reserved), "moment": c.memory.moment,
                   "parts": {k: round(v) for k, v in c.memory.parts.items()}},
        "time": {"step": c.time.total, "compute": c.time.compute, "exposed": c.time.exposed, "waiting": c.time.waiting},
        "tokens_per_second_per_gpu": c.time.tokens_per_gpu,
        "mfu": c.time.mfu,
        "notes": list(c.notes),
    }  # fmt: skip
