"""Counts live storages and what collectives carry, as a program runs on fake tensors."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_nd.parallelize.offload import is_moving_to_host
from lightning_nd.planner.engine import is_engines_sum
from lightning_nd.planner.patches import resizes


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages that dispatched operations have made and nobody has freed.

    Attributes:
        phase: what is running; set by whoever runs it.
        live: bytes now.
        peaks: by phase.
    """

    def __init__(self, fake: FakeTensorMode | None) -> None:
        super().__init__()
        self.phase = "start"
        self.live = 0
        self.peaks: dict[str, int] = defaultdict(int)
        self.peak_made: dict[str, dict[str, int]] = {}
        self._fake = fake
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._made: dict[str, int] = defaultdict(int)
        self._resizes: Any = None
        self._unsure: tuple[list[Any], int, dict[str, int]] | None = None

    def add(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._add(tensor)
        self._note()

    def _add(self, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        known = self._known.get(storage)
        if known is not None:
            self._change(known, storage.nbytes())
            return
        record = [0, self.phase]
        self._known[storage] = record
        self._change(record, storage.nbytes())
        weakref.finalize(storage, self._change, record, 0)

    def _change(self, record: list[Any], size: int) -> None:
        self.live += size - record[0]
        self._made[record[1]] += size - record[0]
        record[0] = size

    def _note(self) -> None:
        if self.live > self.peaks[self.phase]:
            self.peaks[self.phase] = self.live
            self.peak_made[self.phase] = dict(self._made)

    def _settle(self) -> None:
        """A sum of the engine's was made in place if its first part is gone as soon as it is there."""
        if self._unsure is None:
            return
        (size, _), live, made = self._unsure
        self._unsure = None
        if size and live > self.peaks[self.phase]:
            self.peaks[self.phase], self.peak_made[self.phase] = live, made

    def __enter__(self) -> Any:
        self._resizes = resizes(self._resized)
        self._resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._settle()
        self._resizes.__exit__(*error)
        super().__exit__(*error)

    def _resized(self, storage: Any) -> None:
        self._settle()
        if (record := self._known.get(storage)) is not None:
            self._change(record, storage.nbytes())
            self._note()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default and self._fake is not None:
            return args[0]  # the real one returns its argument; the fake one a new tensor
        self._settle()
        out = func(*args, **(kwargs or {}))
        if not is_moving_to_host():
            for tensor in _tensors(out):
                self._add(tensor)
            if is_engines_sum(func) and (first := self._known.get(args[0].untyped_storage())) is not None:
                self._unsure = first, self.live, dict(self._made)
            else:
                self._note()
        return out


class Traffic(TorchDispatchMode):
    """Collectives by axis and kind: how many, and the bytes of their whole messages on one rank.

    Attributes:
        axes: by name of a group.
        small: messages of up to that many bytes are kept apart, under the axis ``"control"``: norms, counts, flags.
        times: that what is played now counts.
        found: calls and bytes by axis and kind.
    """

    def __init__(self, axes: dict[str, str], small: int = -1) -> None:
        super().__init__()
        self.axes, self.small = axes, small
        self.times = 1
        self.found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "barrier")):
            group = next((axis for axis in map(self._axis, _flat(args)) if axis is not None), "world")
            message = max((_size(t) for t in (*_tensors(args), *_tensors(out))), default=0)
            group = "control" if message <= self.small else group
            entry = self.found[group, name.strip("_").removesuffix("_base").removesuffix("_tensor")]
            entry[0] += self.times
            entry[1] += self.times * message
        return out

    def _axis(self, argument: Any) -> str | None:
        if isinstance(argument, str):
            return self.axes.get(argument)
        if isinstance(argument, torch.ScriptObject):
            try:
                return self.axes.get(torch.distributed.ProcessGroup.unbox(argument).group_name)
            except (RuntimeError, TypeError):
                return None
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    return (item for item in _flat(value) if isinstance(item, Tensor))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
