"""Looking into checkpoints without a Trainer: lists, checks, differences, and reading single tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_nd.checkpoint.files import Reader
from lightning_nd.checkpoint.manifest import META, CheckpointError, Manifest, candidates, damage, read_manifest, sizes

_WEIGHTS = "state_dict."


@dataclass
class Contents:
    """The tensors of a checkpoint, read one at a time.

    Attributes:
        path: of the checkpoint.
        manifest: what it says of itself.
        shapes: shape and dtype of every tensor by name, optimizer state included where it is stored by name.
    """

    path: Path
    manifest: Manifest
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    _whole: Mapping[str, Tensor] | None = None
    _reader: Reader | None = None
    _stored: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, path: Path) -> Contents:
        """Read names and shapes.

        Raises:
            CheckpointError: not complete or not readable.
        """
        manifest = read_manifest(path)
        if path.is_file():
            whole = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
            shapes = {_WEIGHTS + name: (t.shape, t.dtype) for name, t in whole.items()}
            return cls(path, manifest, shapes, {_WEIGHTS + name: t for name, t in whole.items()})
        reader = Reader(path, set(manifest.files))
        metadata = reader.read_metadata()
        reader.storage_data = metadata.storage_data
        stored = {n: e for n, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
        shapes = {name: (entry.size, entry.properties.dtype) for name, entry in stored.items()}
        return cls(path, manifest, shapes, None, reader, stored)

    def weights(self, prefix: str = "") -> list[str]:
        """Names of the module's tensors that start with a prefix."""
        return [name[len(_WEIGHTS) :] for name in self.shapes if name.startswith(_WEIGHTS + prefix)]

    def read(self, name: str) -> Tensor:
        """A whole tensor, by its full name."""
        if self._whole is not None:
            return self._whole[name]
        assert self._stored is not None
        assert self._reader is not None
        entry = self._stored[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            view = whole
            for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                view = view.narrow(dim, start, length)
            view.copy_(self._chunk(name, chunk.offsets))
        return whole

    def weight(self, name: str) -> Tensor:
        """A whole tensor of the module."""
        return self.read(_WEIGHTS + name)

    def _chunk(self, name: str, offsets: torch.Size) -> Tensor:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        assert self._reader is not None
        place = self._reader.storage_data[MetadataIndex(name, offsets)]
        with (self.path / place.relative_path).open("rb") as file:
            part = self._reader._slice_file(file, place)
            tensor: Tensor = torch.load(part, map_location="cpu", weights_only=True)
        return tensor

    def rest(self) -> dict[str, Any]:
        """What is no tensor of module or optimizer: loops, schedules, hyperparameters.

        Raises:
            CheckpointError: it holds objects that could run code.
        """
        file = self.path if self.path.is_file() else self.path / META
        try:
            found: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read without running code from it: {error}") from error
        return found


def bytes_of(path: Path) -> int:
    """Bytes on disk."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def find(path: Path) -> list[Path]:
    """The checkpoint at a path, or those in a folder, the oldest first.

    Raises:
        CheckpointError: there are none.
    """
    if not path.exists():
        raise CheckpointError(f"There is no {path.absolute()}.")
    if path.is_file() or path.suffix == ".ckpt" or (path / META).is_file():
        return [path]
    folders = sorted({p.parent for p in path.rglob("*.ckpt") if ".ckpt" not in p.parent.name} | {path})
    found = candidates(folders)[::-1]
    if not found:
        raise CheckpointError(f"There are no checkpoints (*.ckpt) in {path.absolute()}.")
    return found


def state_of(path: Path, every_byte: bool) -> tuple[Manifest | None, list[str]]:
    """What a checkpoint says of itself, and what is wrong with it.

    Args:
        path: of the checkpoint.
        every_byte: compare checksums, not sizes only.
    """
    try:
        manifest = read_manifest(path)
        return manifest, damage(path, manifest) if every_byte else sizes(path, manifest)
    except CheckpointError as error:
        return None, [str(error)]


def differences(a: Contents, b: Contents) -> list[str]:
    """What differs between two checkpoints, tensor by tensor; empty if nothing does."""
    lines = []
    for what in ("step", "epoch", "layout", "world_size"):
        x, y = getattr(a.manifest, what), getattr(b.manifest, what)
        if x != y:
            lines.append(f"{what}: {_say(x)} | {_say(y)}")
    lines += [f"{name}: only in {a.path}" for name in a.shapes if name not in b.shapes]
    lines += [f"{name}: only in {b.path}" for name in b.shapes if name not in a.shapes]
    for name in (name for name in a.shapes if name in b.shapes):
        if a.shapes[name] != b.shapes[name]:
            (shape, dtype), (other, kind) = a.shapes[name], b.shapes[name]
            lines.append(f"{name}: {list(shape)} {dtype} | {list(other)} {kind}")
            continue
        x, y = a.read(name), b.read(name)
        if not torch.equal(x, y):
            apart = (x.double() - y.double()).abs().max().item()
            lines.append(f"{name}: differs by up to {apart:.3g} (values up to {x.double().abs().max().item():.3g})")
    return lines


def _say(value: Any) -> str:
    return " × ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
