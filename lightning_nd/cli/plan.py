"""``lightning-nd plan``: which layout fits, how fast it is and why, without weights, GPUs or processes."""

from __future__ import annotations

import argparse
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NoReturn

from lightning_nd.attention.layout import LAYOUTS, Documents, LayoutChoice, choose_layout, move_rows
from lightning_nd.attention.plan import build_plan
from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd plan --model MODEL --gpus N --gpu KIND --seq-len N [...]
       lightning-nd plan --draw-attention FILE --cp N (--tokens N | --documents LENGTHS) [...]

Rank every layout and setting that fit would run and that fits into memory. Nothing is downloaded but the model's
configuration, and no process is started.

  --model MODEL           a model folder, a config.json or a hub id
  --gpus N                how many there are
  --gpu KIND              h100-80gb, a100-80gb, h200-141gb, b200-180gb, …: any other name lists them all
  --gpu-file FILE         a TOML file that adds GPUs or corrects numbers of known ones
  --gpus-per-node N       (8)
  --inter-gbps N          Gbit/s a GPU between nodes (the GPU's usual network)
  --seq-len N             tokens of a row
  --global-batch-tokens N tokens of an optimizer step: 4M (4 × 1024²), 512k, 65536; left out: one micro-batch a rank
  --documents-mean N      mean length of the documents packed into a row (one document a row)
  --lora [R]              pairs of rank R (16) beside frozen layers
  --precision P           bf16-mixed, bf16-true, 32-true
  --micro-batch N         rows; left out: all that fit
  --checkpointing KIND    none, full, selective, or n for every n-th block; left out: all
  --compile               blocks are compiled
  --dp-replicate, --dp-shard, --cp, --tp N    fix a degree
  --top N                 rows of the table (10)
  --explain LAYOUT        where bytes and milliseconds go: a place in the table, or
                          tp=2,cp=4,dp_shard=8[,dp_replicate=..,micro_batch=..,accumulation=..,checkpointing=..]
  --verify                run the best layout (LAYOUT with --explain) as one rank of its world on fake tensors, in a
                          process of its own: live memory by phase, bytes by axis, and every error of the real run
  --write FILE            a recipe of the best layout (of LAYOUT with --explain) that fit runs
  --plot FILE             memory against speed, and memory by category: .png, .svg or .pdf
  --json                  the table as JSON

Draw how context parallelism would split a sequence: who owns which tokens, who computes which part of the mask, and
what travels.

  --draw-attention FILE   the picture to write: .png, .svg or .pdf
  --cp N                  ranks that share the sequence
  --tokens N              one document of N tokens
  --documents LENGTHS     a pack: 4096,900x20,130 is one document of 4,096 tokens, twenty of 900, one of 130; or a file
                          of such lengths
  --window N              draw sliding-window layers of this window
  --layout NAME           auto, zigzag, chunks or contiguous
"""

_ENDINGS = (".png", ".svg", ".pdf")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd plan --help.")


_OF_THE_DRAWING = ("--draw-attention", "--tokens", "--documents", "--window", "--layout")


def main_command(command: str, args: list[str]) -> int:
    """Plan a run, or draw its attention."""
    if any(option.partition("=")[0] in _OF_THE_DRAWING for option in args):
        return _draw_attention(command, args)
    from lightning_nd.cli.planning import plan_command

    return plan_command(command, args)


def _draw_attention(command: str, args: list[str]) -> int:
    """Draw the plan of attention for the documents and the layout that the options name."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--draw-attention", metavar="FILE", type=Path, required=True)
    parser.add_argument("--cp", type=int, required=True)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--documents", metavar="LENGTHS")
    parser.add_argument("--window", type=int)
    parser.add_argument("--layout", choices=LAYOUTS, default="auto")
    given = parser.parse_args(args)
    for name in ("cp", "tokens", "window"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}: it must be 1 or more.")
    if (given.tokens is None) == (given.documents is None):
        raise ConfigError("Give either --tokens N, for one document, or --documents LENGTHS, for a pack.")
    if given.draw_attention.suffix not in _ENDINGS:
        raise ConfigError(f"--draw-attention {given.draw_attention}: the file must end in {', '.join(_ENDINGS)}.")
    if not given.draw_attention.absolute().parent.is_dir():
        raise ConfigError(f"--draw-attention {given.draw_attention}: there is no folder {given.draw_attention.parent}.")
    documents = ((0, given.tokens),) if given.documents is None else read_documents(given.documents)
    length = documents[-1][1]
    choice = choose_layout(length, documents, given.cp, windows=((given.window, 1),), layout=given.layout)
    _draw(given.draw_attention, choice, move_rows(documents, length, choice.layout.length), given.window)
    return 0


def read_documents(lengths: str) -> Documents:
    """Documents laid end to end, from ``"4096,900x20"`` or a file of such lengths.

    Raises:
        ConfigError: naming the part that is no length.
    """
    text = Path(lengths).read_text(encoding="utf-8") if Path(lengths).is_file() else lengths
    sizes: list[int] = []
    for part in text.replace(",", " ").split():
        size, _, times = part.partition("x")
        if not (size.isdigit() and (times or "1").isdigit() and int(size) and int(times or "1")):
            raise ConfigError(
                f"--documents: {part!r} is not a length. Write lengths like 4096,900x20 (twenty of 900), or name a"
                " file that exists."
            )
        sizes += [int(size)] * int(times or "1")
    if not sizes:
        raise ConfigError(f"--documents: there are no lengths in {lengths!r}.")
    return tuple(pairwise(accumulate(sizes, initial=0)))


def _draw(path: Path, choice: LayoutChoice, documents: Documents, window: int | None) -> None:
    from lightning_nd.attention.draw import draw_attention

    layout = choice.layout
    draw_attention(path, layout, documents, window)
    print(f"{layout.name} layout: {choice.reason}.")
    print(f"{'rank':>4}  {'million pairs':>13}  {'rows fetched':>12}  {'kernel calls':>12}")
    for rank in range(layout.cp):
        plan = build_plan(layout, documents, rank, window)
        print(f"{rank:>4}  {plan.pairs / 1e6:>13,.2f}  {plan.fetched_rows:>12,}  {plan.calls:>12,}")
    print(f"Picture: {path.absolute()}")
