"""Pictures of a run, drawn from its logged metrics."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

Rows = list[dict[str, str]]
_TRAIN, _VAL = "tab:blue", "tab:orange"


class LossPlot(Callback):
    """Writes ``loss.png`` beside ``metrics.csv``: training loss per optimizer step and the validation losses.

    Args:
        filename: name of the picture; its folder is the CSV logger's.
    """

    def __init__(self, filename: str = "loss.png") -> None:
        self.filename = filename
        self.path: Path | None = None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logger = next((item for item in trainer.loggers if isinstance(item, CSVLogger)), None)
        if logger is None or not trainer.is_global_zero:
            return
        logger.save()
        metrics = Path(logger.log_dir) / "metrics.csv"
        if metrics.is_file():
            self.path = plot_losses(metrics, Path(logger.log_dir) / self.filename)


def plot_losses(metrics: Path, picture: Path) -> Path | None:
    """Draw ``train/loss`` and ``val/loss`` of a metrics.csv; returns the picture's path, None without losses."""
    rows = read_metrics(metrics)
    if not _series(rows, "train/loss") and not _series(rows, "val/loss"):
        return None
    figure, (axes,) = _figure(1, height=4.2)
    _draw_losses(axes, rows)
    _finish(axes, "loss per supervised token (nats)")
    figure.savefig(picture, dpi=130)
    return picture


def plot_runs(runs: Mapping[str, Rows], picture: Path) -> list[str]:
    """Draw loss, gradient norm, learning rate, throughput and memory of one run, or of several over each other.

    Args:
        runs: rows of a ``metrics.csv`` by the name of the run.
        picture: the file to write; its ending is the format.

    Returns:
        What was drawn, by the titles of the panels; nothing is written where that is empty.
    """
    panels = [(title, names) for title, names in _panels(runs.values()) if names]
    if not panels:
        return []
    figure, all_axes = _figure(len(panels), height=2.6)
    for axes, (title, names) in zip(all_axes, panels, strict=True):
        for number, (run, rows) in enumerate(runs.items()):
            if len(runs) == 1 and "train/loss" in names:
                _draw_losses(axes, rows)
                continue
            for place, name in enumerate(names):
                series = _series(rows, name)
                if len(runs) > 1:
                    label = ", ".join([run] + [_label(name)] * (place > 0))
                    _draw(axes, series, f"C{number}", label, smooth=name != "lr", dashed=place % 2 > 0)
                else:
                    label = _label(name) if len(names) > 1 else ""
                    _draw(axes, series, f"C{place}", label, smooth=name != "lr")
        _finish(axes, title)
    figure.savefig(picture, dpi=130)
    return [title for title, _ in panels]


def read_metrics(path: Path) -> Rows:
    """The rows of a metrics.csv, by column."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _panels(runs: Any) -> list[tuple[str, list[str]]]:
    logged = {name for rows in runs for row in rows for name, value in row.items() if value}
    memory = sorted(name for name in logged if "memory" in name)
    named = (
        ("loss (nats)", ["train/loss", "val/loss"]),
        ("gradient norm", ["train/grad_norm"]),
        ("learning rate", ["lr"]),
        ("tokens per second", ["throughput/tokens_per_s"]),
        ("seconds per step", ["throughput/step_time_s"]),
        ("model FLOPs utilisation", ["throughput/mfu", "throughput/hfu"]),
        ("memory", memory),
    )
    return [(title, [name for name in names if name in logged]) for title, names in named]


def _figure(panels: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, height * panels), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(panels, 1, place) for place in range(1, panels + 1)]


def _draw_losses(axes: Any, rows: Rows) -> None:
    _draw(axes, _series(rows, "train/loss"), _TRAIN, "training")
    if val := _series(rows, "val/loss"):
        steps, losses = zip(*val, strict=True)
        axes.plot(steps, losses, color=_VAL, marker="o", linewidth=1.5, label="validation")


def _label(name: str) -> str:
    return "validation" if name == "val/loss" else name.rpartition("/")[2]


def _draw(
    axes: Any, series: list[tuple[int, float]], color: str, label: str, *, smooth: bool = True, dashed: bool = False
) -> None:
    """A line; where there are many points, its moving average and the points behind it."""
    if not series:
        return
    steps, values = zip(*series, strict=True)
    smooth, style = smooth and len(series) >= 40, "--" if dashed else "-"
    line = {"color": color, "marker": "o" if len(series) == 1 else None}
    if smooth:
        axes.plot(steps, values, style, alpha=0.3, linewidth=1, **line)
        axes.plot(steps, _smooth(values), style, linewidth=2, label=label and f"{label} (smoothed)", **line)
    else:
        axes.plot(steps, values, style, linewidth=1.4, label=label or None, **line)


def _finish(axes: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _series(rows: Rows, name: str) -> list[tuple[int, float]]:
    # the logger counts finished steps from 0
    return [(int(row["step"]) + 1, float(row[name])) for row in rows if row.get(name)]


def _smooth(values: tuple[float, ...]) -> list[float]:
    """Exponential moving average over about a twentieth of the run, without the bias towards the first value."""
    keep = 1 - 1 / max(2, len(values) / 20)
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out
