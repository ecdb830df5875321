"""What a checkpoint says of itself, whether it is whole, and which one is the last.

A sharded checkpoint is a folder: the files of torch.distributed.checkpoint, Lightning's ``meta.pt``, and
``manifest.json``, which is written last and lists every file with its size and checksum. A one-file checkpoint is the
archive that `torch.save` writes, which has a checksum for each of its records; what it says of itself is inside.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

#: Of what is written; what is newer is refused, what is older is read. 2: the manifest has a checksum of its own.
FORMAT = 2
MANIFEST = "manifest.json"
META = "meta.pt"
#: The key of a one-file checkpoint, and of ``meta.pt``, under which this package keeps its own.
OURS = "lightning_nd"
_SELF = "sha256"
_CHUNK = 8 << 20


class CheckpointError(RuntimeError):
    """A checkpoint that is incomplete, damaged, or does not fit; the message names it and what to do."""


@dataclass
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: optimizer steps done.
        epoch: of the Trainer.
        layout: degree of every axis of the run that saved it.
        world_size: number of ranks of that run.
        saved_at: seconds since 1970.
        models: class and configuration of each model, by its name in the LightningModule.
        recipe: what else a resumed run must agree on (optimizers, schedulers, tokenizer), and what it should.
        weights_only: without optimizer, loops and random states.
        files: size in bytes and SHA-256 of every file; of sharded checkpoints only.
        format: version of this format.
    """

    step: int
    epoch: int
    layout: dict[str, int]
    world_size: int
    saved_at: float
    models: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    weights_only: bool = False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and `torch.save`, with their checksum."""
        values = {**json.loads(json.dumps(asdict(self))), "format": FORMAT}  # as it is read again
        return {**values, _SELF: _checksum(values)}

    @classmethod
    def parse(cls, path: Path, values: Any) -> Manifest:
        """Check what was read from a checkpoint.

        Raises:
            CheckpointError: not a manifest, of a newer format, or with names of files that are not plain names.
        """
        if not isinstance(values, dict) or not isinstance(values.get("format"), int):
            raise CheckpointError(f"{path}: what it says of itself cannot be read; it was not written by lightning-nd.")
        if values["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {values['format']}; this lightning-nd reads formats up to {FORMAT}."
                " Update lightning-nd to load it."
            )
        if (values["format"] > 1 or _SELF in values) and values.get(_SELF) != _checksum(values):
            raise CheckpointError(f"{path} is damaged: {MANIFEST} is not as it was written (its checksum differs).")
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        try:
            manifest = cls(**known)
            for name, entry in manifest.files.items():
                _check_name(path, name)
                int(entry["size"]), str(entry["sha256"])
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: what it says of itself cannot be read ({error}).") from error
        return manifest


def _checksum(values: dict[str, Any]) -> str:
    """The SHA-256 of a manifest without its checksum, however it is laid out as text."""
    plain = {name: value for name, value in values.items() if name != _SELF}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _check_name(path: Path, name: str) -> None:
    if not name or name in (".", "..") or any(mark in name for mark in ("/", "\\", "\0")):
        raise CheckpointError(f"{path}: its manifest names the file {name!r}, which is not inside it. It is not read.")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` so that it is there as a whole or not at all."""
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(manifest.as_dict(), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last beyond a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself, without reading its tensors.

    Raises:
        CheckpointError: it is not complete, or not readable; see `Manifest.parse`.
    """
    if path.is_dir():
        try:
            values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} has no {MANIFEST}: it was not completed, or not written by lightning-nd."
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / MANIFEST} cannot be read ({error}).") from error
        return Manifest.parse(path, values)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    try:
        values = torch.load(path, map_location="cpu", mmap=True, weights_only=True).get(OURS)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({_first_line(error)}).") from error
    if values is None:
        raise CheckpointError(f"{path} was not written by lightning-nd.")
    return Manifest.parse(path, values["manifest"])


def damage(path: Path, manifest: Manifest | None = None, *, only: slice | None = None) -> list[str]:
    """What is wrong with the bytes of a checkpoint: nothing, if it is as it was written.

    Args:
        path: of the checkpoint.
        manifest: of a sharded one, if it has been read.
        only: which of its files to look at, in the order of their names, where several ranks share the work.

    Raises:
        CheckpointError: it is not complete; see `read_manifest`.
    """
    if path.is_file():
        return [] if only is not None and only.start else _archive_damage(path)
    manifest = manifest or read_manifest(path)
    names = sorted(manifest.files)[only or slice(None)]
    found = sizes(path, manifest, names)
    for name in names:
        if not found and sha256(path / name) != manifest.files[name]["sha256"]:
            found.append(f"{name} is not as it was written (its checksum differs)")
    return found


def sizes(path: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """Files of a sharded checkpoint that are missing, of another size, or links to the outside."""
    found = []
    for name in sorted(manifest.files) if names is None else names:
        entry, file = manifest.files[name], path / name
        if file.is_symlink() and file.resolve().parent != path.resolve():
            found.append(f"{name} is a link to {file.resolve()}, outside the checkpoint")
        elif not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != entry["size"]:
            found.append(f"{name} has {file.stat().st_size:,} bytes, not {entry['size']:,}")
    return found


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _archive_damage(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return [f"it is cut off or damaged ({_first_line(error)})"]
    return [f"its record {bad} is not as it was written (its checksum differs)"] if bad else []


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def candidates(folders: Iterable[Path]) -> list[Path]:
    """The checkpoints in these folders, whole or not, the newest first.

    Also those that were complete when their run was killed, between the two renames that replace an older one.
    """
    found: dict[Path, float] = {}
    for folder in folders:
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            if path.suffix == ".ckpt" and path.exists() and not path.name.startswith("."):
                real = path.resolve() if path.is_symlink() else path
            elif path.name.startswith(".") and ".ckpt.writing-" in path.name and (path / MANIFEST).is_file():
                real = path
            else:
                continue
            try:
                found[real] = read_manifest(real).saved_at
            except CheckpointError:
                found[real] = real.stat().st_mtime
    return sorted(found, key=lambda path: found[path], reverse=True)


def find_last(folders: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The complete checkpoints in these folders that a run can go on from, the newest first.

    Looks at what a checkpoint says of itself and at the sizes of its files, not at every byte.

    Returns:
        Paths, and words for each checkpoint that was passed over.
    """
    whole, skipped = [], []
    for path in candidates(folders):
        try:
            manifest = read_manifest(path)
            wrong = sizes(path, manifest)
            if manifest.weights_only:
                wrong.append("it holds weights only")
        except CheckpointError as error:
            wrong = [str(error)]
        if wrong:
            skipped.append(f"{path}: {'; '.join(wrong[:3])}")
        else:
            whole.append(path)
    return whole, skipped
