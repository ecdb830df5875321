"""``lightning-nd doctor``: what is wrong here, in words, and what to do."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from lightning_nd import doctor
from lightning_nd.cli.keys import ConfigError
from lightning_nd.mesh import AXES, ParallelDims

USAGE = """usage: lightning-nd doctor [--tp N] [--dp-shard N] [--cp N] [--dp-replicate N] [--folder DIR]
                           [--config RECIPE.yaml]

Look at this machine before a run does: versions, devices and their links, host name, disk, and a process group over
the axes of a layout, with the speed of each. Every finding that matters says what to do. Exit code 1 if a run would
fail.

  --tp, --dp-shard, ...    ranks of the layout to try, all on this machine (dp_shard=2)
  --folder DIR             where results are to go (this folder)
  --config RECIPE.yaml     also train two steps of a recipe, on its own layout, leaving nothing behind
"""

_SIGNS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd doctor --help.")


def main_command(command: str, args: list[str]) -> int:
    """Print every finding as it is made; 1 if one is bad."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    for axis in AXES:
        parser.add_argument(f"--{axis.replace('_', '-')}", type=int)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--config", type=Path)
    given = parser.parse_args(args)
    degrees = {axis: value for axis in AXES if (value := getattr(given, axis)) is not None}
    dims = ParallelDims(**(degrees or {"dp_shard": 2}))
    bad = 0
    for finding in _findings(dims, given.folder, given.config):
        bad += finding.state == "bad"
        print(f"{_SIGNS[finding.state]}  {finding.about}: {finding.words}", flush=True)
        if finding.remedy:
            print(f"      → {finding.remedy}")
    print("\nNothing is wrong." if not bad else f"\n{bad} finding{'s' if bad > 1 else ''} would stop a run.")
    return int(bad > 0)


def _findings(dims: ParallelDims, folder: Path, config: Path | None) -> Iterator[doctor.Finding]:
    yield from doctor.versions()
    yield from doctor.devices()
    yield from doctor.host()
    yield from doctor.disk(folder)
    if dims.world_size > 1:
        yield from doctor.links(dims)
    if config is not None:
        yield two_steps(config)


def two_steps(config: Path) -> doctor.Finding:
    """Train two steps of a recipe in processes of its own; nothing is written."""
    if not config.is_file():
        raise ConfigError(f"--config {config}: there is no such file.")
    command = [sys.executable, "-m", "lightning_nd.cli", "fit", "--config", str(config), "--trainer.fast_dev_run", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return doctor.Finding("ok", "two steps", f"of {config} have run")
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
    return doctor.Finding("bad", "two steps", f"of {config} failed: {last.strip()}", f"run {' '.join(command[1:])}")
