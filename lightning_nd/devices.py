"""Which of the visible devices is a rank's, and whose it is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import torch
from torch.distributed import Store


def tasks_per_node(environ: Mapping[str, str], nodes: int = 1) -> int:
    """Tasks that SLURM starts on each node; ``nodes`` if it does not say how many there are."""
    per_node = environ.get("SLURM_NTASKS_PER_NODE")
    nodes = int(environ.get("SLURM_NNODES", nodes))
    return int(per_node) if per_node else max(1, int(environ["SLURM_NTASKS"]) // nodes)


def sees_only_its_own(environ: Mapping[str, str]) -> bool:
    """Whether SLURM shows every task of a node one GPU (``--gpus-per-task=1``): its own, which is number 0 to all."""
    started = "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ
    return started and torch.cuda.device_count() == 1 and tasks_per_node(environ) > 1


def one_each(environ: Mapping[str, str], devices: list[torch.device]) -> list[torch.device]:
    """The devices of a node's ranks, given those that this process was told to use."""
    if [device.type for device in devices] == ["cuda"] and sees_only_its_own(environ):
        return devices * tasks_per_node(environ)
    return devices


def device_of(devices: list[torch.device], local_rank: int) -> torch.device:
    """The device of a local rank: an index into the visible ones, whatever their physical numbers.

    Raises:
        RuntimeError: if there is none for it.
    """
    if devices and devices[0].type == "cuda":  # under torchrun Lightning takes the number asked for on trust
        devices = [device for device in devices if (device.index or 0) < torch.cuda.device_count()]
    if local_rank >= len(devices):
        raise RuntimeError(
            f"NDStrategy: local rank {local_rank} has no device: {len(devices)} are visible here"
            f" ({', '.join(map(str, devices))}; CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}). Start"
            " one process a device, or let every process see all devices of its node."
        )
    return devices[local_rank]


def claim(store: Store, device: torch.device, rank: int) -> None:
    """Take a CUDA device for a rank; two ranks on one would wait for each other in their first collective.

    Raises:
        RuntimeError: if another rank has taken it.
    """
    if device.type != "cuda":
        return
    host, name = socket.gethostname(), torch.cuda.get_device_properties(device).uuid
    holder = store.compare_set(f"lightning_nd/device/{host}/{name}", "", str(rank)).decode()
    if holder != str(rank):
        raise RuntimeError(
            f"NDStrategy: ranks {holder} and {rank} on {host} share one device ({device}, {name};"
            f" CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}). Give each its own: under SLURM with"
            " --gpus-per-task=1, or let every task see all devices of its node (--gpus-per-node)."
        )
