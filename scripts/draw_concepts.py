"""Draw the pictures of docs/concepts.md from the layout code itself.

python scripts/draw_concepts.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from lightning_nd.attention.layout import zigzag
from lightning_nd.mesh import ParallelDims

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "concepts"
WEIGHTS, BATCH, SHARED = "#3f6fb5", "#d98324", "#4c9a6a"
INK, FAINT, PAPER = "#222222", "#d9dce1", "#ffffff"
SHORT = {"dp_replicate": "replica", "dp_shard": "shard", "cp": "cp", "tp": "tp"}
CELLS = 8  # of each side of a square
matplotlib.rcParams["font.size"] = 9


Cells = tuple[Collection[int], Collection[int]]


def held(dims: ParallelDims, rank: int) -> tuple[Cells, Cells]:
    """Cells (rows, columns) of the weights and of the batch that a rank keeps, of `CELLS` a side.

    Weights: rows are sharded over dp_shard × cp, columns split by tp. Batch: rows are dealt to the data ranks, columns
    are tokens, split by cp.
    """
    at = dims.coordinates(rank)
    shards, shard = dims.dp_shard * dims.cp, at["dp_shard"] * dims.cp + at["cp"]
    data = at["dp_replicate"] * dims.dp_shard + at["dp_shard"]
    weights = part(shards, shard), part(dims.tp, at["tp"])
    batch = part(dims.data, data), tokens(dims.cp, at["cp"])
    return weights, batch


def part(parts: int, which: int) -> range:
    """One of so many equal parts of a square's side."""
    size = CELLS // parts
    return range(which * size, (which + 1) * size)


def tokens(cp: int, which: int) -> set[int]:
    """The tokens of a row that a cp rank keeps, in the layout that balances one causal document."""
    return set(zigzag(CELLS, cp).indices(which).tolist()) if cp > 1 else set(range(CELLS))


def square(axes: Any, x: float, y: float, size: float, cells: Cells, color: str) -> None:
    """A grid with the cells that a rank keeps in color."""
    step = size / CELLS
    for row in range(CELLS):
        for column in range(CELLS):
            mine = row in cells[0] and column in cells[1]
            corner = (x + column * step, y + size - (row + 1) * step)
            face = color if mine else PAPER
            axes.add_patch(Rectangle(corner, step, step, facecolor=face, edgecolor=FAINT, linewidth=0.6))
    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=INK, linewidth=0.9))


