"""All that is changed in torch, transformers and this package while one rank of many is played on fake tensors.

Every change is checked against what it was written for: where a version has moved or renamed it, entering fails and
says so, rather than counting something else. The changes are global, so they are made only in a process of their own
(`lightning_nd.planner.child`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._subclasses.fake_tensor
import torch.distributed.fsdp
import torch.testing._internal.distributed.fake_pg
import transformers
import transformers.integrations.moe
import transformers.masking_utils

from lightning_nd.planner.child import is_child

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

#: First and last minor versions that the patches were tried with.
TORCH = ((2, 11), (2, 13))
TRANSFORMERS = ((5, 17), (5, 24))


class PatchError(RuntimeError):
    """A version of torch or transformers that the simulation does not know."""


@contextmanager
def simulation(
    world_size: int, rank: int = 0, *, packed: bool = False, real: bool = False
) -> Iterator[FakeTensorMode | None]:
    """A process group of ``world_size`` ranks in which only this one exists, and a mode for fake tensors.

    Args:
        world_size: ranks of the world.
        rank: which of them this process is.
        packed: rows hold several documents, so that transformers makes a mask where a kernel needs one.
        real: tensors have memory (to compare with); no mode is made.

    Raises:
        PatchError: for versions whose internals are not known, and outside a process of its own.
        RuntimeError: if this process is part of a group already.
    """
    import torch.distributed as dist

    if not is_child():
        raise PatchError("A simulation changes torch for everybody: it runs in a process of its own (in_child).")
    if dist.is_initialized():
        raise RuntimeError("A dry run needs a process of its own: this one is part of a process group.")
    check_version("torch", torch.__version__, TORCH)
    check_version("transformers", transformers.__version__, TRANSFORMERS)
    mode = _of("torch._subclasses.fake_tensor", "FakeTensorMode")
    store = _of("torch.testing._internal.distributed.fake_pg", "FakeStore")
    with ExitStack() as stack:
        for change in _common():
            stack.enter_context(change)
        for change in _with_values() if real else _without_values(packed):
            stack.enter_context(change)
        dist.init_process_group("fake", world_size=world_size, rank=rank, store=store())
        try:
            yield None if real else mode(allow_non_fake_inputs=True)
        finally:
            dist.destroy_process_group()


def _common() -> Iterator[Any]:
    """Changes for fake and real tensors: nothing is read or downloaded, chunks are those of a GPU."""
    import huggingface_hub

    from lightning_nd.checkpoint.init import NoSource
    from lightning_nd.planner.engine import ENGINE

    _of("torch.autograd.graph", ENGINE)
    yield _replaced("lightning_nd.checkpoint.load", "weight_files", lambda folder: [])
    yield _replaced("lightning_nd.checkpoint.load", "read_source", lambda folder, model: NoSource())
    download = huggingface_hub.snapshot_download
    small = {"allow_patterns": ["*.json", "*.py"]}
    yield _replaced("huggingface_hub", "snapshot_download", lambda *a, **k: download(*a, **{**k, **small}))
    # The CPU's attention kernel makes a window's mask in numpy; those of a GPU need none.
    yield _replaced("lightning_nd.attention.kernels.cpu_flash", "_mask", lambda rect, dtype: None)
    budget = _of("lightning_nd.loss.options", "_BUDGET")
    yield mock.patch.dict(budget, cpu=budget["cuda"])
    # A schedule asks how long the run is; the rows that say so are not read.
    yield mock.patch.object(_of("lightning.pytorch", "Trainer"), "estimated_stepping_batches", 1000)


def _with_values() -> Iterator[Any]:
    """Changes for real tensors, which are played to compare with."""
    # Every checkpoint keeps the CPU's random state, 5,056 bytes that are not on a GPU.
    nothing = torch.empty(0, dtype=torch.uint8)
    # Under cp only one rank has the token without a target; it is this one, as on fake tensors.
    find = _of("lightning_nd.loss.causal", "_supervised")
    yield _replaced("lightning_nd.loss.causal", "_supervised", lambda targets: find(targets)[: len(targets) - 1])
    yield _replaced("torch", "get_rng_state", lambda: nothing)
    yield _replaced("torch", "set_rng_state", lambda state: None)


def _without_values(packed: bool) -> Iterator[Any]:
    """Changes for tensors that have a shape and no values."""
    outside = _of("torch._subclasses.fake_tensor", "unset_fake_temporarily")
    mesh = _of("torch.distributed.device_mesh", "DeviceMesh")
    joined = _of("torch.distributed.device_mesh", "DeviceMesh._concatenate")

    def concatenate(*args: Any, **kwargs: Any) -> Any:
        with outside():  # it computes ranks with real tensors
            return joined(*args, **kwargs)

    yield mock.patch.object(mesh, "_concatenate", staticmethod(concatenate))
    # DTensor works out global shapes under the fake mode that is active, and those tensors would be counted as live.
    yield _replaced("torch.distributed.tensor._sharding_prop", "detect_fake_mode", lambda *a, **k: None)
    # Under fake tensors transformers takes itself to be traced, and would take every row for a packed one.
    _of("transformers.masking_utils", "find_packed_sequence_indices")
    if not packed:
        yield _replaced("transformers.masking_utils", "find_packed_sequence_indices", lambda *a, **k: None)
    # On meta, grouped products are in bf16 only; others take the way of a compiled model, of the same shapes.
    can = _of("transformers.integrations.moe", "_can_use_grouped_mm")

    def can_group(x: Any, weight: Any, offs: Any) -> bool:
        return weight.dtype == torch.bfloat16 and can(x, weight, offs)

    yield _replaced("transformers.integrations.moe", "_can_use_grouped_mm", can_group)
    # Every token counts as supervised but one (the last of a row has no target), and as one of the vocabulary.
    yield _replaced("lightning_nd.loss.causal", "_supervised", lambda targets: torch.arange(len(targets) - 1))
    yield _replaced("lightning_nd.loss.causal", "check_targets", lambda *a, **k: None)


@contextmanager
def resizes(noted: Callable[[Any], None]) -> Iterator[None]:
    """Call ``noted`` with every storage that is resized: so FSDP2 frees its buffers and takes them back."""
    resize = _of("torch", "UntypedStorage.resize_")

    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        noted(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_) if is_child() else nullcontext():
        yield


def check_version(package: str, version: str, known: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Refuse versions outside of those that were tried.

    Raises:
        PatchError: with the versions that will do.
    """
    parts = version.split(".")
    found = (int(parts[0]), int(parts[1]))
    if not known[0] <= found <= known[1]:
        first, last = (".".join(map(str, v)) for v in known)
        raise PatchError(
            f"dry run: {package} {version} is not among the versions whose internals the simulation knows"
            f" ({first} to {last}). Neither `plan` without --verify nor `fit` needs it."
        )


def _of(module: str, name: str) -> Any:
    """What a module has under a dotted name."""
    import importlib

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise PatchError(
            f"dry run: {module} has no {name!r} any more, so a step would be counted wrongly (torch"
            f" {torch.__version__}, transformers {transformers.__version__})."
        )
    return found


def _replaced(module: str, name: str, by: Any) -> Any:
    import importlib

    _of(module, name)
    return mock.patch.object(importlib.import_module(module), name, by)
