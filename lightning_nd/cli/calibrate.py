"""``lightning-nd calibrate``: what the devices of this machine reach, as a file for ``plan --gpu-file``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd calibrate [--output my_gpu.toml] [...]

Measure matrix products, attention and copies on this machine, and an all-reduce where it has several GPUs; a few
seconds. The file corrects the entry of this GPU in the package's table, or makes one, for

  lightning-nd plan --gpu-file my_gpu.toml --gpu NAME ...

  --output FILE           where it is written (my_gpu.toml)
  --name NAME             of the entry (that of the package's table; this-cpu or this-gpu where it has none)
  --device KIND           cuda or cpu (cuda where there is one)
  --quick                 small and short measurements: to see that it works, not to plan with
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd calibrate --help.")


def main_command(command: str, args: list[str]) -> int:
    """Measure, say what was found, and write the file."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("my_gpu.toml"))
    parser.add_argument("--name")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(args)
    if given.output.suffix != ".toml":
        raise ConfigError(f"--output {given.output}: plan --gpu-file reads TOML; the name must end in .toml.")
    if not given.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {given.output}: there is no folder {given.output.absolute().parent}.")
    import torch

    from lightning_nd.planner.calibrate import calibrate, hardware_file, known_as

    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here.")
    found = calibrate(torch.device(kind, 0) if kind == "cuda" else torch.device(kind), quick=given.quick)
    base = known_as(found.name, found.memory_gib) if kind == "cuda" else None
    entry = given.name or (base.name if base is not None else f"this-{'gpu' if kind == 'cuda' else kind}")
    attention = None if base is None else base.bf16_tflops * base.attention_share
    rows: list[tuple[str, float, float | None, str]] = [
        ("matrix products", found.matmul_tflops, None if base is None else base.matmul_tflops, "TFLOP/s bf16"),
        ("attention", found.attention_tflops, attention, "TFLOP/s forward"),
        ("memory", found.hbm_gbs, None if base is None else base.hbm_gbs, "GB/s read and written"),
    ]
    if found.link_gbs is not None:
        rows.append(("all-reduce", found.link_gbs, None if base is None else base.link_gbs, "GB/s a GPU, one way"))
    print(f"{found.devices} × {found.name}, {found.memory_gib:.1f} GiB")
    for what, value, known, unit in rows:
        beside = "" if known is None else f"  (the package's table: {known:,.4g})"
        print(f"  {what:16}{value:10,.4g} {unit}{beside}")
    given.output.write_text(hardware_file(found, entry, base), encoding="utf-8")
    print(f"Written: {given.output.absolute()}\n  lightning-nd plan --gpu-file {given.output} --gpu {entry} ...")
    return 0
