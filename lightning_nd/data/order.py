"""What an epoch reads, and in which order: a pure function of a seed and an epoch."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lightning_nd.data.dataset import NO_ROW

#: A row, or the rows of a pack.
Item = int | tuple[int, ...]
T = TypeVar("T")


def global_order(rows: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """The order in which all ranks together read an epoch: a function of these arguments alone."""
    if not shuffle:
        return list(range(rows))
    # One generator per (seed, epoch). Their sum would make (0, 1) and (1, 0) the same order.
    return _permutation(rows, (seed * 1_000_003 + epoch) % 2**63)


def _permutation(size: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _seed(*parts: int | str) -> int:
    """An independent seed for each tuple of parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class Group:
    """Rows that are read ``weight`` times in an epoch.

    Args:
        rows: ``[n]`` their numbers in the dataset.
        weight: 1 reads each of them once. 2.5 reads each twice, and every other one a third time: the epochs take
            turns, so that after two epochs all have been read five times.

    """

    rows: npt.NDArray[np.int64]
    weight: float = 1.0

    def count(self, of: int) -> int:
        """How many of ``of`` items an epoch reads."""
        return int(self.weight * of + 0.5)  # halves up: `round` makes nothing of a half

    def draw(self, items: Sequence[T], seed: int, epoch: int, number: int) -> list[T]:
        """The items of an epoch; group ``number`` of its dataset."""
        n, rest = len(items), self.count(len(items))
        drawn: list[T] = []
        while rest >= n > 0:
            drawn += items
            rest -= n
        if rest:
            # A window that goes round one permutation, so that no item comes twice before all others have come once.
            order = _permutation(n, _seed("draw", seed, number))
            drawn += [items[order[i % n]] for i in range(epoch * rest, (epoch + 1) * rest)]
        return drawn


class RowOrder:
    """Epochs of single rows.

    Args:
        groups: The rows and their weights.

    """

    nothing: Item = NO_ROW
    what = "row"

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self._count([len(group.rows) for group in self.groups])

    def _count(self, items: list[int]) -> None:
        """Fix how much an epoch reads, given the number of items of every group.

        Raises:
            ValueError: a group of which no epoch would read anything.

        """
        self.size = 0
        for group, of in zip(self.groups, items, strict=True):
            count = group.count(of)
            if of and not count:
                raise ValueError(
                    f"a weight of {group.weight:g} on {of} {self.what}{'s' if of > 1 else ''} is less than half a"
                    f" {self.what} an epoch, so none would ever be read; give it at least {0.5 / of:.2g}, or take the"
                    " source out"
                )
            self.size += count

    def __len__(self) -> int:
        return self.size

    def items(self, seed: int, epoch: int, *, shuffle: bool) -> list[Item]:
        """The rows of an epoch, in order."""
        rows = [row for n, g in enumerate(self.groups) for row in g.draw(g.rows.tolist(), seed, epoch, n)]
        return [rows[i] for i in global_order(len(rows), seed, epoch, shuffle=shuffle)]

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a place in an epoch to mean the same."""
        weights = [(len(group.rows), group.weight) for group in self.groups]
        return {"rows": len(self)} | ({"weights": weights} if any(w != 1 for _, w in weights) else {})


class PackOrder(RowOrder):
    """Epochs of packs: rows laid end to end up to a length, none of them cut.

    Packs are formed anew every epoch, of the rows of one group; with a weight that is not whole they stay, so that
    the epochs can take turns. There are as many of them in every epoch.

    Args:
        groups: The rows and their weights; a weight counts packs.
        lengths: ``[rows]`` tokens of every row of the dataset, none above ``capacity``.
        capacity: Tokens of a full pack.

    """

    nothing: Item = (NO_ROW,)
    what = "pack"

    def __init__(self, groups: Sequence[Group], lengths: npt.NDArray[Any], capacity: int) -> None:
        self.groups = list(groups)
        self.lengths, self.capacity = lengths, capacity
        packs = [best_fit_decreasing(lengths[group.rows].tolist(), capacity) for group in self.groups]
        self._count([len(p) for p in packs])
        self.packs = sum(map(len, packs))

    def items(self, seed: int, epoch: int, *, shuffle: bool) -> list[Item]:
        """The packs of an epoch, in order: each a tuple of ascending row numbers."""
        packs: list[Item] = []
        for number, group in enumerate(self.groups):
            packs += group.draw(self._of_group(group, seed, epoch, number, shuffle), seed, epoch, number)
        return [packs[i] for i in global_order(len(packs), seed, epoch, shuffle=shuffle)]

    def _of_group(self, group: Group, seed: int, epoch: int, number: int, shuffle: bool) -> list[Item]:
        rows = group.rows
        if shuffle:
            turn = epoch if float(group.weight).is_integer() else 0
            rows = rows[_permutation(len(rows), _seed("pack", seed, turn, number))]
        packs = best_fit_decreasing(self.lengths[rows].tolist(), self.capacity)
        named: list[Item] = sorted(tuple(sorted(rows[pack].tolist())) for pack in packs)
        return named

    @property
    def efficiency(self) -> float:
        """The share of all places in packs that hold a token."""
        tokens = sum(int(self.lengths[group.rows].sum(dtype=np.int64)) for group in self.groups)
        return tokens / max(1, self.packs * self.capacity)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a place in an epoch to mean the same."""
        return {**super().identity, "pack": self.capacity}


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack items of given lengths: longest first, each into the fullest pack that has room.

    Items of one length are taken as they come, so another order of the same lengths gives as many packs, of the same
    lengths. O(n log capacity) time. Best-fit decreasing: D. S. Johnson, Near-optimal bin packing algorithms, 1973.

    Args:
        lengths: ``[n]`` each within [1, capacity].
        capacity: Of a pack.

    Returns:
        The numbers of the items of each pack.

    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left → packs
    rooms: list[int] = []  # the keys, ascending
    for item in order:
        length = lengths[item]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            number, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        packs[number].append(item)
        room -= length
        if room:
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            with_room[room].append(number)
    return packs
