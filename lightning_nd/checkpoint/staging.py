"""Host memory in which a checkpoint waits to be written while training goes on; taken once and used again."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_nd.checkpoint.pieces import Pieces


class Staging:
    """The tensors of the last copy, by their place in the tree."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._taking: threading.Thread | None = None

    def take_memory(self, tree: Any) -> None:
        """Make room for the tensors of a tree beside what the caller goes on with: pages are slow to come by."""

        def take() -> None:
            for place, tensor in _tensors(tree, ""):
                self._room(place, tensor).zero_()

        self._taking = threading.Thread(target=take, name="staging", daemon=True)
        self._taking.start()

    def copy(self, tree: Any) -> Any:
        """The same tree with its tensors on the host, so that training may change those that were given."""
        if self._taking is not None:
            self._taking.join()
            self._taking = None
        copied = self._copy(tree, "")
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # copies into pinned memory are under way
        return copied

    def _copy(self, tree: Any, place: str) -> Any:
        if isinstance(tree, Pieces):
            return Pieces(tree.shape, self._copy(tree.local, place), tree.box)
        if isinstance(tree, Tensor):
            return self._room(place, tree).copy_(tree.detach(), non_blocking=True)
        if isinstance(tree, Mapping):
            return {key: self._copy(value, f"{place}.{key}") for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(self._copy(value, f"{place}.{i}") for i, value in enumerate(tree))
        return tree

    def _room(self, place: str, like: Tensor) -> Tensor:
        kept = self._kept.get(place)
        if kept is None or kept.shape != like.shape or kept.dtype != like.dtype:
            kept = self._kept[place] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return kept


def _tensors(tree: Any, place: str) -> Any:
    if isinstance(tree, Pieces):
        yield place, tree.local
    elif isinstance(tree, Tensor):
        yield place, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{place}.{key}")
