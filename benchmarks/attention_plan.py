"""What planning context-parallel attention costs on the host: a new pack, and a layout that has been seen.

    python benchmarks/attention_plan.py [--cp 16] [--documents 500] [--tokens 131072] [--repeats 20]

Counted are the CPU milliseconds of everything that one rank does for a micro-batch: finding the documents, choosing the
layout and planning, for a model of full-attention layers and for one with full and sliding-window layers. Packs differ
in every repeat; the median is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from lightning_nd.attention.layout import choose_layout, move_rows
from lightning_nd.attention.plan import build_plan
from lightning_nd.parallelize.context import documents_of

MODELS = {"full": ((None, 32),), "full + window": ((None, 8), (4096, 24))}


def pack(tokens: int, documents: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of one row of log-normal documents."""
    random = np.random.default_rng(seed)
    share = random.lognormal(0.0, 1.0, documents)
    sizes = np.maximum(1, (share / share.sum() * (tokens - documents)).astype(int))
    sizes[-1] += tokens - sizes.sum()
    positions = torch.cat([torch.arange(n) for n in sizes.tolist()])[None]
    return {"input_ids": torch.zeros(1, tokens, dtype=torch.int64), "position_ids": positions}


def plan(batch: dict[str, torch.Tensor], cp: int, windows: tuple[tuple[int | None, int], ...]) -> tuple[int, int]:
    """What `shard_batch` and the first layers do; documents and kernel calls of the rank."""
    rows, length = batch["input_ids"].shape
    documents = documents_of(batch, rows, length)
    layout = choose_layout(length, documents, cp, rows=rows, windows=windows).layout
    moved = move_rows(documents, length, layout.length)
    calls = sum(build_plan(layout, moved, cp // 2, window).calls for window, _ in windows)
    return len(documents), calls


def milliseconds(batch: dict[str, torch.Tensor], cp: int, windows: tuple[tuple[int | None, int], ...]) -> float:
    start = time.thread_time()
    plan(batch, cp, windows)
    return 1e3 * (time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=16)
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, windows in MODELS.items():
        new, seen = [], []
        for seed in range(args.repeats + 1):
            batch = pack(args.tokens, args.documents, seed)
            new.append(milliseconds(batch, args.cp, windows))
            seen.append(milliseconds(batch, args.cp, windows))
        one = {"input_ids": torch.zeros(1, args.tokens, dtype=torch.int64)}
        fixed = [milliseconds(one, args.cp, windows) for _ in range(args.repeats + 1)]
        print(
            f"{name:14} new pack {statistics.median(new[1:]):6.2f} (best {min(new):.2f})   the same pack again"
            f" {statistics.median(seen):5.2f}   one document, a fixed length: first {fixed[0]:.2f},"
            f" then {statistics.median(fixed[1:]):.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