def canvas(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of so many inches, with a unit for an inch."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def layout(path: Path, dims: ParallelDims, says: str, per_node: int | None = None) -> None:
    """What each rank keeps of the weights and of the batch."""
    ranks = dims.world_size
    columns = min(4, ranks)
    lines = -(-ranks // columns)
    wide, tall, size = 1.95, 1.5, 0.72
    figure, axes = canvas(columns * wide + 0.25, lines * tall + 1.0)
    top = lines * tall + 0.46
    for rank in range(ranks):
        x, y = 0.15 + rank % columns * wide, top - tall - rank // columns * tall + 0.16
        box = FancyBboxPatch(
            (x + 0.03, y - 0.08), wide - 0.12, tall - 0.16, boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="#f6f7f9", edgecolor=FAINT, linewidth=1,
        )  # fmt: skip
        axes.add_patch(box)
        weights, batch = held(dims, rank)
        where = ", ".join(f"{SHORT[a]} {i}" for a, i in dims.coordinates(rank).items() if getattr(dims, a) > 1)
        axes.text(x + 0.12, y + tall - 0.38, f"rank {rank}", weight="bold", color=INK, va="center")
        axes.text(x + wide - 0.16, y + tall - 0.38, where, color="#666666", va="center", ha="right", size=6.6)
        square(axes, x + 0.14, y + 0.2, size, weights, WEIGHTS)
        square(axes, x + 0.98, y + 0.2, size, batch, BATCH)
        axes.text(x + 0.14 + size / 2, y + 0.07, "weights", ha="center", va="center", size=7, color=WEIGHTS)
        axes.text(x + 0.98 + size / 2, y + 0.07, "rows × tokens", ha="center", va="center", size=7, color=BATCH)
    if per_node:
        for node in range(ranks // per_node):
            first = node * per_node
            low, high = top - tall - first // columns * tall + 0.02, tall - 0.04
            frame = Rectangle((0.1, low), columns * wide, high, fill=False, edgecolor="#9aa0a8", linestyle=(0, (4, 3)))
            axes.add_patch(frame)
            axes.text(0.3, low + high, f"node {node}", size=7, color="#666666", va="center",
                      bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5})  # fmt: skip
    axes.text(0.18, top + 0.3, str(compact(dims)), weight="bold", size=11, va="center", color=INK)
    axes.text(0.18, 0.2, says, size=8.5, va="center", color=INK)
    save(figure, path)


def compact(dims: ParallelDims) -> str:
    """The degrees above 1."""
    return " × ".join(f"{axis}={degree}" for axis, degree in dims.as_dict().items() if degree > 1)


def mesh(path: Path) -> None:
    """Sixteen ranks on two nodes, and who talks to whom over each axis."""
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    figure, axes = canvas(7.6, 4.3)
    where: dict[int, tuple[float, float]] = {}
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        where[rank] = (
            0.95 + at["dp_replicate"] * 3.75 + at["cp"] * 1.6 + at["tp"] * 0.72,
            2.85 - at["dp_shard"] * 1.35,
        )
    for node in range(2):
        axes.add_patch(
            Rectangle((0.42 + node * 3.75, 0.85), 3.35, 2.72, fill=False, edgecolor="#9aa0a8", linestyle=(0, (4, 3)))
        )
        axes.text(0.5 + node * 3.75, 3.62, f"node {node}", size=8, color="#666666", va="bottom")
    pairs: list[tuple[str, str, int, int, float]] = [
        ("tp", "#b5443f", 0, 1, 0.0), ("cp", SHARED, 0, 2, -0.35), ("dp_shard", WEIGHTS, 0, 4, 0.0),
        ("dp_replicate", "#7a5aa6", 4, 12, 0.28),
    ]  # fmt: skip
    for axis, color, _, _, bend in pairs:
        for rank in range(dims.world_size):
            at = dims.coordinates(rank)
            if at[axis]:
                continue
            step = {"tp": 1, "cp": 2, "dp_shard": 4, "dp_replicate": 8}[axis]
            if axis == "dp_replicate" and rank not in (4, 5, 6, 7):
                continue  # one line of them is enough
            arrow = FancyArrowPatch(
                where[rank], where[rank + step], arrowstyle="-", connectionstyle=f"arc3,rad={bend}", color=color,
                linewidth=3 if axis == "tp" else 1.6, shrinkA=9, shrinkB=9, alpha=0.75,
            )  # fmt: skip
            axes.add_patch(arrow)
    for rank, (x, y) in where.items():
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.19, y - 0.19), 0.38, 0.38, boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=PAPER, edgecolor=INK, zorder=5,
            )
        )  # fmt: skip
        axes.text(x, y, str(rank), ha="center", va="center", zorder=6)
    axes.text(0.42, 4.08, "dp_replicate=2 × dp_shard=2 × cp=2 × tp=2", weight="bold", size=11, va="center")
    legend = (
        ("tp", "#b5443f", "share every layer: neighbours"),
        ("cp", SHARED, "share every row"),
        ("dp_shard", WEIGHTS, "share the parameters"),
        ("dp_replicate", "#7a5aa6", "share gradients only: over nodes"),
    )
    for i, (axis, color, words) in enumerate(legend):
        x, y = 0.45 + (i % 2) * 3.6, 0.5 - (i // 2) * 0.28
        axes.plot([x, x + 0.3], [y, y], color=color, linewidth=3)
        axes.text(x + 0.4, y, f"{axis}: {words}", va="center", size=8.5)
    save(figure, path)


def box(axes: Any, x: float, y: float, width: float, words: str, color: str = "#f6f7f9", height: float = 0.56) -> None:
    """Words in a rounded box; (x, y) is its centre."""
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.09",
            facecolor=color, edgecolor="#9aa0a8", linewidth=1,
        )
    )  # fmt: skip
    axes.text(x, y, words, ha="center", va="center", size=8.4, color=INK, linespacing=1.25)


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], words: str = "") -> None:
    """An arrow with words in its middle."""
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=9, color="#555555", linewidth=1.1))
    if words:
        x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
        axes.text(x, y, words, ha="center", va="center", size=8, color=INK,
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2})  # fmt: skip


