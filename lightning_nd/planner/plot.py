"""A plan as a picture: memory against speed, and where the memory of the best settings goes."""

from __future__ import annotations

from pathlib import Path

from lightning_nd.planner.hardware import GIB, Cluster
from lightning_nd.planner.memory import CATEGORIES
from lightning_nd.planner.search import Candidate, Plan

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
_MARKERS = {"none": "o", "selective": "s", "full": "^"}


def pareto(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """Settings that no other beats in both speed and memory, by memory."""
    front: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.memory.reserved, -c.time.tokens_per_gpu)):
        if not front or c.time.tokens_per_gpu > front[-1].time.tokens_per_gpu * 1.0005:
            front.append(c)
    return front


def draw(plan: Plan, cluster: Cluster, title: str, path: Path, top: int = 8) -> None:
    """Write the picture; the ending of the path says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained", width_ratios=(1.1, 1))
    shown = plan.candidates
    degrees = sorted({c.setting.dims.tp for c in shown})
    colour = {tp: plt.get_cmap("viridis")(i / max(1, len(degrees) - 1)) for i, tp in enumerate(degrees)}
    kinds = sorted({str(c.setting.checkpointing) for c in shown}, key=str)
    for kind in kinds:
        for tp in degrees:
            part = [c for c in shown if c.setting.dims.tp == tp and str(c.setting.checkpointing) == kind]
            if part:
                left.scatter(
                    [c.memory.reserved / GIB for c in part],
                    [c.time.tokens_per_gpu for c in part],
                    s=26, alpha=0.7, color=colour[tp], marker=_MARKERS.get(kind, "D"), linewidths=0,
                )  # fmt: skip
    front = pareto(shown)
    left.step(
        [c.memory.reserved / GIB for c in front] + [cluster.gpu.memory_gib],
        [c.time.tokens_per_gpu for c in front] + [front[-1].time.tokens_per_gpu],
        where="post", color="black", linewidth=1.2, label="the best for its memory",
    )  # fmt: skip
    best = shown[0]
    left.annotate(
        "1", (best.memory.reserved / GIB, best.time.tokens_per_gpu), xytext=(5, 4), textcoords="offset points",
        fontweight="bold",
    )  # fmt: skip
    left.axvline(cluster.gpu.memory_gib, color="#c44e52", linestyle="--", linewidth=1.2, label=f"{cluster.gpu.name}")
    left.set_xlim(0, cluster.gpu.memory_gib * 1.05)
    slowest = min(c.time.tokens_per_gpu for c in front)
    left.set_ylim(min(0.45 * best.time.tokens_per_gpu, 0.95 * slowest), best.time.tokens_per_gpu * 1.04)
    left.set(xlabel="reserved memory, GiB", ylabel="tokens / s / GPU")
    left.set_title("Every setting that fits", fontsize=11)
    for tp in degrees:
        left.scatter([], [], color=colour[tp], s=26, label=f"tp {tp}")
    for kind in kinds:
        name = f"every {kind}" if kind.isdigit() else kind
        left.scatter([], [], color="0.4", s=26, marker=_MARKERS.get(kind, "D"), label=f"checkpointing {name}")
    left.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    _bars(right, shown[:top], cluster)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: object, candidates: tuple[Candidate, ...], cluster: Cluster) -> None:
    from typing import Any

    ax: Any = axes
    names = []
    for place, c in enumerate(candidates):
        start = 0.0
        for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
            size = c.memory.parts[category] / GIB
            ax.barh(place, size, left=start, color=colour, label=category if place == 0 else None, height=0.72)
            start += size
        rest = c.memory.reserved / GIB - start
        label = "fragments, context" if place == 0 else None
        ax.barh(place, rest, left=start, color="0.85", hatch="///", edgecolor="white", label=label, height=0.72)
        ax.text(1.02 * cluster.gpu.memory_gib, place, f"{c.time.tokens_per_gpu:,.0f}", va="center", fontsize=8)
        d = c.setting.dims
        kind = (
            c.setting.checkpointing if isinstance(c.setting.checkpointing, str) else f"every {c.setting.checkpointing}"
        )
        names.append(f"{place + 1}. dp {d.dp_replicate}×{d.dp_shard} cp {d.cp} tp {d.tp}\n"
                     f"{c.setting.micro_batch}×{c.setting.accumulation}, {kind}")  # fmt: skip
    ax.axvline(cluster.gpu.memory_gib, color="#c44e52", linestyle="--", linewidth=1.2)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.annotate("tokens/s/GPU", (1.0, 1.01), xycoords="axes fraction", ha="right", va="bottom", fontsize=8)
    ax.set_xlim(0, cluster.gpu.memory_gib * 1.17)
    ax.set_xlabel("memory of one rank at its worst moment, GiB")
    ax.set_title("Where the memory of the fastest goes", fontsize=11)
    ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
