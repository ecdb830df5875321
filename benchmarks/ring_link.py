"""What transfers cost that hide behind attention: context parallelism over a link of a given speed.

Two processes, each on a node of its own (a network namespace), share a row; the cable between them is slowed down to a
number of Mbit/s. Told per rate: how long the bytes of one forward and backward pass take on the cable, and by how much
the passes got longer than over the cable at full speed. What is hidden is the difference. Needs root and iproute2.

    python benchmarks/ring_link.py [--tokens 16384] [--rates 2000 1000 500 250] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from two_nodes import Node, two_nodes

PORT = 29531


def limit(node: Node, rate: int | None) -> None:
    """Let a node send at most `rate` Mbit/s; None for as fast as it can."""
    command = ["ip", "netns", "exec", node.namespace, "tc", "qdisc"]
    subprocess.run([*command, "del", "dev", node.cable, "root"], capture_output=True)
    if rate:
        # a burst of about a millisecond, and room for a second of waiting data
        sizes = ["rate", f"{rate}mbit", "burst", f"{max(16, rate // 8)}kb", "latency", "1s"]
        subprocess.run([*command, "add", "dev", node.cable, "root", "tbf", *sizes], check=True)


def rank_main(rank: int, tokens: int, repeats: int, method: str, host: str, output: str) -> None:
    """Best wall seconds of forward and backward, and the bytes that this rank received."""
    import torch
    import torch.distributed as dist
    from ring_attention import draw

    from lightning_nd.attention.context import AttentionContext, context_parallel_attention
    from lightning_nd.attention.layout import choose_layout

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{PORT}", rank=rank, world_size=2)
    documents = ((0, tokens),)
    layout = choose_layout(tokens, documents, 2).layout
    context = AttentionContext(dist.group.WORLD, layout, documents, method)
    mine = [x[context.local_indices()] for x in draw(tokens, "cpu", torch.float32)]
    times, received = [], 0
    for number in range(repeats + 1):
        q, k, v = (x.clone().requires_grad_() for x in mine[:3])
        dist.barrier()
        start, before = time.perf_counter(), context.traffic.received
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = context_parallel_attention(*heads, context)[0].transpose(0, 1)
        out.backward(mine[3])
        if number:
            times.append(time.perf_counter() - start)
        received = context.traffic.received - before
    slowest = torch.tensor([min(times), float(received)])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(output).write_text(json.dumps({"seconds": float(slowest[0]), "bytes": float(slowest[1])}))
    dist.destroy_process_group()


def measure(rate: int | None, args: argparse.Namespace) -> dict[str, float]:
    """One pair of processes over a cable of this speed."""
    with two_nodes() as nodes, tempfile.TemporaryDirectory() as folder:
        for node in nodes:
            limit(node, rate)
        output = Path(folder) / "found.json"
        started = []
        for rank, node in enumerate(nodes):
            given = [str(rank), str(args.tokens), str(args.repeats), args.method, nodes[0].address, str(output)]
            command = [sys.executable, str(Path(__file__).resolve()), "--rank", *given]
            started.append(node.start(command, Path(folder), {"GLOO_SOCKET_IFNAME": node.cable}))
        for process in started:
            if process.wait(timeout=600):
                raise RuntimeError(Path(process.output).read_text())  # type: ignore[attr-defined]
        found: dict[str, float] = json.loads(output.read_text())
        return found


def main() -> None:
    """Measure each rate between two runs at full speed, and print what was hidden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rates", type=int, nargs="+", default=[2000, 1000, 500, 250], help="Mbit/s each way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--method", choices=("direct", "ring"), default="direct")
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, tokens, repeats, method, host, output = args.rank
        rank_main(int(rank), int(tokens), int(repeats), method, host, output)
        return
    free = [measure(None, args)]
    print(
        "| Mbit/s | MiB received | on the cable, s | passes, s | at full speed, s | hidden |\n|---|---|---|---|---|---|"
    )
    for rate in args.rates:
        slow = measure(rate, args)
        free.append(measure(None, args))
        fast = statistics.mean(run["seconds"] for run in free[-2:])
        cable = slow["bytes"] * 8 / (rate * 1e6)
        hidden = 1 - max(0.0, slow["seconds"] - fast) / cable
        print(
            f"| {rate} | {slow['bytes'] / 2**20:.1f} | {cable:.3f} | {slow['seconds']:.3f} | {fast:.3f} |"
            f" {hidden:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
