"""Measures this machine: what the planner's hardware file says of a GPU, for the one that is here."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from lightning_nd.planner.hardware import GIB, GPU, read_gpus
from lightning_nd.planner.steptime import CONSTANTS

_HEADS, _HEAD_DIM = 16, 128


@dataclass(frozen=True)
class Effort:
    """How large and how often things are measured.

    Attributes:
        width: of the square matrix products.
        length: tokens of the attention call.
        copied: bytes of the copies.
        seconds: spent on each measurement, at least.
    """

    width: int
    length: int
    copied: int
    seconds: float


FULL = {"cuda": Effort(8192, 8192, 1 << 30, 1.0), "cpu": Effort(2048, 1024, 1 << 28, 1.0)}
QUICK = {"cuda": Effort(4096, 4096, 1 << 28, 0.2), "cpu": Effort(256, 128, 1 << 22, 0.02)}


@dataclass(frozen=True)
class Measured:
    """Rates of one device.

    Attributes:
        name: of the device, as the driver calls it.
        memory_gib: GiB.
        matmul_tflops: large bf16 product, in 10¹² operations a second.
        attention_tflops: causal bf16 attention forward, counted without what the mask hides.
        length: tokens of that call.
        hbm_gbs: 10⁹ bytes a second, read and written.
        link_gbs: 10⁹ bytes a second, one way and GPU, of an all-reduce over all devices; None with one device.
        devices: how many there are.
    """

    name: str
    memory_gib: float
    matmul_tflops: float
    attention_tflops: float
    length: int
    hbm_gbs: float
    link_gbs: float | None = None
    devices: int = 1


def calibrate(device: torch.device, *, quick: bool = False) -> Measured:
    """Measure matrix products, attention, copies and, between several CUDA devices, an all-reduce.

    Args:
        device: the kind that is measured.
        quick: smaller and shorter; to see that it works.
    """
    kind = device.type
    effort = (QUICK if quick else FULL)[kind]
    count = torch.cuda.device_count() if kind == "cuda" else 1
    return Measured(
        name=torch.cuda.get_device_name(device) if kind == "cuda" else _processor(),
        memory_gib=_memory(device) / GIB,
        matmul_tflops=_matmul(device, effort) / 1e12,
        attention_tflops=_attention(device, effort) / 1e12,
        length=effort.length,
        hbm_gbs=_copy(device, effort) / 1e9,
        link_gbs=_all_reduce(count, effort) / 1e9 if count > 1 else None,
        devices=count,
    )


def hardware_file(found: Measured, entry: str, base: GPU | None) -> str:
    """TOML for ``plan --gpu-file``: an entry of the package's corrected by what was measured, or a new one.

    Args:
        found: the measurements.
        entry: name of the entry.
        base: the entry that is corrected; None for a device that the package does not know.
    """
    peak = found.matmul_tflops if base is None else base.bf16_tflops
    # The planner takes shares of what is in the file: the file holds what gives the measured rates.
    reached = {
        "matmul_tflops": found.matmul_tflops,
        "hbm_gbs": found.hbm_gbs / CONSTANTS.traffic,
        "attention_share": _best_attention(found, peak),
    }
    lines = [
        f"# Measured by lightning-nd calibrate on {found.devices} × {found.name}, torch {torch.__version__}.",
        "# plan --gpu-file THIS_FILE --gpu " + entry,
        f"[{entry}]",
        f"memory_gib = {found.memory_gib:.1f}",
        *(f"{key} = {value:.4g}" for key, value in reached.items()),
    ]
    if found.link_gbs is not None:
        link = found.link_gbs / CONSTANTS.link
        lines += [f"link_gbs = {link:.4g}", f"pair_gbs = {link:.4g}"]
    if base is None:
        # a share of 1: the best rate was measured, not read in a data sheet
        lines += [f"bf16_tflops = {peak:.4g}", "matmul_share = 1.0"]
        lines += [] if found.link_gbs is not None else ["link_gbs = 10  # not measured: one device", "pair_gbs = 10"]
        lines += ["nic_gbs = 10  # not measured: give --inter-gbps"]
    lines.append(f'source = "calibrate, {time.strftime("%Y-%m-%d")}"')
    return "\n".join(lines) + "\n"


def known_as(name: str, memory_gib: float) -> GPU | None:
    """The package's entry for a device that a driver calls so; of several sizes, the nearest."""
    words = re.findall("[a-z0-9]+", name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    found = [gpu for gpu in read_gpus().values() if gpu.name.split("-")[0] in names]
    return min(found, key=lambda gpu: abs(gpu.memory_gib - memory_gib), default=None)


def _best_attention(found: Measured, peak: float) -> float:
    """What of the peak rate attention reaches over long sequences, by the planner's curves."""
    slowed = (1 + CONSTANTS.attention_length / found.length) * (1 + CONSTANTS.attention_head / _HEAD_DIM)
    return min(1.0, found.attention_tflops * slowed / peak)


def _rate(work: float, call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Work a second: the median of repeated calls, timed in groups that are long enough for the clock."""
    for _ in range(2):
        call()
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    group = max(1, int(0.02 / max(time.perf_counter() - began, 1e-6)))
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(group):
            call()
        _wait(device)
        found.append((time.perf_counter() - began) / group)
    return work / statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(device: torch.device, effort: Effort) -> float:
    n = effort.width
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return _rate(2.0 * n**3, lambda: a @ b, device, effort.seconds)


def _attention(device: torch.device, effort: Effort) -> float:
    shape = (1, _HEADS, effort.length, _HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    flops = 4.0 * _HEADS * _HEAD_DIM * effort.length * (effort.length + 1) / 2
    return _rate(flops, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, effort.seconds)


def _copy(device: torch.device, effort: Effort) -> float:
    source = torch.ones(effort.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(2.0 * effort.copied, lambda: target.copy_(source), device, effort.seconds)


def _all_reduce(devices: int, effort: Effort) -> float:
    """Bytes a second and device, one way, of an all-reduce over all devices of this machine."""
    import tempfile

    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_reduce, (devices, effort, folder), nprocs=devices)
        return float(open(f"{folder}/rate").read())


def _reduce(rank: int, devices: int, effort: Effort, folder: str) -> None:
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{folder}/store", rank=rank, world_size=devices)
    data = torch.ones(effort.copied // 2, dtype=torch.bfloat16, device=device)
    times = 20
    for _ in range(3):
        dist.all_reduce(data)
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(data)
    _wait(device)
    seconds = (time.perf_counter() - began) / times
    if rank == 0:
        with open(f"{folder}/rate", "w") as file:
            file.write(str(2 * (devices - 1) / devices * effort.copied / seconds))
    dist.destroy_process_group()


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _processor() -> str:
    import platform

    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
