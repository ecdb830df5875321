"""What activation checkpointing, offload and compilation of blocks save in memory and cost in time.

    python benchmarks/activation_memory.py

One process on CPU, a llama in fp32. Memory is counted, not sampled: the bytes of live storages that a step has made
beyond weights, gradients and optimizer state, at the end of the forward pass and at its peak. Offloaded copies lie in
host memory and are not counted; on CPU, that is the same memory, and their copying takes the time that it takes there.
Times are medians of rounds in which every option takes its turn, over those without anything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "every 2nd block": {"activation_checkpointing": 2},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "none, offload": {"offload_activations": True},
    "full, offload": {"activation_checkpointing": "full", "offload_activations": True},
    "none, compile": {"compile": True},
    "full, compile": {"activation_checkpointing": "full", "compile": True},
}


def main() -> None:
    """Parse the options, run every kind, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()

    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_nd.loss import TokenLedger, install_loss
    from lightning_nd.mesh import ParallelDims
    from lightning_nd.parallelize import ParallelConfig, parallelize

    torch.set_num_threads(1)
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    meshes = ParallelDims().build_meshes("cpu")
    ids = torch.arange(options.length).view(1, -1) * 7 % 1000
    steps, memory = {}, {}
    for name in options.kinds:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4, use_cache=False,
        )  # fmt: skip
        model = parallelize(LlamaForCausalLM(config), ParallelConfig(meshes, **KINDS[name]))
        ledger = TokenLedger()
        install_loss(model, ledger, None)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        steps[name] = stepper(model, ids, optimizer, ledger)
        steps[name]()  # compiles, and makes the optimizer's state
        memory[name] = None if "compile" in name else count(model, ids, optimizer, ledger)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    first = options.kinds[0]
    print(f"{'':18s} {'kept after forward':>19s} {'peak':>14s} {'time':>20s}   over {first}")
    for name in steps:
        ratios = [a / b for a, b in zip(times[name], times[first], strict=True)]
        cells = ["not counted", "not counted"]
        if (found := memory[name]) is not None and (base := memory[first]) is not None:
            cells = [f"{f / 2**20:6.1f} MiB {f / b:4.2f}" for f, b in zip(found, base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:18s} {cells[0]:>19s} {cells[1]:>14s} {spread:>20s}")
    dist.destroy_process_group()


def stepper(model: Any, ids: Any, optimizer: Any, ledger: Any) -> Any:
    """One optimizer step."""

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        ledger.close_micro_batch()
        ledger.close_window()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def count(model: Any, ids: Any, optimizer: Any, ledger: Any) -> tuple[int, int]:
    """Bytes beyond what was there before: at the end of the forward pass, and at most until the backward pass ends."""
    from lightning_nd.planner.tracker import LiveStorages

    live = LiveStorages(None)
    with live:
        loss = model(input_ids=ids, labels=ids).loss
        kept = live.live
        loss.backward()
    peak = max(live.peaks.values())
    ledger.close_micro_batch()
    ledger.close_window()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return kept, peak


if __name__ == "__main__":
    main()
