"""Who reads which row: a global order that knows nothing of the layout, dealt out to data ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler, SequentialSampler
from typing_extensions import override

from lightning_nd.data.order import Group, Item, RowOrder

_PLACE = ("seed", "epoch", "position", "rows_per_batch")


class PlacedSampler(DistributedSampler[Any], ABC):
    """Deals the rows of an epoch out to data ranks from a place on that is the same for every layout.

    Args:
        dataset: Its length is used.
        micro_batch_size: Rows of a rank in a micro-batch.
        options: Those of ``torch.utils.data.DistributedSampler``.

    """

    #: Rows of an epoch.
    rows: int
    #: Rows of the epoch that have been read.
    position: int

    def __init__(self, dataset: Sized, *, micro_batch_size: int, **options: Any) -> None:
        # num_replicas and rank are always given, so no process group is asked for.
        super().__init__(dataset, **options)  # type: ignore[arg-type]
        self.rows = len(dataset)
        self.micro_batch_size = micro_batch_size
        self.position = 0

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a run that goes on in the middle of an epoch must agree on."""

    @property
    def what(self) -> str:
        """What is counted, in words."""
        return "row"

    @property
    def rows_per_batch(self) -> int:
        """Rows that all ranks together read in one micro-batch."""
        return self.micro_batch_size * self.num_replicas

    @property
    def batches(self) -> int:
        """Micro-batches of a whole epoch, the same on every rank."""
        return -(-self.rows // self.rows_per_batch)

    @override
    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a new one starts at its first row."""
        if epoch != self.epoch:
            self.position = 0
        self.epoch = epoch

    def state_dict(self, batches: int = 0) -> dict[str, Any]:
        """Where the epoch stands, the same on every rank and good for any layout.

        Args:
            batches: Micro-batches read since ``position``.

        """
        position = min(self.position + batches * self.rows_per_batch, self.rows)
        epoch = self.epoch
        if position == self.rows:
            position, epoch = 0, epoch + 1
        return {
            "seed": self.seed,
            "epoch": epoch,
            "position": position,
            "shuffle": self.shuffle,
            **self.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` stood, with any micro-batch size and number of ranks.

        Raises:
            ValueError: the epoch was begun on another number of rows or in another kind of order.

        """
        here = {"shuffle": self.shuffle, **self.identity}
        there = {name: value for name, value in state.items() if name not in _PLACE}
        if "tokens" not in there:  # of an older version
            here.pop("tokens", None)
        if state["position"] and there != here:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint stands at {self.what} {state['position']} of an epoch "
                f"with {_say(there)}; it now has {_say(here)}. "
                "Resume with the same data and settings, or from a checkpoint at the end of an epoch."
            )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


class GlobalOrderSampler(PlacedSampler):
    """Deals a global order out to data ranks, each row (or pack, see ``order``) to exactly one of them.

    Global batch k is rows ``[k·B·D, (k+1)·B·D)`` of the order, for micro-batches of B rows on D data ranks;
    within it, rank r reads every D-th row from the r-th on. So D ranks together read what one process with
    micro-batches of B·D reads, batch for batch. In the last, shorter one a rank may be left without a row: it
    reads ``NO_ROW``, whose example is unsupervised, so that every rank does the same number of steps and no
    row is read twice.

    It is a ``DistributedSampler`` so that Lightning sees the data distributed already and injects none.

    Args:
        dataset: Only its length is used.
        order: What an epoch reads; every row once if left out.
        micro_batch_size: B.
        num_replicas: D.
        rank: The data rank of this process, in [0, D).
        shuffle: Another order every epoch, or the order of the dataset.
        seed: Of the shuffling.

    """

    def __init__(
        self,
        dataset: Sized,
        *,
        micro_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        order: RowOrder | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dataset,
            micro_batch_size=micro_batch_size,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
        )
        self.order = RowOrder([Group(np.arange(len(dataset)))]) if order is None else order
        self.rows = len(self.order)

    @property
    @override
    def identity(self) -> dict[str, Any]:
        digest = getattr(self.dataset, "digest", None)
        return self.order.identity | ({"tokens": digest} if digest else {})

    @property
    @override
    def what(self) -> str:
        return self.order.what

    @override
    def __iter__(self) -> Iterator[Item]:
        """Rows of this rank from ``position`` on, in runs of ``micro_batch_size``."""
        items = self.order.items(self.seed, self.epoch, shuffle=self.shuffle)
        for start in range(self.position, self.rows, self.rows_per_batch):
            mine = items[start : start + self.rows_per_batch][self.rank :: self.num_replicas]
            yield from mine or [self.order.nothing]

    @override
    def __len__(self) -> int:
        """Rows of this rank in a whole epoch (``NO_ROW`` counts as one)."""
        full, rest = divmod(self.rows, self.rows_per_batch)
        tail = len(range(self.rank, rest, self.num_replicas)) or 1
        return full * self.micro_batch_size + (tail if rest else 0)


class SequentialOrderSampler(GlobalOrderSampler, SequentialSampler):  # type: ignore[misc]
    """The same in the order of the dataset.

    It is a ``SequentialSampler`` by name too, by which Lightning tells that nothing is shuffled.
    """

    def __init__(self, dataset: Sized, **options: Any) -> None:
        super().__init__(dataset, **options, shuffle=False)


class RowSampler(PlacedSampler):
    """The order of ``DistributedSampler``, which an epoch can go on in from any row.

    Ranks read equal numbers of rows: where they do not divide, the first of the epoch are read twice, as there.

    Args:
        dataset: Its length is used.
        whole_batches: Whether the loader drops a last batch that is not full.
        options: Those of ``PlacedSampler``.

    """

    def __init__(self, dataset: Sized, *, whole_batches: bool = False, **options: Any) -> None:
        super().__init__(dataset, **options)
        batch = self.micro_batch_size if whole_batches else 1
        self.rows = self.num_samples // batch * batch * self.num_replicas

    @property
    @override
    def identity(self) -> dict[str, Any]:
        return {"rows": len(self.dataset)}  # type: ignore[arg-type]

    @override
    def __iter__(self) -> Iterator[int]:
        whole: DistributedSampler[Any] = DistributedSampler(self.dataset, 1, 0, shuffle=self.shuffle, seed=self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        left = order[self.position :]
        missing = -len(left) % self.num_replicas
        return iter((left + list(islice(cycle(order), missing)))[self.rank :: self.num_replicas])


def _say(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in identity.items())
