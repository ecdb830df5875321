"""``lightning-nd plot``: a run's numbers as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd plot RUN_DIR [RUN_DIR ...] [--output FILE]

Draw what a run has logged into its metrics.csv: loss, gradient norm, learning rate, throughput and memory over the
steps. Several runs are drawn over each other. A run that is still going on can be drawn too.

  RUN_DIR                 a run folder, or a metrics.csv
  --output FILE           .png, .svg or .pdf; RUN_DIR/plot.png, of several runs plot.png in this folder
"""

_ENDINGS = (".png", ".svg", ".pdf")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd plot --help.")


def main_command(command: str, args: list[str]) -> int:
    """Draw the runs and say what is in the picture."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(args)
    files = [_metrics(path) for path in given.runs]
    picture: Path = given.output or (files[0].parent if len(files) == 1 else Path()) / "plot.png"
    if picture.suffix not in _ENDINGS:
        raise ConfigError(f"--output {picture}: the file must end in {', '.join(_ENDINGS)}.")
    if not picture.absolute().parent.is_dir():
        raise ConfigError(f"--output {picture}: there is no folder {picture.absolute().parent}.")

    from lightning_nd.callbacks.loss_plot import plot_runs, read_metrics

    names = [path.name if path.is_dir() else str(path) for path in given.runs]
    if len(set(names)) < len(names):
        names = [str(path) for path in given.runs]
    drawn = plot_runs(dict(zip(names, map(read_metrics, files), strict=True)), picture)
    if not drawn:
        raise ConfigError(f"{', '.join(map(str, files))}: nothing that can be drawn has been logged yet.")
    print(f"Picture: {picture.absolute()}\n  {'; '.join(drawn)}")
    return 0


def _metrics(path: Path) -> Path:
    """The metrics.csv of a run folder."""
    if path.is_file():
        return path
    if (path / "metrics.csv").is_file():
        return path / "metrics.csv"
    if not path.exists():
        raise ConfigError(f"There is no {path.absolute()}.")
    below = sorted(path.rglob("metrics.csv"))
    hint = f" There is one in {', '.join(str(p.parent) for p in below[:5])}." if below else ""
    raise ConfigError(f"{path.absolute()} has no metrics.csv: it is no run folder, or nothing was logged.{hint}")
