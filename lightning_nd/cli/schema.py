"""``lightning-nd schema``: what a recipe may hold, as a JSON schema."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from lightning_nd.cli.keys import ConfigError

USAGE = """usage: lightning-nd schema [--output FILE]

Write a JSON schema of recipes, by which an editor completes keys, shows what they mean and marks wrong ones. In
Visual Studio Code with the YAML extension, and in others that use its language server, put this in the first line of a
recipe:

  # yaml-language-server: $schema=lightning-nd.schema.json

  --output FILE           the file to write; left out, it is printed
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-nd schema --help.")


def main_command(command: str, args: list[str]) -> int:
    """Print or write the schema."""
    parser = _Parser(prog=f"lightning-nd {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(args)
    text = json.dumps(recipe_schema(), indent=2) + "\n"
    if given.output is None:
        print(text, end="")
    else:
        given.output.write_text(text, encoding="utf-8")
        print(f"Schema: {given.output.absolute()}")
    return 0


def recipe_schema() -> dict[str, Any]:
    """The schema of a configuration file of ``fit``."""
    from lightning_nd.cli.app import CLASSES, parser_of

    parser = parser_of("fit")
    assert parser.checker is not None
    properties: dict[str, Any] = {}
    for action in parser._actions:
        group, _, key = action.dest.partition(".")
        if group in ("help", "config", "print_config") or group in CLASSES or "." in key:
            continue
        if action.dest in parser.checker.groups:
            continue
        entry = {**of_type(_hint(action)), **_described(action.help, action.default)}
        if key:
            into = properties.setdefault(group, {"type": "object", "additionalProperties": False, "properties": {}})
            into["properties"][key] = entry
            if group == "trainer":  # lists are added to under a name with a plus
                into["properties"][f"{key}+"] = {}
        else:
            properties[group] = entry
    # of the Trainer, only lists
    trainer = properties["trainer"]["properties"]
    for name in [n for n in trainer if n.endswith("+") and n[:-1] not in ("callbacks", "logger", "plugins")]:
        del trainer[name]
    for key, path in CLASSES.items():
        properties[key] = _of_class_key(parser, key, path)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lightning-nd recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(properties.items())),
    }


def _of_class_key(parser: Any, key: str, path: str | None) -> dict[str, Any]:
    """A class with its arguments: those of the default class are known, of others taken as they come."""
    from jsonargparse import ArgumentParser

    cls = parser.checker.resolve(path)
    inner = ArgumentParser(exit_on_error=False)
    inner.add_class_arguments(cls, skip={"params"} if key == "optimizer" else {"optimizer"} if "lr" in key else set(),
                              fail_untyped=False)  # fmt: skip
    arguments = {
        action.dest: {**of_type(_hint(action)), **_described(action.help, action.default)}
        for action in inner._actions
        if action.dest not in ("help",) and "." not in action.dest
    }
    default = {"anyOf": [{"const": path}, {"const": str(path).rpartition(".")[2]}]}
    return {
        "anyOf": [
            {"type": "null"},
            {"type": "string"},
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "class_path": {"type": "string", "description": f"default: {path}"},
                    "init_args": {"type": "object"},
                    "dict_kwargs": {"type": "object"},
                },
                "if": {"properties": {"class_path": default}},
                "then": {"properties": {"init_args": {"properties": arguments, "additionalProperties": False}}},
            },
        ]
    }


def _hint(action: Any) -> Any:
    return getattr(action, "_typehint", None) or action.type


def _described(words: Any, default: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(words, str) and words.strip() and "SUPPRESS" not in words:
        found["description"] = " ".join(words.split())
    if isinstance(default, str | int | float | bool):
        found["default"] = default
    return found


def of_type(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint; anything where JSON cannot say more."""
    plain = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    if isinstance(hint, type) and hint in plain:
        return {"type": plain[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [of_type(option) for option in arguments]
        return {} if {} in options else {"anyOf": options}
    base = origin or hint
    if not isinstance(base, type):
        return {}
    if dataclasses.is_dataclass(base):
        hints = get_type_hints(base)
        fields = {f.name: of_type(hints[f.name]) for f in dataclasses.fields(base)}
        return {"type": "object", "additionalProperties": False, "properties": fields}
    if issubclass(base, PathLike) or base is PathLike or base is timedelta:
        return {"type": "string"}
    if issubclass(base, Mapping):
        return {"type": "object", **({"additionalProperties": of_type(arguments[1])} if len(arguments) == 2 else {})}
    if issubclass(base, Sequence | set) or base in (list, tuple):
        items = [a for a in arguments if a is not Ellipsis]
        return {"type": "array", **({"items": of_type(items[0])} if len(items) == 1 else {})}
    return {}
