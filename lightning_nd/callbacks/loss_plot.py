"""A picture of the loss, drawn from the logged metrics at the end of a fit."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override


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
    with open(metrics, newline="") as file:
        rows = list(csv.DictReader(file))
    train, val = (_series(rows, name) for name in ("train/loss", "val/loss"))
    if not train and not val:
        return None

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        smooth = len(train) >= 40
        axes.plot(steps, losses, color="tab:blue", alpha=0.35 if smooth else 1.0, linewidth=1.2, label="training")
        if smooth:
            axes.plot(steps, _smooth(losses), color="tab:blue", linewidth=2, label="training, smoothed")
    if val:
        steps, losses = zip(*val, strict=True)
        axes.plot(steps, losses, color="tab:orange", marker="o", linewidth=1.5, label="validation")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss per supervised token (nats)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=130)
    return picture


def _series(rows: list[dict[str, str]], name: str) -> list[tuple[int, float]]:
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
