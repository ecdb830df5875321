"""Tokenised sources on disk, under a key of all that they depend on."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from lightning_nd.data.dataset import ARRAYS, META, Tally
from lightning_nd.data.errors import DataError
from lightning_nd.data.tokenise import Encoded

log = logging.getLogger(__name__)

_VARIABLE = "LIGHTNING_ND_CACHE"
_UNFINISHED = ".unfinished-"
_STALE_SECONDS = 7 * 24 * 3600
_BLOCK = 1 << 22


def cache_folder(given: str | None) -> Path:
    """Where tokenised sources are kept: ``given``, ``$LIGHTNING_ND_CACHE/data``, or the user's cache folder.

    A default that cannot be written gives way to the machine's temporary folder, with a warning.

    Raises:
        DataError: the folder that was asked for cannot be made or written.

    """
    variable = os.environ.get(_VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    default = Path(variable) / "data" if variable else home / "lightning-nd" / "data"
    folder = Path(given).expanduser().absolute() if given else default.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if given:
            raise DataError(f"data.cache_dir: {folder} cannot be written: {error}") from error
        instead = Path(tempfile.gettempdir()) / f"lightning-nd-{os.getuid()}" / "data"
        log.warning("data: the cache folder %s cannot be written (%s); using %s.", folder, error, instead)
        instead.mkdir(parents=True, exist_ok=True)
        return instead
    return folder


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything about a tokenizer that decides ids: its files as loaded, template and special tokens."""
    backend: Any = tokenizer.backend_tokenizer
    parts = [
        backend.to_str(),
        tokenizer.chat_template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        type(tokenizer).__name__,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def key_of(tokenizer: PreTrainedTokenizerBase, digests: list[str], settings: dict[str, Any]) -> str:
    """The name of a source's folder: a digest of file contents, tokenizer, settings, and the code that reads them.

    Args:
        tokenizer: With the chat template in force.
        digests: Of the contents of the files, in order.
        settings: Whatever else decides ids and labels.

    """
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    parts = {
        "code": code.hexdigest(),
        "libraries": [transformers.__version__, tokenizers.__version__],
        "tokenizer": fingerprint(tokenizer),
        "files": digests,
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def find(folder: Path, files: list[Path]) -> Tally | None:
    """The tally of a complete entry; None if there is none, or what is there is damaged (then it is removed)."""
    if not folder.is_dir():
        return None
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        for name in ARRAYS:
            if _checksum(folder / f"{name}.bin") != meta["checksums"][name]:
                raise ValueError(f"{name}.bin is not what was written")
        return Tally.from_json(meta["tally"], files)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        log.warning("data: the cached tokens in %s are damaged (%s); tokenising again.", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _checksum(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def write(root: Path, encoded: Iterator[Encoded], files: list[Path]) -> tuple[Path, Tally]:
    """Write a source into a folder of its own inside ``root``, not yet under its key: see ``publish``.

    Memory holds one piece of a file at a time.

    Raises:
        DataError: as ``encoded`` raises, or the disk is full.

    """
    _sweep(root)
    tally = Tally(files, rows_of=[0] * len(files))
    place = {path: number for number, path in enumerate(files)}
    folder = Path(tempfile.mkdtemp(dir=root, prefix=_UNFINISHED))
    folder.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            open_files: dict[str, IO[bytes]] = {
                name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS
            }
            for part in encoded:
                tally.add(part.tally)
                tally.rows_of[place[part.file]] += part.tally.rows
                for name, file in open_files.items():
                    file.write(part.arrays[name].tobytes())
        meta = {
            "checksums": {name: _checksum(folder / f"{name}.bin") for name in ARRAYS},
            "tally": tally.to_json(),
        }
        (folder / META).write_text(json.dumps(meta), encoding="utf-8")
    except OSError as error:
        discard(folder)
        raise DataError(f"the tokens cannot be written to {root}: {error}. Set data.cache_dir") from error
    except BaseException:
        discard(folder)
        raise
    return folder, tally


def publish(folder: Path, under: Path) -> None:
    """Give a written folder its name, in one step; where another process was faster, its folder stays."""
    try:
        folder.rename(under)
    except OSError:
        if not under.is_dir():
            raise
        discard(folder)


def discard(folder: Path) -> None:
    """Remove a folder that was not published."""
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in root.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                discard(left)
