"""Activations of blocks in host memory between the forward and the backward pass.

What a block saves for its backward pass is copied to (on CUDA: pinned) host memory, and back when the backward pass
asks for it. With checkpointed blocks that is their input. The copies are queued on the device's current stream: they
wait for what has made the tensor, the host waits for nothing, and computation does not run beside them.

Parameters are not moved: FSDP2 frees and gathers them itself. The same code runs on CPU, where it moves nothing away.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST = 1024
"""Elements below which a tensor stays where it is."""

_to_host: ContextVar[bool] = ContextVar("to_host", default=False)


def is_moving_to_host() -> bool:
    """Whether what is made now is a copy in host memory; for those who count the device's."""
    return _to_host.get()


class _Moved:
    """A tensor that is in host memory; `back` gives one copy on the device to all who ask while it lives."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._back: weakref.ref[Tensor] | None = None
        token = _to_host.set(True)
        try:
            pinned = tensor.device.type == "cuda"
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._host.copy_(tensor, non_blocking=pinned)
        finally:
            _to_host.reset(token)

    def back(self) -> Tensor:
        there = None if self._back is None else self._back()
        if there is None:
            there = self._host.to(self._device, non_blocking=True, copy=True)
            self._back = weakref.ref(there)
        return there


def _storage(parameter: Tensor) -> int:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return int(local.untyped_storage()._cdata)


class Offload:
    """Runs a block so that what it saves lies in host memory; a parameter of it is left alone."""

    def __init__(self, block: nn.Module) -> None:
        self._block = weakref.ref(block)
        self._known: list[int] = []

    def _is_parameter(self, storage: int) -> bool:
        """Whether a storage is that of a parameter as it is now: whole while FSDP2 has gathered it."""
        block = self._block()
        if block is None:
            return False
        first = next(block.parameters(), None)
        if first is not None and self._known[:1] != [_storage(first)]:
            self._known = [_storage(p) for p in block.parameters()]
        return storage in self._known

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``call`` returns."""
        with self.moving():
            return call(*args, **kwargs)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move what is saved meanwhile, each tensor once."""
        copies: dict[Any, tuple[StorageWeakRef, _Moved]] = {}

        def pack(tensor: Tensor) -> Any:
            if isinstance(tensor, DTensor) or tensor.numel() < SMALLEST or not tensor.is_floating_point():
                return tensor
            storage = tensor.untyped_storage()
            if self._is_parameter(storage._cdata):
                return tensor
            key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
            held = copies.get(key)
            if held is None or held[0].expired():
                held = copies[key] = StorageWeakRef(storage), _Moved(tensor)
            return held[1]

        def unpack(saved: Any) -> Tensor:
            return saved.back() if isinstance(saved, _Moved) else saved

        with saved_tensors_hooks(pack, unpack):
            yield
        copies.clear()
