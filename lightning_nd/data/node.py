"""Work that one process does for all processes of its node."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_nd.data.errors import DataError

T = TypeVar("T")
# Large sources take hours, and the process group of the training gives up after minutes.
_PATIENCE = timedelta(days=2)


def once_per_node(work: Callable[[], T], trainer: Any) -> T:
    """Run ``work`` on local rank 0 of every node, and hand its result to all ranks of the node; collective.

    Where it fails on any node, every rank raises: rank 0 the whole error, the others its first line. A rank that
    dies closes its connections, which ends the waiting of the others.

    Args:
        work: Returns something small that can be pickled.
        trainer: The Trainer, None without one: then this process does the work for itself.

    Raises:
        DataError: with the error of the lowest rank that failed.

    """
    if trainer is None or not _has_peers():
        return work()
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        own: tuple[Any, str | None] = (None, None)
        cause: Exception | None = None
        if trainer.local_rank == 0:
            try:
                own = (work(), None)
            except Exception as error:
                cause = error
                own = (None, str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}")
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, own, group=group)
    finally:
        dist.destroy_process_group(group)
    failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failed:
        first = min(failed)
        _fail(dist.get_rank(), first, failed[first], cause)
    builder = dist.get_rank() - trainer.local_rank
    result: T = outcomes[builder][0]
    return result


def _has_peers() -> bool:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    return dist.get_backend() != "fake"  # its other ranks do not exist


def _fail(rank: int, failed: int, text: str, cause: Exception | None) -> None:
    where = f"rank {failed}: " if failed else ""
    if rank == failed and cause is not None:
        raise cause
    if rank == 0:
        raise DataError(where + text) from cause
    raise DataError(f"{where}{text.splitlines()[0].rstrip(':')} (rank {failed} has the whole report)") from None
