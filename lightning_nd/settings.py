"""What the config of a transformers model says, the configs inside it included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def settings_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name; those of nested configs (``text_config.router_jitter_noise``) as well.

    Args:
        config: a transformers config; None or anything else gives nothing.
    """
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        yield from _walk(to_dict(), "")


def _walk(values: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def switched_on(config: Any, key: str) -> str | None:
    """The dotted name of the first setting called ``key`` that is true, in a config or those inside it."""
    # Not a part of to_dict in every version: read from the objects.
    if getattr(config, key, False):
        return key
    for name in getattr(config, "sub_configs", ()):
        if inner := switched_on(getattr(config, name, None), key):
            return f"{name}.{inner}"
    return None
