"""``lightning-nd checkpoint`` and ``lightning-nd export``: looking into checkpoints, and making folders of them."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd checkpoint ls PATH | verify PATH | diff PATH OTHER

Look into checkpoints of a run. PATH is a checkpoint, or a folder with checkpoints in it.

  ls PATH           step, layout it was saved on, size, and whether it is complete
  verify PATH       the same after comparing every byte with its checksum; exit code 1 if one is damaged
  diff PATH OTHER   names, shapes and values that differ; exit code 1 if some do
"""

EXPORT_USAGE = """usage: lightning-nd export --checkpoint PATH --output DIR [--dtype bf16] [--adapter | --merge] [...]

Write the model of a checkpoint as a Hugging Face folder, one tensor in memory at a time, and read it back. No process
is started and no GPU needed.

  --checkpoint PATH    a checkpoint of a fit
  --output DIR         where the folder goes; made if it does not exist
  --dtype NAME         fp32, bf16 or fp16; by default that of the model the run started from
  --adapter            of a LoRA run: the adapter alone (the default for LoRA)
  --merge              of a LoRA run: the whole model with the adapter added to its weights
  --base PATH          of a LoRA run: the model folder that the run started from; where it was by default
  --tokenizer PATH     folder or hub id of the tokenizer; that of the run by default
  --shard-size SIZE    of a safetensors file (5GB)
  --overwrite          replace DIR if it holds a model
"""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*[KMGT]I?B", re.IGNORECASE)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def main_command(command: str, args: list[str]) -> int:
    """List, check or compare checkpoints."""
    from lightning_nd.checkpoint import inspect

    if len(args) < 2 or args[0] not in ("ls", "verify", "diff") or len(args) != (3 if args[0] == "diff" else 2):
        raise ConfigError("Give ls PATH, verify PATH or diff PATH OTHER. See lightning-nd checkpoint --help.")
    action, *paths = args
    if action == "diff":
        first, second = (inspect.Contents.of(Path(path)) for path in paths)
        lines = inspect.differences(first, second)
        print("\n".join(lines) or "no difference")
        return int(bool(lines))
    rows, bad = [("step", "saved on", "saved at", "size", "state", "path")], []
    for path in inspect.find(Path(paths[0])):
        manifest, wrong = inspect.state_of(path, every_byte=action == "verify")
        good = "every byte as written" if action == "verify" else "complete"
        if manifest is not None and manifest.weights_only:
            good += ", weights only"
        size = f"{inspect.bytes_of(path) / 1e6:,.1f} MB"
        if manifest is None:
            rows.append(("-", "-", "-", size, "not complete", str(path)))
        else:
            layout = " × ".join(f"{axis}={n}" for axis, n in manifest.layout.items() if n > 1) or "one process"
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
            rows.append((str(manifest.step), layout, when, size, "DAMAGED" if wrong else good, str(path)))
        if wrong:
            bad += [text if text.startswith(str(path)) else f"{path}: {text}" for text in wrong]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if bad:
        sys.stdout.flush()
        print("\n" + "\n".join(bad), file=sys.stderr)
    return int(bool(bad) and action == "verify")


def export_command(command: str, args: list[str]) -> int:
    """Write the model of a checkpoint as a Hugging Face folder."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(_DTYPES))
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--adapter", action="store_true")
    kind.add_argument("--merge", action="store_true")
    parser.add_argument("--base")
    parser.add_argument("--tokenizer")
    parser.add_argument("--shard-size", default="5GB")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args(args)
    if (match := _SIZE.fullmatch(given.shard_size)) is None or float(match[1]) <= 0:
        raise ConfigError(f"--shard-size {given.shard_size}: give a size such as 5GB or 500MB.")
    import torch

    from lightning_nd.checkpoint.convert import export_checkpoint

    words = export_checkpoint(
        given.checkpoint,
        given.output,
        dtype=None if given.dtype is None else getattr(torch, _DTYPES[given.dtype]),
        adapter=True if given.adapter else False if given.merge else None,
        base=given.base,
        tokenizer=given.tokenizer,
        max_shard_size=given.shard_size,
        overwrite=given.overwrite,
    )
    print(words)
    return 0
