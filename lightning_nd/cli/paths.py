"""Where a relative path of a configuration points.

In a configuration file a relative path is first looked up beside that file, then in the current directory; on the
command line it is relative to the current directory. ``~`` is the home directory in both. Output folders are always
relative to the current directory.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_nd.cli.keys import ConfigError

# arguments that name something to read, by the section they stand in
INPUTS = {
    "model": {"model", "tokenizer", "adapter"},
    "data": {"train", "val", "test", "predict", "tokenizer", "chat_template"},
    "trainer": {"prompts"},
}
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_FILES = {"train", "val", "test", "predict", "prompts"}
OUTPUTS = {"default_root_dir", "export_dir", "dirpath", "save_dir"}


class PathResolver:
    """Makes the relative input paths of configuration files absolute and remembers where it looked.

    Args:
        start: the directory in which the command was started.
    """

    def __init__(self, start: Path) -> None:
        self.start = start
        self.tried: dict[str, list[str]] = {}

    def rewrite(self, config: Any, folder: Path) -> bool:
        """Rewrite the paths of one loaded configuration in place; True when anything changed."""
        changed = False
        for section, names in INPUTS.items():
            for holder, key in _find(config.get(section) if isinstance(config, dict) else None, names):
                new = self._resolve_value(holder[key], folder)
                changed |= new != holder[key]
                holder[key] = new
        return changed

    def _resolve_value(self, value: Any, folder: Path) -> Any:
        if isinstance(value, list):  # of files
            return [self._resolve_value(item, folder) for item in value]
        if isinstance(value, dict):  # a source with its options
            return {k: self._resolve_value(v, folder) if k == "path" else v for k, v in value.items()}
        if not isinstance(value, str) or not value or os.path.isabs(value) or value.startswith("~") or "://" in value:
            return value
        beside, here = folder / value, self.start / value
        if _found(beside):
            return os.path.normpath(beside)
        if not _found(here):
            self.tried[value] = [os.path.normpath(beside), os.path.normpath(here)]
        return value

    def check(self, config: Any) -> None:
        """Expand ``~`` in every path of the final configuration, and refuse input files that do not exist.

        Raises:
            ConfigError: naming the key and every absolute path that was tried.
        """
        problems: list[str] = []
        for section, names in INPUTS.items():
            for holder, key in _find(config.get(section), names | OUTPUTS):
                holder[key] = _expand(holder[key])
                if key in _FILES or key in INPUTS["model"]:
                    problems += self._missing(holder[key], f"{section}.{key}", only_paths=key not in _FILES)
        if problems:
            raise ConfigError("\n".join(problems))

    def _missing(self, value: Any, where: str, *, only_paths: bool) -> Iterator[str]:
        for item in value if isinstance(value, list) else [value]:
            item = _path_of(item)
            if not isinstance(item, str) or not item:
                continue
            looks_local = item.startswith((".", "/", "~")) or item.count("/") > 1
            if only_paths and not looks_local:
                continue  # a hub id
            if not only_paths and not (looks_local or Path(item).suffix in _SUFFIXES):
                continue
            path = os.path.normpath(self.start / os.path.expanduser(item))
            if not _found(Path(path)) and "://" not in item:
                tried = self.tried.get(item, [path])
                yield f"{where}: {item!r} does not exist; looked for {' and '.join(tried)}"


def _found(path: Path) -> bool:
    return path.exists() or (any(c in str(path) for c in "*?[") and bool(glob.glob(str(path), recursive=True)))


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if isinstance(value, dict | Namespace) and isinstance(_path_of(value), str):
        value["path"] = _expand(value["path"])
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


def _path_of(value: Any) -> Any:
    """The path of a source that is written with its options, the value itself otherwise."""
    return value.get("path") if isinstance(value, dict | Namespace) else value


def _find(value: Any, names: set[str]) -> Iterator[tuple[Any, str]]:
    """Every (mapping, key) below ``value`` whose key is one of ``names`` and holds files."""
    if isinstance(value, list):
        for item in value:
            yield from _find(item, names)
    elif isinstance(value, dict | Namespace):
        for key, child in list((value if isinstance(value, dict) else vars(value)).items()):
            if key in names and (isinstance(child, str | list) or (key in _FILES and _path_of(child))):
                yield value, key
            else:
                yield from _find(child, names)
