"""Time and memory of the loss: chunk by chunk against all logits at once, as transformers computes it.

Head and loss alone, forward and backward, on random hidden states. Each way runs in a process of its own, in
alternating rounds. Time is the process's CPU time on CPU and synchronised wall time on CUDA, the median of the rounds;
memory is the peak of what the step holds above hidden states, weight and their gradients, which both ways have: of the
process's resident anonymous memory on CPU, of the allocator on CUDA.

    python benchmarks/loss.py                      # 32k and 128k, CPU
    python benchmarks/loss.py --device cuda --dtype bfloat16 --tokens 16384 --hidden 4096
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SOFT_CAP = 30.0


def main() -> None:
    """Parse the options, run the ways in child processes, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--supervised", type=float, default=1.0, help="part of the tokens that have a label")
    parser.add_argument("--soft-cap", action="store_true", help="logits through a soft cap, as in gemma2")
    parser.add_argument("--chunk", default="auto", help="tokens, or auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    print(f"{options.device} {options.dtype}, {options.tokens} tokens, {options.supervised:.0%} supervised, hidden"
          f" {options.hidden}; median of {options.rounds} rounds")  # fmt: skip
    columns = ("vocabulary", "plain s", "chunk s", "time ÷", "plain MB", "chunk MB", "memory ÷")
    print(" ".join(f"{name:>10s}" for name in columns))
    for vocabulary in options.vocabulary:
        rounds = [[child(way, vocabulary) for way in ("plain", "chunked")] for _ in range(options.rounds)]
        seconds = [statistics.median(r[i]["seconds"] for r in rounds) for i in range(2)]
        ratio = statistics.median(r[1]["seconds"] / r[0]["seconds"] for r in rounds)
        memory = [statistics.median(r[i]["megabytes"] for r in rounds) for i in range(2)]
        cells = (f"{vocabulary}", f"{seconds[0]:.2f}", f"{seconds[1]:.2f}", f"{ratio:.2f}", f"{memory[0]:.0f}",
                 f"{memory[1]:.0f}", f"{memory[1] / memory[0]:.3f}")  # fmt: skip
        print(" ".join(f"{cell:>10s}" for cell in cells))


def child(way: str, vocabulary: int) -> dict[str, float]:
    """One measurement in a fresh process."""
    arguments = sys.argv[1:]
    if "--vocabulary" in arguments:
        first = arguments.index("--vocabulary")
        last = next((i for i in range(first + 1, len(arguments)) if arguments[i].startswith("-")), len(arguments))
        del arguments[first:last]
    command = [sys.executable, __file__, *arguments, "--child", way, "--vocabulary", str(vocabulary)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step after a warm-up, and the megabytes that it holds at its peak."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    dtype, vocabulary = getattr(torch, options.dtype), options.vocabulary[0]
    device = torch.device(options.device)
    x = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, options.hidden, device=device) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (options.tokens,), device=device)
    targets[torch.rand(options.tokens, device=device) >= options.supervised] = -100

    def step() -> None:
        x.grad = weight.grad = None
        loss = (plain if way == "plain" else chunked)(x, weight, targets, options)
        loss.backward()

    small = torch.randn(8, options.hidden, device=device, dtype=dtype)
    torch.mm(small, small.t())  # libraries that are loaded at first use
    if device.type == "cuda":
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        held = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - start, "megabytes": (torch.cuda.max_memory_allocated() - held) / 1e6}
    with Peak() as peak:
        step()
    gradients = sum(t.numel() * t.element_size() for t in (x, weight))
    start = time.process_time()
    step()
    return {"seconds": time.process_time() - start, "megabytes": (peak.bytes - gradients) / 1e6}


def plain(x, weight, targets, options):  # type: ignore[no-untyped-def]
    """All logits at once: `transformers.loss.loss_utils.ForCausalLMLoss`."""
    import torch.nn.functional as F

    logits = F.linear(x, weight)
    if options.soft_cap:
        logits = (logits / SOFT_CAP).tanh() * SOFT_CAP
    return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum") / len(targets)


def chunked(x, weight, targets, options):  # type: ignore[no-untyped-def]
    """What `NDStrategy` does with the same head."""
    from lightning_nd.loss import LossOptions, nll_sum
    from lightning_nd.loss.pending import PendingLogits, Product

    chunk = "auto" if options.chunk == "auto" else int(options.chunk)
    logits = PendingLogits(((Product(x, weight, None), 1.0),))
    if options.soft_cap:
        logits = (logits / SOFT_CAP).tanh() * SOFT_CAP
    nll, _ = nll_sum(logits, targets, LossOptions(chunk=chunk))
    return nll / len(targets)


class Peak:
    """The peak of live storage on CPU while the block runs, in bytes above what was there before."""

    def __enter__(self) -> Peak:
        import torch

        self.bytes = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._profile.__exit__(*failure)  # type: ignore[arg-type]
        live = 0
        for event in self._profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                self.bytes = max(self.bytes, live)


_: Callable[[], None] = main
if __name__ == "__main__":
    main()
