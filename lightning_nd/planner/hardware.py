"""Accelerators and clusters: facts from a data file, which a user's file extends."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_nd.names import nearest

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One kind of accelerator; see ``hardware.toml`` for what each number means and where it comes from.

    Attributes:
        name: as in the file.
        memory_gib: GiB.
        bf16_tflops: dense peak, in 10¹² floating-point operations a second.
        matmul_tflops: best measured rate of a large bf16 product.
        hbm_gbs: 10⁹ bytes a second.
        link_gbs: 10⁹ bytes a second, one way, per GPU, inside a node.
        pair_gbs: the same between two GPUs of a node.
        nic_gbs: the same between nodes.
        matmul_share: of ``matmul_tflops``, what large products reach in training.
        attention_share: of ``bf16_tflops``, what attention over long sequences reaches.
        source: where the numbers come from.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    matmul_tflops: float
    hbm_gbs: float
    link_gbs: float
    pair_gbs: float
    nic_gbs: float
    matmul_share: float = 0.75
    attention_share: float = 0.35
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes.

    Attributes:
        gpu: what each of them is.
        gpus: how many there are.
        gpus_per_node: how many share a node's links.
        nic_gbs: 10⁹ bytes a second, one way, per GPU, between nodes.
    """

    gpu: GPU
    gpus: int
    gpus_per_node: int = 8
    nic_gbs: float = 50.0

    @property
    def nodes(self) -> int:
        """How many nodes the GPUs fill."""
        return -(-self.gpus // self.gpus_per_node)

    def on(self, gpus: int) -> Cluster:
        """The same machines, another number of GPUs."""
        return replace(self, gpus=gpus)


def read_gpus(extra: Path | None = None) -> dict[str, GPU]:
    """Every known accelerator by name.

    Args:
        extra: a TOML file of the same form; its entries add to the package's, or replace single numbers of them.

    Raises:
        ValueError: naming the entry and the key that is unknown, missing or no number.
    """
    table = tomllib.loads(files("lightning_nd.planner").joinpath("hardware.toml").read_text(encoding="utf-8"))
    if extra is not None:
        try:
            added = tomllib.loads(extra.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{extra}: this is not TOML: {error}.") from None
        for name, entry in added.items():
            if not isinstance(entry, Mapping):
                raise ValueError(f"{extra}: {name} stands outside a table; write [name-of-gpu] above the numbers.")
            table[name] = {**table.get(name, {}), **entry}
    return {name: _read(name, entry, extra) for name, entry in table.items()}


def find_gpu(name: str, extra: Path | None = None) -> GPU:
    """The accelerator of that name; a unique beginning of a name will do.

    Raises:
        ValueError: with the names that there are.
    """
    gpus = read_gpus(extra)
    wanted = name.lower().replace("_", "-")
    found = [gpu for gpu in gpus if gpu == wanted] or [gpu for gpu in gpus if gpu.startswith(wanted)]
    if len(found) == 1:
        return gpus[found[0]]
    what = f"several GPUs are called so: {', '.join(found)}." if found else nearest(wanted, list(gpus))
    known = "" if what.startswith("allowed") else f" Known: {', '.join(gpus)}"
    raise ValueError(f"--gpu {name}: {what}{known}; others go into a file given as --gpu-file.")


def _read(name: str, entry: Mapping[str, Any], extra: Path | None) -> GPU:
    where = f"{extra}: [{name}]" if extra is not None else f"[{name}]"
    known = {field.name: field for field in fields(GPU) if field.name != "name"}
    for key, value in entry.items():
        if key not in known:
            raise ValueError(f"{where}: there is no {key}: {nearest(key, list(known))}")
        if key != "source" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ValueError(f"{where}: {key} is {value!r}; it must be a positive number.")
    optional = ("matmul_share", "attention_share", "source")
    missing = [key for key in known if key not in entry and key not in optional]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing. See lightning_nd/planner/hardware.toml for units.")
    return GPU(name=name, **entry)
