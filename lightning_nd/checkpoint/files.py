"""Writing a checkpoint so that there is a whole one at every moment, and reading one that others may have written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_nd.checkpoint.manifest import MANIFEST, META, CheckpointError, Manifest, sync_folder, write_manifest
from lightning_nd.checkpoint.pieces import LoadPlanner, Pieces, SavePlanner

T = TypeVar("T")

#: Called with the name of each phase of saving on each rank; tests let a rank die or fail there.
_phase_hook: Callable[[str], None] | None = None
_PER_TENSOR = 2048  # bytes: the archive around each part, and its entry in the metadata
_PER_RANK = 65_536  # bytes: random states, manifest, file system
PHASES = ("staged", "shard", "shards", "meta", "manifest", "replaced", "published")


def phase(name: str) -> None:
    """Note that saving has come so far."""
    if _phase_hook is not None:
        _phase_hook(name)


class _Hashing(io.RawIOBase):
    """A file that is written front to back, and the SHA-256 of what was written."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.digest = hashlib.sha256()
        self.written = 0

    @override
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.digest.update(view)
        self.written += len(view)
        return len(view)

    @override
    def tell(self) -> int:
        return self.written

    @override
    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    @override
    def fileno(self) -> int:
        return self.file.fileno()

    @override
    def close(self) -> None:
        self.file.close()
        super().close()


class _HashingFiles(FileSystem):
    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with _Hashing(Path(path)) as stream:
            yield stream
            phase("shard")
        self.files[Path(path).name] = {"size": stream.written, "sha256": stream.digest.hexdigest()}

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Group:
    """Agreement of the ranks of a process group on what one of them does."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self.first = not dist.is_initialized() or dist.get_rank(group) == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.group)
        return found

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Do something on the first rank; what it raises is raised on every rank."""
        result, failure = None, None
        if self.first:
            try:
                result = action()
            except Exception as error:
                failure = error
        self.agree(failure)
        return result

    def agree(self, failure: Exception | None) -> None:
        """Raise the first failure of any rank on every rank."""
        told = self.gather(None if failure is None else (type(failure).__name__, str(failure)))
        if failure is not None:
            raise failure
        for rank, words in enumerate(told):
            if words is not None:
                kind = {"OSError": OSError, "CheckpointError": OSError}.get(words[0], RuntimeError)
                raise kind(words[1] if kind is OSError else f"saving failed on rank {rank}: {words[0]}: {words[1]}")


def bytes_needed(state: Any) -> int:
    """Bytes that tensors take in files: each once, whichever ranks hold parts or replicas of it."""
    if isinstance(state, Pieces):
        parts = -(-state.shape.numel() // max(1, state.local.numel()))
        return state.shape.numel() * state.local.element_size() + parts * _PER_TENSOR
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size() + _PER_TENSOR
    if isinstance(state, Mapping):
        state = state.values()
    return sum(map(bytes_needed, state)) if not isinstance(state, str | bytes) and isinstance(state, Iterable) else 0


def check_room(folder: Path, needed: int) -> None:
    """Refuse a folder that cannot be written, or whose file system lacks room.

    Raises:
        OSError: naming the path, and the bytes that are needed and free.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid.uuid4().hex[:8]}.probe"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _cannot_write(folder, needed, error) from error
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"A checkpoint in {folder} needs {needed:,} bytes, and {free:,} are free")


def _cannot_write(folder: Path, needed: int, error: BaseException) -> OSError:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    return OSError(
        getattr(error, "errno", None) or errno.EIO,
        f"Cannot write a checkpoint to {folder} ({error}): {needed:,} bytes are needed, {free:,} are free",
    )


def write_folder(
    state: dict[str, Any], meta: bytes, target: Path, manifest: Manifest, group: dist.ProcessGroup | None
) -> None:
    """Write a sharded checkpoint beside its target and publish it by renaming; collective over the group.

    Args:
        state: nested dictionaries of `Pieces` and plain tensors.
        meta: of rank 0, the content of ``meta.pt``.
        target: where it goes; what is there is replaced.
        manifest: its ``files`` are filled in.
        group: of all ranks, for communication on the host.

    Raises:
        OSError: a file cannot be written; names the path, and the bytes that are needed and free. What was at
            `target` is still there.
    """
    ranks = _Group(group)
    needed = bytes_needed(state) + ranks.ranks * _PER_RANK
    token = ranks.gather(uuid.uuid4().hex[:8])[0]
    folder = target.parent / f".{target.name}.writing-{token}"

    def stage() -> None:
        check_room(target.parent, 0)
        for old in target.parent.glob(f".{target.name}.writing-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir()

    ranks.attempt(stage)
    phase("staged")
    try:
        files = _write_shards(state, folder, group)
        phase("shards")
        written = {name: entry for found in ranks.gather(files) for name, entry in found.items()}
        ranks.attempt(lambda: _complete(folder, meta, manifest, written))
        ranks.attempt(lambda: publish(folder, target))
    except Exception as error:
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)
        cause = _disk_error(error)
        if cause is not None:
            raise _cannot_write(target, needed, cause) from error
        raise
    phase("published")


def _write_shards(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
    writer = FileSystemWriter(folder, sync_files=True)
    writer.fs = _HashingFiles()
    with _one_failure("saving"):
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=group)
    return writer.fs.files


@contextmanager
def _one_failure(what: str) -> Generator[None, None, None]:
    """DCP raises a BaseException with the traces of all ranks; raise the first rank's error, as an error."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, OSError):
            raise cause from error
        raise RuntimeError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}") from error


