"""Pictures of a layout and of what its plan computes and sends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_nd.attention.layout import Documents, Layout, work
from lightning_nd.attention.plan import Kind, Rect, build_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GRID = 720
_COLORS = ("#3a6ea5", "#d1783c", "#3f8f5f", "#a8485b", "#7a5ea8", "#8a7a3a", "#3a8f95", "#6b6b6b")


def draw_attention(
    path: str | Path,
    layout: Layout,
    documents: Documents,
    window: int | None = None,
    title: str | None = None,
) -> Path:
    """Draw who owns which tokens, the mask with the rank that computes each part, and the work and rows of each rank.

    Args:
        path: the file to write; its ending says the format (`.png`, `.svg`, `.pdf`).
        layout: the layout, of one row or several.
        documents: global bounds; the rest is padding.
        window: of sliding-window layers, None for full causal ones.
        title: a line above the picture.

    Returns:
        The path.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing global, and no display is needed

    figure = Figure(figsize=(11, 5.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_mask(left, layout, documents, window)
    halves = right.get_subplotspec().subgridspec(2, 1)
    right.remove()
    _draw_work(figure.add_subplot(halves[0]), layout, documents, window)
    _draw_rows(figure.add_subplot(halves[1]), layout, documents, window)
    load = work(layout, documents, window)
    said = f"{len(documents)} document{'s' if len(documents) != 1 else ''}"
    figure.suptitle(
        f"{title + ' — ' if title else ''}{layout.name} layout, cp={layout.cp}, {layout.tokens:,} tokens, {said}, "
        f"max/mean work {load.max() / max(load.mean(), 1):.2f}",
        fontsize=11,
    )
    path = Path(path)
    figure.savefig(path)
    return path


def _draw_mask(axes: Axes, layout: Layout, documents: Documents, window: int | None) -> None:
    """The S × S mask: hue by the rank that computes, pale where the keys come from another rank."""
    from matplotlib.colors import to_rgb

    size = min(_GRID, layout.tokens)
    image = np.ones((size, size, 3))
    scale = layout.tokens / size
    centre = (np.arange(size) + 0.5) * scale
    start = np.full(size, layout.tokens + 1.0)
    for a, b in documents:
        start[(centre >= a) & (centre < b)] = a
    owner = np.zeros(size, dtype=int)
    for rank, own in enumerate(layout.intervals):
        for a, b in own:
            owner[(centre >= a) & (centre < b)] = rank
    distance = centre[:, None] - centre[None]
    seen = (distance >= 0) & (centre[None] >= start[:, None])
    if window is not None:
        seen &= distance < max(window, scale)
    for rank in range(layout.cp):
        hue = np.asarray(to_rgb(_COLORS[rank % len(_COLORS)]))
        mine = seen & (owner == rank)[:, None]
        image[mine & (owner == rank)[None]] = hue
        image[mine & (owner != rank)[None]] = 0.45 * hue + 0.55
    axes.imshow(image, extent=(0, layout.tokens, layout.tokens, 0), interpolation="nearest")
    for rank, own in enumerate(layout.intervals):
        for a, b in own:
            axes.axhspan(a, b, xmin=-0.045, xmax=-0.01, color=_COLORS[rank % len(_COLORS)], clip_on=False)
    axes.set_xlabel("key (global token index)")
    axes.set_ylabel("query (bar: the rank that owns it)", labelpad=34)
    axes.yaxis.tick_right()
    axes.tick_params(labelsize=7)
    axes.set_title("dark: own keys; pale: keys from another rank", fontsize=9)


def _draw_work(axes: Axes, layout: Layout, documents: Documents, window: int | None) -> None:
    """Attended pairs of each rank, stacked by the step at which they are computed."""
    top = max(float(work(layout, documents, window).max()) / 1e6, 1e-6)
    for rank in range(layout.cp):
        plan, below = build_plan(layout, documents, rank, window), 0.0
        for s, step in enumerate(plan.steps):
            pairs = sum(_pairs(rect) for rect in step.rects) / 1e6
            color = _COLORS[step.source % len(_COLORS)]
            axes.bar(rank, pairs, bottom=below, color=color, edgecolor="white", linewidth=0.6, width=0.8)
            if pairs > 0.04 * top and s:
                axes.text(
                    rank, below + pairs / 2, str(step.source), ha="center", va="center", fontsize=6, color="white"
                )
            below += pairs
    axes.set_ylim(0, 1.06 * top)
    axes.set_xticks(range(layout.cp))
    axes.set_ylabel("million pairs", fontsize=8)
    axes.set_title("work of each rank, by the rank that the keys come from", fontsize=9)
    axes.tick_params(labelsize=7)


def _pairs(rect: Rect) -> float:
    """`Rect.pairs` without a loop over the rows of a band."""
    if rect.kind is not Kind.BAND:
        return rect.pairs
    i = np.arange(rect.q1 - rect.q0) + rect.offset
    return float((np.minimum(rect.k1 - rect.k0, i + 1) - np.maximum(0, i - rect.window + 1)).sum())


def _draw_rows(axes: Axes, layout: Layout, documents: Documents, window: int | None) -> None:
    """Key/value rows that travel, from column to row, as a share of one rank's rows."""
    sent = np.zeros((layout.cp, layout.cp))
    for rank in range(layout.cp):
        for step in build_plan(layout, documents, rank, window).steps[1:]:
            sent[rank, step.source] = sum(b - a for a, b in step.fetch) / layout.local_tokens
    axes.imshow(sent, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    if layout.cp <= 8:
        for i, j in np.argwhere(sent > 0):
            color = "white" if sent[i, j] > 0.5 else "black"
            axes.text(j, i, f"{100 * sent[i, j]:.0f}%", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(layout.cp))
    axes.set_yticks(range(layout.cp))
    axes.set_xlabel("rank that sends", fontsize=8)
    axes.set_ylabel("rank that receives", fontsize=8)
    axes.set_title("share of a rank's key/value rows that it sends (direct)", fontsize=9)
    axes.tick_params(labelsize=7)
