"""The parser's errors about values, in one line: where, what was given, what is allowed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

_KEY = re.compile(r'Parser key "([^"]+)"')
_VALUE = re.compile(r"(?:Given|Got) value: (.+)")
_EXPECTED = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.+?)\])(?:\.|$)", re.MULTILINE)
_KINDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "list": "a list"}
# lines in which jsonargparse speaks of its own type machinery
_NOISE = ("Does not validate against", "Subtypes:", "Given value type:", "Expected a <class 'NoneType'>")


def explain(message: str, files: Iterable[str], start: Path) -> str:
    """Turn the parser's message about a value of the wrong kind into one line.

    Args:
        message: as jsonargparse wrote it; nested, one level for each class.
        files: the configuration files that were read, to find the line of the value.
        start: folder that file names are shown relative to.
    """
    keys = list(_KEY.finditer(message))
    inner = message[keys[-1].end() :] if keys else ""
    value = _VALUE.search(inner)
    allowed: list[str] = []
    for kind, literal in _EXPECTED.findall(inner):
        words = (f"one of {literal}" if "," in literal else literal) or _KINDS.get(kind, f"a {kind.rpartition('.')[2]}")
        if kind != "NoneType" and words not in allowed:
            allowed.append(words)
    if not value or not allowed:
        lines = [line for line in message.splitlines() if not line.strip().lstrip("- ").startswith(_NOISE)]
        return "\n".join(line for line in lines if line.strip() not in ("", "Errors:"))
    name = ".".join(key.group(1) for key in keys)
    place = next((p for file in files if (p := _find(Path(file), name.split("."), value.group(1)))), None)
    where = f"{shorten(str(place[0]), start)}:{place[1]}: " if place else ""
    return f"{where}{name} is {value.group(1)!r}, but it must be {' or '.join(allowed)}."


def shorten(path: str, start: Path) -> str:
    """A path relative to a folder, if it lies below it."""
    relative = os.path.relpath(path, start)
    return relative if not relative.startswith("..") else path


def _find(file: Path, path: list[str], value: str) -> tuple[Path, int] | None:
    """File and line of a value, if this file gives it."""
    try:
        node = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError):
        return None
    for key in path:
        children = {k.value: v for k, v in node.value} if isinstance(node, yaml.MappingNode) else {}
        if key not in children and isinstance(children.get("init_args"), yaml.MappingNode):
            children = {k.value: v for k, v in children["init_args"].value}
        if key not in children:
            return None
        node = children[key]
    if not isinstance(node, yaml.ScalarNode) or node.value != value:
        return None
    return file, int(node.start_mark.line) + 1
