"""Results of attention that a recomputed block takes from its first forward pass instead of exchanging keys again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor

Result = tuple[Tensor, Tensor]  # output and log-sum-exp


class Kept:
    """The results of the attention calls of one block, in the order of its calls."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass, and for its recomputation; see `torch.utils.checkpoint.checkpoint`."""
        return self._enter(False), self._enter(True)

    @contextmanager
    def _enter(self, again: bool) -> Iterator[None]:
        token = _current.set((self, again))
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[tuple[Kept, bool] | None] = ContextVar("kept", default=None)
_computing: ContextVar[bool] = ContextVar("computing", default=False)


def is_computing() -> bool:
    """Whether operations are those of an attention call whose result is kept as a whole."""
    return _computing.get()


def kept(compute: Callable[[], Result]) -> Result:
    """What ``compute`` gives, or has given at this place of the forward pass that is being recomputed."""
    current = _current.get()
    if current is None:
        return compute()
    block, again = current
    if again:
        return block._results.popleft()
    token = _computing.set(True)
    try:
        result = compute()
    finally:
        _computing.reset(token)
    out, lse = result
    block._results.append((out.detach(), lse.detach()))  # the originals become part of the graph
    return result
