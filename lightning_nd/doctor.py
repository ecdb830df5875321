"""What is wrong with a machine before a run finds out: versions, devices, links, disk."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from lightning_nd.mesh import AXES, ParallelDims

_MEGABYTE = 2**20
#: Bytes that one collective moves, and bytes of the file that is written.
_MESSAGE = {"cpu": 8 * _MEGABYTE, "cuda": 256 * _MEGABYTE}
_FILE = 64 * _MEGABYTE


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        state: ``"note"`` is worth a look, with ``"bad"`` a run will fail.
        about: what was looked at.
        words: what was found.
        remedy: what to do; empty if nothing.
    """

    state: Literal["ok", "note", "bad"]
    about: str
    words: str
    remedy: str = ""


def versions() -> Iterator[Finding]:
    """The packages that lightning-nd needs, against what its metadata asks for."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for line in requires("lightning-nd") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield Finding("bad", wanted.name, "is not installed", f"pip install '{wanted.name}{wanted.specifier}'")
            continue
        if wanted.specifier.contains(found, prereleases=True):
            yield Finding("ok", wanted.name, found)
        else:
            remedy = f"pip install '{wanted.name}{wanted.specifier}'"
            yield Finding("bad", wanted.name, f"{found}, needed is {wanted.specifier}", remedy)


def devices() -> Iterator[Finding]:
    """The accelerators that torch sees, and whether they reach each other; else the cores."""
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        words = f"no CUDA device; {cores} cores for processes on CPU"
        if driver:
            build = torch.version.cuda or "without CUDA"
            remedy = "install a CUDA build of torch that fits the driver (nvidia-smi shows its CUDA version)"
            yield Finding("bad", "devices", f"nvidia-smi is here, but torch ({build}) sees no device", remedy)
        else:
            yield Finding("ok", "devices", words)
        return
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        words = f"{found.name}, {total / 2**30:.0f} GiB, {free / total:.0%} free"
        taken = free < 0.9 * total
        remedy = "another process holds memory: see nvidia-smi" if taken else ""
        yield Finding("note" if taken else "ok", f"cuda:{index}", words, remedy)
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        pairs = ", ".join(f"{a}→{b}" for a, b in apart[:4])
        yield Finding(
            "note",
            "links",
            f"{len(apart)} pairs of devices do not reach each other directly ({pairs})",
            "keep tp inside devices that nvidia-smi topo -m shows as NV or PIX",
        )


def host() -> Iterator[Finding]:
    """The name of this machine, and the memory that data workers share."""
    name = socket.gethostname()
    try:
        yield Finding("ok", "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        remedy = "add it to /etc/hosts, or name the network: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding("bad", "host name", f"{name} has no address ({error})", remedy)
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < 1024 * _MEGABYTE:
        remedy = "in a container: --shm-size=8g (Docker) or a Memory emptyDir at /dev/shm (Kubernetes)"
        yield Finding("note", "/dev/shm", f"{free / _MEGABYTE:,.0f} MiB free: data workers may die", remedy)


def disk(folder: Path) -> Iterator[Finding]:
    """Room in the folder of the results, and how fast it takes a file."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(there).free
    try:
        with tempfile.NamedTemporaryFile(dir=there) as file:
            began = time.perf_counter()
            file.write(os.urandom(_FILE))
            file.flush()
            os.fsync(file.fileno())
            speed = _FILE / (time.perf_counter() - began) / 1e6
    except OSError as error:
        remedy = "choose another folder with --trainer.default_root_dir"
        yield Finding("bad", "disk", f"{there} cannot be written: {error.strerror}", remedy)
        return
    few = free < 20 * 2**30
    remedy = "a checkpoint takes 12 bytes a parameter with AdamW in float32" if few else ""
    words = f"{there}: {free / 2**30:,.0f} GiB free, writes {speed:,.0f} MB/s"
    yield Finding("note" if few else "ok", "disk", words, remedy)


def links(dims: ParallelDims, seconds: float = 60.0) -> Iterator[Finding]:
    """Start one process a rank, and measure an all-reduce over every axis that has more than one rank.

    Args:
        dims: the layout; all ranks on this machine.
        seconds: how long the processes may take.
    """
    device = "cuda" if torch.cuda.device_count() >= dims.world_size else "cpu"
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            _measure, (dims, device, backend, folder, seconds), dims.world_size, join=False, start_method="spawn"
        )
        deadline, failed = time.monotonic() + 2 * seconds, ""
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    failed = f"not done after {2 * seconds:.0f} s"
                    break
        except Exception as error:
            failed = str(error).strip().splitlines()[-1]
        for process in context.processes:
            process.kill()
        if failed:
            name = "NCCL_DEBUG=INFO" if backend == "nccl" else "GLOO_SOCKET_IFNAME=lo"
            yield Finding("bad", "process group", f"{dims.world_size} ranks over {backend}: {failed}", f"try {name}")
            return
        for axis, speed in torch.load(Path(folder, "speeds.pt")).items():
            words = f"{getattr(dims, axis)} ranks over {backend}: {speed / 1e9:.2f} GB/s a rank in an all-reduce"
            yield Finding("ok", f"axis {axis}", words)


def _measure(rank: int, dims: ParallelDims, device: str, backend: str, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=dims.world_size, timeout=timeout)
    axes = dims.build_meshes(device, timeout).axes
    speeds = {}
    for axis in AXES:
        size = getattr(dims, axis)
        if size == 1:
            continue
        group, tensor = axes.get_group(axis), torch.ones(_MESSAGE[device] // 4, device=device)
        dist.all_reduce(tensor, group=group)  # makes the connections
        _wait(device)
        began = time.perf_counter()
        for _ in range(3):
            dist.all_reduce(tensor, group=group)
        _wait(device)
        # what a rank sends in a ring: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)
        speeds[axis] = 3 * 2 * (size - 1) / size * _MESSAGE[device] / (time.perf_counter() - began)
    dist.barrier()
    if rank == 0:
        torch.save(speeds, Path(folder, "speeds.pt"))
    dist.destroy_process_group()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
