"""Every key of a configuration is checked against what the classes accept, before anything is built."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from lightning_nd.names import nearest

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# names that a class gets from elsewhere and that are never written in a configuration
_GIVEN = {"params", "optimizer"}


class ConfigError(ValueError):
    """A configuration or command line that cannot be run; shown without a traceback."""


@lru_cache(maxsize=256)
def class_arguments(cls: type) -> tuple[str, ...] | None:
    """The names of a class's init arguments (``**kwargs`` followed to the base classes), None when they are open."""
    try:
        parser = ArgumentParser(exit_on_error=False)
        names = parser.add_class_arguments(
            cls, fail_untyped=False, skip=_GIVEN & set(inspect.signature(cls).parameters)
        )
    except (ValueError, TypeError):
        return None
    return tuple(name.split(".")[-1] for name in names)


@lru_cache(maxsize=256)
def dataclass_fields(cls: type, argument: str) -> tuple[str, ...] | None:
    """The fields of the dataclass that an init argument of a class takes; None when it takes none."""
    try:
        hint = get_type_hints(vars(cls).get("__init__")).get(argument)
    except (NameError, TypeError):
        return None
    found = next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)
    return None if found is None else tuple(field.name for field in dataclasses.fields(found))


class KeyChecker:
    """Finds keys that no class accepts, in YAML text and in command-line options.

    Args:
        groups: valid names under each plain group, e.g. ``{"trainer": [...], "nd": [...]}``.
        classes: top-level keys that hold a class, with the default class path or None.
        bases: by key, the base class among whose subclasses a short class name is looked up.
        hints: by key, what to write for what people put there instead of a class.
        others: top-level keys that hold plain values.
    """

    def __init__(
        self,
        *,
        groups: Mapping[str, Iterable[str]],
        classes: Mapping[str, str | None],
        bases: Mapping[str, type],
        hints: Mapping[str, str] | None = None,
        others: Iterable[str],
    ) -> None:
        self.groups = {name: set(keys) for name, keys in groups.items()}
        self.class_paths = dict(classes)
        self.bases, self.hints = dict(bases), dict(hints or {})
        self.top = {*self.groups, *self.class_paths, *others}

    # ---- YAML

    def check_text(self, text: str, source: str) -> None:
        """Check one configuration file.

        Raises:
            ConfigError: with every unknown or repeated key, its line and the nearest valid name.
        """
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{source}: not valid YAML: {error}") from error
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{source}: a configuration is a mapping of keys to values, got {_kind(root)}.")
        problems = list(self._check_root(root))
        if problems:
            raise ConfigError("\n".join(f"{source}:{line}: {text}" for line, text in sorted(problems)))

    def _check_root(self, root: yaml.MappingNode) -> Iterator[tuple[int, str]]:
        for key, node, value in _items(root):
            if key is None:
                continue
            yield from _repeated(root, key, node, "")
            if key not in self.top:
                yield _line(node), f"unknown key {key!r}: {nearest(key, self.top)}"
            elif key in self.groups:
                if isinstance(value, yaml.MappingNode):
                    yield from self._check_group(key, value)
            elif key in self.class_paths:
                if isinstance(value, yaml.ScalarNode) and value.tag.endswith(":str"):
                    self.class_paths[key] = value.value
                yield from self._check_value(value, key, self.class_paths[key])

    def _check_group(self, group: str, mapping: yaml.MappingNode) -> Iterator[tuple[int, str]]:
        for key, node, value in _items(mapping):
            if key is None:
                continue
            yield from _repeated(mapping, key, node, f"{group}.")
            if key.rstrip("+") not in self.groups[group]:
                yield _line(node), f"unknown key '{group}.{key}': {nearest(key, self.groups[group])}"
            else:
                yield from self._check_value(value, f"{group}.{key}", None)

    def _check_value(self, node: yaml.Node, where: str, default: str | None) -> Iterator[tuple[int, str]]:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self._check_value(item, f"{where}[{index}]", None)
            return
        if not isinstance(node, yaml.MappingNode):
            return
        entries = {key: value for key, _, value in _items(node) if key is not None}
        given = entries.get("class_path")
        path: str | None = given.value if isinstance(given, yaml.ScalarNode) else default
        if path is None and not set(entries) & set(_CLASS_KEYS):
            for key, value in entries.items():
                yield from self._check_value(value, f"{where}.{key}", None)
            return
        if where in self.class_paths:
            self.class_paths[where] = path
        for name, key_node, value in _items(node):
            if name is None:
                continue
            yield from _repeated(node, name, key_node, f"{where}.")
            if name not in _CLASS_KEYS:
                yield _line(key_node), f"unknown key '{where}.{name}': {self._hint_in_class(name, path, where)}"
            elif name == "class_path" and path is not None and (wrong := self._wrong_class(path, where)):
                yield _line(key_node), f"'{where}.class_path': {wrong}"
            elif name == "init_args" and isinstance(value, yaml.MappingNode):
                yield from self._check_init_args(value, f"{where}.init_args", path)

    def _check_init_args(self, mapping: yaml.MappingNode, where: str, path: str | None) -> Iterator[tuple[int, str]]:
        cls = self.resolve(path)
        valid = class_arguments(cls) if cls is not None else None
        for key, node, value in _items(mapping):
            if key is None:
                continue
            yield from _repeated(mapping, key, node, f"{where}.")
            if valid is not None and key.rstrip("+") not in valid:
                yield _line(node), f"unknown key '{where}.{key}' of {cls.__name__}: {nearest(key, valid)}"  # type: ignore[union-attr]
                continue
            fields = dataclass_fields(cls, key) if cls is not None else None
            if fields is not None and isinstance(value, yaml.MappingNode):
                for name, node, _ in _items(value):
                    if name is not None and name not in fields and name not in _CLASS_KEYS:
                        yield _line(node), f"unknown key '{where}.{key}.{name}': {nearest(name, fields)}"
                continue
            yield from self._check_value(value, f"{where}.{key}", None)

    def _hint_in_class(self, key: str, path: str | None, where: str) -> str:
        cls = self.resolve(path)
        if cls is not None and key in (class_arguments(cls) or ()):
            return f"it belongs one level deeper, at '{where}.init_args.{key}'"
        return nearest(key, _CLASS_KEYS)

    # ---- class paths

    def resolve(self, path: str | None) -> type | None:
        """The class of a full path or of a short name that jsonargparse would accept; None if there is none."""
        if not path:
            return None
        module, _, name = path.rpartition(".")
        if not module:
            found: set[type] = {c for base in self.bases.values() for c in _subclasses(base) if c.__name__ == name}
            return next(iter(found), None)
        try:
            found_class = getattr(importlib.import_module(module), name, None)
        except ImportError:
            return None
        return found_class if isinstance(found_class, type) else None

    def _wrong_class(self, path: str, where: str) -> str | None:
        module, _, name = path.rpartition(".")
        key = where.partition("[")[0]
        if self.resolve(path) is not None:
            return None
        if not module:
            bases = [self.bases[key]] if key in self.bases else self.bases.values()
            names = {c.__name__ for base in bases for c in _subclasses(base)}
            help_ = nearest(name, names)
            return f"there is no class {name!r}: {help_ if 'did you' in help_ else self.hints.get(key, help_)}"
        try:
            members = vars(importlib.import_module(module))
        except ImportError as error:
            return f"cannot import {path!r}: {self.hints.get(key, error)}"
        if name in members:
            return None  # a function that returns the class
        classes = [key for key, value in members.items() if isinstance(value, type)]
        return f"{module} has no {name!r}: {nearest(name, classes)}"

    # ---- command line

    def check_options(self, arguments: Iterable[str]) -> None:
        """Check ``--a.b.c`` options, after the configuration files were read.

        Raises:
            ConfigError: with every unknown option and the nearest valid name.
        """
        problems = []
        arguments = list(arguments)
        for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
            if argument.startswith("--") and len(argument) > 2:
                option, given, value = argument[2:].partition("=")
                if not given and not following.startswith("--"):
                    value = following
                if problem := self._check_option(option.rstrip("+"), value):
                    problems.append(problem)
        if problems:
            raise ConfigError("\n".join(problems))

    def _check_option(self, option: str, value: str) -> str | None:
        head, *rest = option.split(".")
        if head in ("help", "config", "print_config", *self.groups, *self.class_paths) and not rest:
            if head in self.class_paths and value and not value.startswith("{"):
                self.class_paths[head] = value
                wrong = self._wrong_class(value, head)
                return f"--{option}: {wrong}" if wrong else None
            return None
        if head not in self.top or (rest and head not in self.groups and head not in self.class_paths):
            options = {f"{g}.{k}" for g, keys in self.groups.items() for k in keys} | self.top
            return f"unknown option --{option}: {nearest(option, options)}"
        if head in self.groups and rest and rest[0] not in self.groups[head]:
            return f"unknown option --{option}: {nearest(rest[0], self.groups[head])}"
        if head in self.class_paths and rest:
            if rest == ["help"] or rest[0] in ("class_path", "dict_kwargs"):
                if rest[0] == "class_path" and value:
                    self.class_paths[head] = value
                    wrong = self._wrong_class(value, head)
                    return f"--{option}: {wrong}" if wrong else None
                return None
            name = rest[1] if rest[0] == "init_args" and len(rest) > 1 else rest[0]
            cls = self.resolve(self.class_paths[head])
            valid = class_arguments(cls) if cls is not None else None
            if valid is not None and name not in valid and name != "init_args":
                return f"unknown option --{option} of {cls.__name__}: {nearest(name, valid)}"  # type: ignore[union-attr]
            inside = rest[2:] if rest[0] == "init_args" else rest[1:]
            fields = dataclass_fields(cls, name) if cls is not None and inside else None
            if fields is not None and inside[0] not in fields:
                return f"unknown option --{option}: {nearest(inside[0], fields)}"
        return None


def _items(node: yaml.MappingNode) -> Iterator[tuple[str | None, yaml.Node, yaml.Node]]:
    for key, value in node.value:
        # a merge key (<<) brings keys of a node that is checked where it is written
        yield (key.value if isinstance(key, yaml.ScalarNode) and key.value != "<<" else None), key, value


def _repeated(mapping: yaml.MappingNode, key: str, node: yaml.Node, prefix: str) -> Iterator[tuple[int, str]]:
    first = next(k for k, _ in mapping.value if isinstance(k, yaml.ScalarNode) and k.value == key)
    if first is not node:
        yield _line(node), f"key '{prefix}{key}' is given twice, first in line {_line(first)}; keep one"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _subclasses(base: type) -> Iterator[type]:
    children: list[type] = base.__subclasses__()
    for cls in children:
        yield cls
        yield from _subclasses(cls)
