"""Training speed and memory against a hand-written torch loop and the frameworks that run here.

Same model, layout, optimizer and batches, in the same processes, in alternating rounds. A ratio is the median of the
rounds' ratios, each of neighbouring measurements, so that a machine that slows down meanwhile does not decide; the
range beside it says how far to trust it. CPU seconds of the processes are compared too: other work on the machine
hardly touches them. Memory is what a rank holds at most in a step beyond what it held before the model was made, each
contender in processes of its own.

    python benchmarks/speed.py                         # CPU, gloo, 4 processes
    python benchmarks/speed.py --device cuda           # one process per GPU
    python benchmarks/speed.py --layouts fsdp tp --rounds 5 --output build/speed

Contenders (`benchmarks/peers.py`): `parallelize_module` + `fully_shard` in a plain loop, transformers'
`DistributedConfig`, Lightning's own strategies, Accelerate. torchtitan has models of its own and starts on
accelerators only; it is not compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
LAYOUTS: dict[str, dict[str, int]] = {  # 0: the other ranks
    "ddp": {"dp_replicate": 0},
    "fsdp": {"dp_shard": 0},
    "hsdp": {"dp_replicate": 2, "dp_shard": 0},
    "tp": {"tp": 0},
    "tp×fsdp": {"dp_shard": 2, "tp": 0},
    "cp": {"cp": 0},
}
LAYOUTS |= {f"{name}, LoRA": LAYOUTS[name] for name in ("fsdp", "hsdp")}


def main() -> None:
    """Parse the options, start the ranks, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=0, help="default: 4 on CPU, the visible GPUs on CUDA")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="measured steps a round, after one that is not")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="rows per data rank")
    parser.add_argument("--output", type=Path, default=Path("build/speed"), help="folder of table, plot and figures")
    options = parser.parse_args()

    import torch

    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 4)
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    title = f"{device}, {ranks} ranks, torch {torch.__version__}; {options.rounds} alternating rounds"
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options)
        for layout in options.layouts:
            degrees = resolve(layout, ranks)
            if degrees is None:
                print(f"{layout}: left out on {ranks} ranks", file=sys.stderr)
                continue
            results[layout] = measure(layout, degrees, folder, ranks, options)
            print(f"{layout}: measured", file=sys.stderr, flush=True)
            write(results, title, options.output)
    print(f"\n{title}\n\n{table(results)}\n\n{options.output}/speed.md, speed.png, speed.json")


def write(results: dict[str, dict[str, Any]], title: str, folder: Path) -> None:
    """Table, plot and figures of what has been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"title": title, "command": " ".join(sys.argv), "layouts": results}
    (folder / "speed.json").write_text(json.dumps(figures, indent=1))
    (folder / "speed.md").write_text(f"{title}\n\n{table(results)}\n")
    draw(results, title, folder / "speed.png")


def resolve(layout: str, ranks: int) -> dict[str, int] | None:
    """Degrees of a layout for this number of ranks; None if they do not fit."""
    wanted = LAYOUTS[layout]
    fixed = 1
    for size in wanted.values():
        fixed *= size or 1
    rest = ranks // fixed
    if rest * fixed != ranks or rest < 2:
        return None
    return {axis: wanted.get(axis, 1) or rest for axis in AXES}


def make_model(folder: Path, options: argparse.Namespace) -> None:
    """Write a llama of the wanted size."""
    import torch
    from peers import VOCABULARY
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(layout: str, degrees: dict[str, int], folder: str, ranks: int, options: argparse.Namespace) -> Any:
    """Speed of all contenders in the same processes, then the memory of each in its own."""
    import torch

    def spawn(names: list[str], memory: bool) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            output = str(Path(scratch) / "out.json")
            given = (ranks, degrees, "LoRA" in layout, folder, output, names, memory, options)
            torch.multiprocessing.spawn(rank_main, given, nprocs=ranks)
            return json.loads(Path(output).read_text())

    from peers import CONTENDERS

    found = spawn(list(CONTENDERS), False)
    found["memory"] = {name: spawn([name], True)["memory"] for name in found["wall"]}
    return found


def rank_main(
    rank: int,
    ranks: int,
    degrees: dict[str, int],
    lora: bool,
    folder: str,
    output: str,
    names: list[str],
    memory: bool,
    options: argparse.Namespace,
) -> None:
    """Measure one layout on one rank; rank 0 writes tokens/s and CPU seconds by contender and round, or bytes."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist
    from peers import Job, usable
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(output + ".store", ranks), rank=rank, world_size=ranks)
    job = Job(folder, degrees, lora, options.device, options.batch, options.sequence, rank, ranks)
    before = peak(options.device)
    made = {name: usable(name, job) for name in names}
    runs = {name: run for name, run in made.items() if not isinstance(run, str)}
    found: dict[str, Any] = {"left_out": {name: why for name, why in made.items() if isinstance(why, str)}}
    if memory:
        for run in runs.values():
            run(1)
            peak(options.device)
            run(1)
        held: list[int] = [0] * ranks
        dist.all_gather_object(held, peak(options.device) - before)
        found["memory"] = max(held)
    else:
        found["wall"], found["cpu"] = alternate(job, runs, options)
    if rank == 0:
        Path(output).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def alternate(job: Any, runs: dict[str, Any], options: argparse.Namespace) -> tuple[Any, Any]:
    """Tokens/s, and CPU seconds a step of all ranks, of each contender in each round."""
    import torch
    import torch.distributed as dist

    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds):
        order = list(runs.items())
        for name, run in order if number % 2 else order[::-1]:
            dist.barrier()
            times = run(options.steps)
            wall[name].append(job.tokens / statistics.median(seconds for seconds, _ in times))
            used = torch.tensor(statistics.median(seconds for _, seconds in times), device=job.device)
            dist.all_reduce(used)
            cpu[name].append(float(used))
    return wall, cpu


def peak(device: str) -> int:
    """Most bytes held since the last call."""
    import torch

    if device == "cuda":
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    Path("/proc/self/clear_refs").write_text("5")
    return kib * 1024


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: for each layout and contender our speed, CPU seconds and memory as parts of theirs."""
    lines = [
        "| Layout | Against | Tokens/s, ours ÷ theirs | CPU seconds | Memory |",
        "|---|---|---|---|---|",
    ]
    for layout, found in results.items():
        for name, rates in found["wall"].items():
            if name == "ours":
                continue
            faster = ratios(found["wall"]["ours"], rates)
            spent = statistics.median(ratios(found["cpu"]["ours"], found["cpu"][name]))
            held = found["memory"]["ours"] / found["memory"][name]
            speed = f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})"
            lines.append(f"| {layout} | {name} | {speed} | {spent:.2f} | {held:.2f} |")
        for name, why in found["left_out"].items():
            lines.append(f"| {layout} | {name} | — {why} | | |")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Our tokens/s ÷ each contender's, with the range of the rounds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    names = ("torch", "transformers", "Lightning", "Accelerate")
    for place, name in enumerate(names):
        rows = [(i, found) for i, found in enumerate(results.values()) if name in found["wall"]]
        if not rows:
            continue
        each = [ratios(found["wall"]["ours"], found["wall"][name]) for _, found in rows]
        middle = [statistics.median(values) for values in each]
        spread = [
            [m - min(values) for m, values in zip(middle, each, strict=True)],
            [max(values) - m for m, values in zip(middle, each, strict=True)],
        ]
        where = [i + 0.16 * (place - 1.5) for i, _ in rows]
        axes.errorbar(where, middle, yerr=spread, fmt="o", capsize=3, label=name)
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel("tokens/s, ours ÷ theirs")
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False, ncols=4)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
