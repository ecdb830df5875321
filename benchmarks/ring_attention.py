"""Compute time of context-parallel attention per rank against single-process attention ÷ cp.

    python benchmarks/ring_attention.py --cp 2 --tokens 16384 [--repeats 3] [--cases full packed window]

CPU: gloo processes with one thread each. What is compared is CPU seconds of the computing thread and of the whole
process (gloo's threads included), forward and backward, each the best of the repeats, which take turns. The
single-process run uses the same local kernel on the same documents and window, and runs on every rank at the same
time: cores that share caches and clocks are slower together, which has nothing to do with the algorithm.

CUDA (one GPU): one rank's share of kernels is run with every remote block already at hand, against the whole
sequence ÷ cp.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lightning_nd.attention.context import AttentionContext, context_parallel_attention
from lightning_nd.attention.function import Call, attend
from lightning_nd.attention.kernels import choose_kernel
from lightning_nd.attention.layout import Documents, choose_layout, contiguous, work
from lightning_nd.attention.plan import build_plan
from lightning_nd.attention.transport import Traffic

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def documents_of(case: str, tokens: int) -> tuple[Documents, int | None]:
    """Documents and window of a named case."""
    if case == "window":
        return ((0, tokens),), tokens // 8
    if case == "full":
        return ((0, tokens),), None
    random = torch.Generator().manual_seed(0)
    found, at = [], 0
    while at < tokens:  # log-normal lengths around 1/16 of the row
        size = int(torch.exp(torch.randn(1, generator=random)).item() * tokens / 16) + 8
        found.append((at, min(tokens, at + size)))
        at += size
    return tuple(found), None


def single(case: str, tokens: int, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Attention of the whole sequence in one process by the same local kernel."""
    documents, window = documents_of(case, tokens)
    plan = build_plan(contiguous(tokens, 1), documents, 0, window)
    kernel = choose_kernel(device, dtype, WIDTH, WIDTH)
    call = Call(plan, kernel, None, WIDTH**-0.5, None, False, Traffic())
    return lambda q, k, v: attend(q, k, v, None, call)


def draw(tokens: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, n, WIDTH, device=device, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def measure(run: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, float]:
    """CPU seconds of the computing thread and the process, forward + backward, and of the forward alone."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    out = run(q, k, v)
    forward = time.thread_time() - thread
    out.backward(tensors[3])
    return {
        "thread": time.thread_time() - thread,
        "process": time.process_time() - process,
        "forward": forward,
        "wall": time.perf_counter() - wall,
    }


def least(best: dict[str, float], taken: dict[str, float]) -> dict[str, float]:
    return {name: min(value, best.get(name, value)) for name, value in taken.items()}


def cpu(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, args.cp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.cp)
    device = torch.device("cpu")
    for case in args.cases:
        documents, window = documents_of(case, args.tokens)
        tensors = draw(args.tokens, "cpu", torch.float32)
        layout = choose_layout(args.tokens, documents, args.cp, windows=((window, 1),), layout=args.layout).layout
        pairs = work(layout, documents, window)
        context = AttentionContext(dist.group.WORLD, layout, documents, args.method)
        mine = [x[context.local_indices()] for x in tensors]

        def run(q: Tensor, k: Tensor, v: Tensor, context=context, window=window) -> Tensor:
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            return context_parallel_attention(*heads, context, window=window)[0].transpose(0, 1)

        whole = single(case, args.tokens, device, torch.float32)
        alone: dict[str, float] = {}
        taken: dict[str, float] = {}
        for _ in range(args.repeats):
            dist.barrier()
            alone = least(alone, measure(whole, tensors))
            dist.barrier()
            taken = least(taken, measure(run, mine))
        hidden, total = context.traffic.overlapped()
        rows: list = [None] * args.cp
        dist.all_gather_object(rows, (taken, alone, hidden, total, context.traffic.received / args.repeats))
        if rank == 0:
            ideal = {name: sum(a[name] for _, a, *_ in rows) / args.cp**2 for name in alone}
            ratio = {
                name: round(sum(t[name] for t, *_ in rows) / args.cp / ideal[name], 3)
                for name in ("thread", "process", "forward")
            }
            report = {
                "case": case,
                "tokens": args.tokens,
                "cp": args.cp,
                "layout": layout.name,
                "method": args.method,
                "single_s": round(ideal["thread"] * args.cp, 3),
                "mean_over_ideal": ratio,
                "worst_rank_over_ideal": round(max(t["thread"] for t, *_ in rows) / ideal["thread"], 3),
                "pairs_max_over_mean": round(float(pairs.max() / pairs.mean()), 3),
                "transfers_with_compute_before_their_wait": [sum(r[2] for r in rows), sum(r[3] for r in rows)],
                "MiB_received": round(max(r[4] for r in rows) / 2**20, 2),
            }
            print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def cuda(args: argparse.Namespace) -> None:
    """One rank's rectangles of every step, on random blocks, against the whole sequence ÷ cp."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    for case in args.cases:
        documents, window = documents_of(case, args.tokens)
        layout = choose_layout(args.tokens, documents, args.cp, windows=((window, 1),), layout=args.layout).layout
        plan = build_plan(layout, documents, 0, window)
        q, k, v, grad = draw(args.tokens, "cuda", dtype)
        kernel = choose_kernel(device, dtype, WIDTH, WIDTH)
        whole = single(case, args.tokens, device, dtype)

        def share(plan=plan, kernel=kernel, q=q, k=k, v=v, grad=grad) -> None:
            for step in plan.steps:
                for rect in step.rects:
                    rows, keys = slice(rect.q0, rect.q1), slice(rect.k0, rect.k1)
                    out, lse = kernel.forward(q[rows], k[keys], v[keys], rect, WIDTH**-0.5, None)
                    kernel.backward(grad[rows], q[rows], k[keys], v[keys], out, lse, rect, WIDTH**-0.5, None)

        def everything(whole=whole, q=q, k=k, v=v, grad=grad) -> None:
            a, b, c = (x.detach().requires_grad_() for x in (q, k, v))
            whole(a, b, c).backward(grad)

        times = []
        for run in (everything, share):
            run()
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(args.repeats):
                run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / args.repeats)
        print(
            json.dumps(
                {
                    "case": case,
                    "tokens": args.tokens,
                    "cp": args.cp,
                    "single_ms": round(times[0], 2),
                    "share_ms": round(times[1], 2),
                    "efficiency": round(times[0] / args.cp / times[1], 3),
                }
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--method", default="direct")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--cases", nargs="+", default=["full", "packed", "window"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.device == "cuda":
        cuda(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(cpu, (args, f"{folder}/rendezvous"), nprocs=args.cp)


if __name__ == "__main__":
    main()