def choosing(path: Path) -> None:
    """When to take which axis."""
    figure, axes = canvas(7.6, 5.1)
    questions = (
        ("Do weights, gradients and Adam (16 bytes a\nparameter), with activations, fit one GPU?",
         "dp_replicate = GPUs", "replicas: one all-reduce a step"),
        ("Do they fit when sharded over\nthe GPUs of a node?",
         "dp_shard = GPUs of a node\ndp_replicate = nodes", "FSDP2, or HSDP over several nodes"),
        ("Does one row with its activations fit\na GPU (checkpointing is on)?",
         "dp_shard = all GPUs", "FSDP2 over nodes"),
        ("Is it the length of the row that\ndoes not fit?",
         "tp = 2 … 8, inside a node\ndp_shard = the rest",
         "no: layers are too wide, or a\nmicro-batch of 1 is too few rows"),
    )  # fmt: skip
    y = 4.7
    for i, (question, answer, why) in enumerate(questions):
        box(axes, 2.0, y, 3.5, question)
        last = i == len(questions) - 1
        arrow(axes, (3.78, y), (4.5, y), "no" if last else "yes")
        box(axes, 5.95, y + 0.08, 2.8, answer, "#e7eef8", 0.52 if "\n" in answer else 0.36)
        axes.text(5.95, y - (0.32 if "\n" in answer else 0.2), why, ha="center", va="center", size=7.4, color="#555555")
        arrow(axes, (2.0, y - 0.3), (2.0, y - 0.78), "yes" if last else "no")
        y -= 1.08
    box(axes, 2.0, y, 3.5, "cp = 2 … 16, and tp beside it where\nheads and a node allow both", "#e7eef8")
    axes.text(3.95, y, "then lightning-nd plan ranks\nwhat fits by predicted speed", size=8.4, va="center")
    save(figure, path)


def block(path: Path) -> None:
    """What tensor and sequence parallelism do inside a transformer block."""
    figure, axes = canvas(7.6, 2.75)
    stages = (
        ("norm", "tokens", 0.75, 0.8), ("q k v\ngate up", "columns", 2.45, 1.0),
        ("attention\nproduct", "heads", 3.8, 1.0), ("out\ndown", "rows", 5.15, 1.0),
        ("+ residual", "tokens", 6.85, 0.9),
    )  # fmt: skip
    for rank, y in ((0, 1.85), (1, 0.95)):
        axes.text(0.08, y, f"tp {rank}", size=8, color="#666666", va="center")
        for name, kind, x, width in stages:
            color = {"tokens": "#fbe9d3", "columns": "#dbe6f5", "heads": "#e3f0e7", "rows": "#dbe6f5"}[kind]
            box(axes, x, y, width, name, color, 0.6)
        for (_, _, x, width), (_, _, nx, nwidth) in pairwise(stages):
            arrow(axes, (x + width / 2 + 0.03, y), (nx - nwidth / 2 - 0.03, y))
    for x, name in ((1.55, "all-gather\nof tokens"), (6.02, "reduce-\nscatter")):
        axes.plot([x, x], [0.55, 2.3], color="#b5443f", linewidth=2, alpha=0.7)
        axes.text(x, 2.5, name, ha="center", va="center", size=8, color="#b5443f")
    for kind, x in (("half the tokens", 0.75), ("half the columns", 2.45), ("half the heads", 3.8),
                    ("half the rows", 5.15), ("half the tokens", 6.85)):  # fmt: skip
        axes.text(x, 0.3, kind, ha="center", va="center", size=7.6, color="#555555")
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Into a folder that is made, without a version in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor=PAPER, metadata={"Software": None})


PICTURES: dict[str, Callable[[Path], None]] = {
    "dp": lambda p: layout(p, ParallelDims(dp_replicate=4), "Everything but the rows is on every rank. "
                           "Once a step: all-reduce of the gradients."),
    "fsdp": lambda p: layout(p, ParallelDims(dp_shard=4), "A quarter of weights, gradients and optimizer state a rank. "
                             "Block by block: all-gather, reduce-scatter."),
    "tp": lambda p: layout(p, ParallelDims(tp=4), "Every layer is split; all four read the same rows. "
                           "Twice a block: all-gather and reduce-scatter of activations."),
    "cp": lambda p: layout(p, ParallelDims(cp=4), "All four read the same rows, each a quarter of the tokens (two "
                           "pieces, for even work). In attention: keys and values."),
    "hsdp": lambda p: layout(p, ParallelDims(dp_replicate=2, dp_shard=4), "Sharded inside a node, replicated over "
                             "nodes: only gradients cross between nodes, once a step.", per_node=4),
    "threed": lambda p: layout(p, ParallelDims(dp_shard=2, cp=2, tp=2), "Weights: 4 shards of half a layer each. "
                               "Rows: 2 data ranks, each row's tokens over 2 cp ranks, both tp ranks reading them."),
    "mesh": mesh,
    "block": block,
    "choosing": choosing,
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Draw all of them."""
    folder = Path(arguments[0]) if arguments else FOLDER
    for name, draw in PICTURES.items():
        draw(folder / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
