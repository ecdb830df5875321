"""What must be changed in torch and transformers for a faithful count of fake tensors, in one place.

Every change is checked against what it was written for: where a version has moved or renamed it, entering fails and
says so, rather than counting something else. They are for a process of their own (`lightning_nd.planner.simulate`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import transformers

#: First and last minor versions that the patches were tried with.
TORCH = ((2, 11), (2, 13))
TRANSFORMERS = ((5, 17), (5, 24))


class PatchError(RuntimeError):
    """A version of torch or transformers that the simulation does not know."""


@contextmanager
def patched() -> Iterator[None]:
    """Apply all patches.

    Raises:
        PatchError: naming the version and what was not found.
    """
    check_version("torch", torch.__version__, TORCH)
    check_version("transformers", transformers.__version__, TRANSFORMERS)
    import torch.distributed.tensor._sharding_prop as propagation

    # DTensor works out global shapes under the fake mode that is active, and those tensors would be counted as live.
    _expect(propagation, "detect_fake_mode", "torch.distributed.tensor._sharding_prop")
    import transformers.masking_utils as masking

    # Under fake tensors transformers takes itself to be traced, and would build a mask that no run builds.
    _expect(masking, "find_packed_sequence_indices", "transformers.masking_utils")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(propagation, "detect_fake_mode", return_value=None))
        stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", return_value=None))
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
            f"plan --verify: {package} {version} is not among the versions whose internals the simulation knows"
            f" ({first} to {last}). The plan itself does not need it; leave --verify out."
        )


def _expect(module: object, name: str, where: str) -> None:
    if not inspect.isfunction(getattr(module, name, None)):
        raise PatchError(
            f"plan --verify: {where} has no function {name!r} any more, so memory would be counted wrongly."
        )