def _complete(folder: Path, meta: bytes, manifest: Manifest, written: dict[str, dict[str, Any]]) -> None:
    with _Hashing(folder / META) as stream:
        stream.write(meta)
        stream.flush()
        os.fsync(stream.fileno())
    phase("meta")
    written[META] = {"size": stream.written, "sha256": stream.digest.hexdigest()}
    absent = [name for name in written if not (folder / name).is_file()]
    if absent:
        raise OSError(
            errno.ENOENT,
            f"{absent[0]} and {len(absent) - 1} other files were written by other nodes and are not in {folder} here:"
            " checkpoints need a folder on a file system that all nodes share",
        )
    manifest.files = written
    write_manifest(folder, manifest)
    phase("manifest")


def publish(written: Path, target: Path) -> None:
    """Give a complete checkpoint its name; until then what had this name before is there."""
    if target.is_dir() and not target.is_symlink():
        # A folder cannot be replaced in one step. Killed in between, the new one is found under its first name.
        aside = target.parent / f".{target.name}.replaced-{uuid.uuid4().hex[:8]}"
        target.rename(aside)
        phase("replaced")
        written.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        if target.is_symlink() or written.is_dir():
            target.unlink(missing_ok=True)
        written.rename(target)
    sync_folder(target.parent)


def write_file(content: dict[str, Any] | None, target: Path, group: dist.ProcessGroup | None) -> None:
    """Write a one-file checkpoint on rank 0, beside its target, and publish it by renaming; collective.

    Raises:
        OSError: as `write_folder`.
    """
    ranks = _Group(group)
    needed = bytes_needed(content) + _PER_RANK if ranks.first else 0

    def write() -> None:
        assert content is not None
        check_room(target.parent, 0)
        for old in target.parent.glob(f".{target.name}.writing-*"):
            old.unlink(missing_ok=True)
        partial = target.parent / f".{target.name}.writing-{uuid.uuid4().hex[:8]}"
        phase("staged")
        try:
            with partial.open("wb") as file:
                torch.save(content, file)
                phase("shards")
                file.flush()
                os.fsync(file.fileno())
            publish(partial, target)
        except Exception as error:
            partial.unlink(missing_ok=True)
            cause = _disk_error(error)
            if cause is not None:
                raise _cannot_write(target, needed, cause) from error
            raise
        phase("published")

    ranks.attempt(write)


def _disk_error(error: BaseException) -> OSError | None:
    """The error of the file system behind another, if there is one."""
    if isinstance(error, OSError):
        return error
    text = str(error)  # torch.save has its own words for a full disk
    if "PytorchStreamWriter" in text or "unexpected pos" in text or "No space left" in text:
        return OSError(errno.ENOSPC, "no space left")
    return None


def remove(path: Path) -> None:
    """Remove a checkpoint: at no moment is there half of it under its name."""
    if path.is_dir() and not path.is_symlink():
        aside = path.parent / f".{path.name}.removed-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Finish what a killed run has left complete in a folder of checkpoints, and remove the rest."""
    for path in sorted(folder.glob(".*.ckpt.writing-*")):
        if (path / MANIFEST).is_file():
            publish(path, folder / _named(path))
    for path in folder.glob(".*.ckpt.replaced-*"):
        if not (folder / _named(path)).exists():
            path.rename(folder / _named(path))
    for kind in ("writing", "replaced", "removed"):
        for path in folder.glob(f".*.ckpt.{kind}-*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _named(path: Path) -> str:
    """The name that a checkpoint is to have, from that under which it is written or put aside."""
    return path.name[1 : path.name.index(".ckpt.") + len(".ckpt")]


# -- reading ----------------------------------------------------------------------------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Only what torch.distributed.checkpoint writes into its ``.metadata``: a pickle could run any code."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch._utils", "_rebuild_device_tensor_from_numpy"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.planner", "MetadataIndex"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("collections", "OrderedDict"),
        }
    )

    @override
    def find_class(self, module: str, name: str) -> Any:
        allowed = (module, name) in self._ALLOWED or module == "torch.distributed.checkpoint.metadata"
        if not allowed and module == "torch":
            allowed = isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format | torch.layout)
        if not allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of a checkpoint")
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Reads a folder whose files may come from anywhere: no code is run, no path leads out of it.

    Args:
        path: of the folder.
        names: of the files that belong to it.
    """

    def __init__(self, path: Path, names: set[str]) -> None:
        super().__init__(path)
        self._names = names

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata: Metadata = _MetadataUnpickler(file).load()
            names = {info.relative_path for info in (metadata.storage_data or {}).values()}
        except Exception as error:  # whatever a pickle that has been changed may raise
            raise CheckpointError(f"{self.path} is damaged: .metadata cannot be read ({error}).") from error
        if outside := sorted(names - self._names):
            raise CheckpointError(f"{self.path}: its metadata names {outside[0]!r}, outside of it. It is not read.")
        if getattr(metadata, "storage_meta", None) is None:
            from torch.distributed.checkpoint.metadata import StorageMeta

            metadata.storage_meta = StorageMeta()
        return metadata


def read_folder(state: dict[str, Pieces], reader: Reader, group: dist.ProcessGroup | None) -> None:
    """Fill pieces in place from a sharded checkpoint; collective."""
    with _one_failure("loading"):
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), process_group=group)
