"""Which tokens each context-parallel rank owns.

One coordinate system rules everything: the *global token index*. A batch of `rows` rows of `length` tokens
is one axis of `rows * length` indices; a `Layout` gives each rank ascending, disjoint intervals of it. Positions,
labels, documents, the transfers between ranks and the order of outputs all follow from that one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heapreplace
from math import ceil

import numpy as np

Interval = tuple[int, int]
Documents = tuple[Interval, ...]
"""Ascending, disjoint `[start, end)` intervals of global token indices that attend causally within themselves.
Tokens that lie in no document are padding: nothing attends to them and their attention output is zero."""

LAYOUTS = ("auto", "zigzag", "chunks", "contiguous")

# Prices of the layout score, in attended (query, key) pairs. Fetching one key/value row hides behind compute
# almost always, so it is cheap; a kernel call costs launch, merge and a partly filled tile.
_PAIRS_PER_ROW = 64
_PAIRS_PER_CALL = 20_000
_SMALLEST_CHUNK = 64
_BALANCED = 1.01


@dataclass(frozen=True)
class Layout:
    """Ownership of `rows * length` token indices by the ranks of a context-parallel group.

    `intervals[r]` are rank r's ascending, disjoint `[start, end)` intervals; every rank owns `rows * length / cp`
    tokens, the same columns of each row. `name` says how they were made.
    """

    intervals: tuple[tuple[Interval, ...], ...]
    length: int
    rows: int = 1
    name: str = "custom"

    @property
    def cp(self) -> int:
        """Number of ranks."""
        return len(self.intervals)

    @property
    def tokens(self) -> int:
        """Number of tokens on the global axis, all rows together."""
        return self.rows * self.length

    @property
    def local_tokens(self) -> int:
        """Number of tokens on each rank, all rows together."""
        return self.tokens // self.cp

    def indices(self, rank: int) -> np.ndarray:
        """Global token indices of `rank` in local order, int64 `[local_tokens]`."""
        return np.concatenate([np.arange(a, b) for a, b in self.intervals[rank]] or [np.arange(0)])

    def columns(self, rank: int) -> np.ndarray:
        """The columns of a row that `rank` owns, in local order, int64 `[length / cp]`."""
        own = self.indices(rank)
        return own[own < self.length]

    def order(self) -> np.ndarray:
        """Where each global token lies in the concatenation of all ranks' local tokens, int64 `[tokens]`."""
        owned = np.concatenate([self.indices(rank) for rank in range(self.cp)])
        where = np.empty(self.tokens, dtype=np.int64)
        where[owned] = np.arange(self.tokens)
        return where

    def with_rows(self, rows: int) -> Layout:
        """Give the layout of one row to each of `rows` rows, laid end to end on the global axis."""
        if self.rows != 1:
            raise ValueError(f"Layout.with_rows needs the layout of a single row, this one has {self.rows} rows.")
        if rows == 1:
            return self
        shifted = tuple(
            _join([(a + row * self.length, b + row * self.length) for row in range(rows) for a, b in own])
            for own in self.intervals
        )
        return Layout(shifted, self.length, rows, self.name)


def _join(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Sort and merge adjacent intervals, dropping empty ones."""
    joined: list[Interval] = []
    for a, b in sorted(intervals):
        if a == b:
            continue
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)


def _deal(length: int, owners: Sequence[Sequence[int]], name: str) -> Layout:
    """Layout in which rank r owns the equal chunks numbered `owners[r]`."""
    count = sum(map(len, owners))
    if length % count:
        raise ValueError(
            f"A {name} layout cuts a row into {count} equal chunks: {length} tokens do not divide. "
            f"Pad the row to {ceil(length / count) * count}."
        )
    size = length // count
    return Layout(tuple(_join([(c * size, (c + 1) * size) for c in own]) for own in owners), length, name=name)


@lru_cache(maxsize=64)
def zigzag(length: int, cp: int) -> Layout:
    """Rank r owns chunks r and 2·cp−1−r of 2·cp equal chunks: every rank does the same full-causal work.

    The striping is that of Zhu, ring-flash-attention, and of Llama 3 (arXiv:2407.21783, section 3.3.2).
    """
    return _deal(length, [(r, 2 * cp - 1 - r) for r in range(cp)], "zigzag")


@lru_cache(maxsize=64)
def contiguous(length: int, cp: int) -> Layout:
    """Rank r owns the r-th of cp equal intervals: fewest transfers, unbalanced for causal masks."""
    return _deal(length, [(r,) for r in range(cp)], "contiguous")


def chunks(
    length: int,
    cp: int,
    per_rank: int,
    documents: Documents,
    windows: Sequence[tuple[int | None, int]] = ((None, 1),),
    rows: int = 1,
) -> Layout:
    """Deal `cp * per_rank` equal chunks so that every rank owns `per_rank` of them and near equal work.

    Heaviest chunk first to the least loaded rank that has room, then swaps between the most loaded rank and the
    others while they help. `documents` and `windows` are those of `work_prefix`, over `rows` rows.
    """
    count = cp * per_rank
    work = _chunk_work(length, count, documents, windows, rows)
    load = np.zeros(cp)
    owners: list[list[int]] = [[] for _ in range(cp)]
    least = [(0.0, rank) for rank in range(cp)]  # a heap of the ranks that have room
    for chunk in np.argsort(-work, kind="stable").tolist():
        so_far, rank = least[0]
        owners[rank].append(chunk)
        load[rank] = so_far + work[chunk]
        if len(owners[rank]) < per_rank:
            heapreplace(least, (float(load[rank]), rank))
        else:
            heappop(least)
    _swap(owners, load, work)
    return _deal(length, owners, f"chunks{per_rank}")


def _swap(owners: list[list[int]], load: np.ndarray, work: np.ndarray, tries: int = 32) -> None:
    """Exchange one chunk of the most loaded rank with one of another rank while that lowers the maximum."""
    for _ in range(tries):
        top = int(load.argmax())
        mean = load.mean()
        if load[top] <= 1.005 * mean:
            return
        best: tuple[float, int, int, int] | None = None
        mine = work[owners[top]]
        for other in range(len(owners)):
            if other == top:
                continue
            moved = mine[:, None] - work[owners[other]][None, :]
            highest = np.maximum(load[top] - moved, load[other] + moved)
            flat = int(highest.argmin())
            i, j = divmod(flat, highest.shape[1])
            if highest[i, j] < load[top] - 1e-9 and (best is None or highest[i, j] < best[0]):
                best = (float(highest[i, j]), other, i, j)
        if best is None:
            return
        _, other, i, j = best
        delta = work[owners[top][i]] - work[owners[other][j]]
        owners[top][i], owners[other][j] = owners[other][j], owners[top][i]
        load[top] -= delta
        load[other] += delta


@lru_cache(maxsize=8)
def _bounds(documents: Documents) -> np.ndarray:
    """Starts and ends of the documents, int64 `[documents, 2]`."""
    return np.asarray(documents, dtype=np.int64)


def _pairs(n: np.ndarray, window: int | None) -> np.ndarray:
    """Attended pairs of the first n tokens of a document, each seeing at most `window` keys, itself included."""
    if window is None:
        return n * (n + 1) / 2
    head = np.minimum(n, window)
    return head * (head + 1) / 2 + (n - head) * window


def work_prefix(documents: Documents, at: np.ndarray, window: int | None = None) -> np.ndarray:
    """Attended pairs of all tokens before each global index of `at`, float64, same shape as `at`."""
    if not documents:
        return np.zeros(at.shape)
    bounds = _bounds(documents)
    start, end = bounds[:, 0], bounds[:, 1]
    before = np.concatenate([[0.0], np.cumsum(_pairs((end - start).astype(np.float64), window))])
    document = np.searchsorted(start, at, side="right") - 1
    known = np.maximum(document, 0)
    inside = _pairs(np.clip(np.minimum(at, end[known]) - start[known], 0, None).astype(np.float64), window)
    return np.where(document >= 0, before[known] + inside, 0.0)


def work(layout: Layout, documents: Documents, window: int | None = None) -> np.ndarray:
    """Attended (query, key) pairs of each rank, float64 `[cp]`."""
    rank, first, last = _spans(layout)
    at = work_prefix(documents, np.stack([first, last]), window)
    return np.bincount(rank, weights=at[1] - at[0], minlength=layout.cp)


@lru_cache(maxsize=32)
def _spans(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All intervals of all ranks as flat arrays: rank, start, end; ranks ascend, and starts within a rank."""
    rank = np.repeat(np.arange(layout.cp), [len(own) for own in layout.intervals])
    bounds = np.asarray([span for own in layout.intervals for span in own], dtype=np.int64).reshape(-1, 2)
    return rank, bounds[:, 0], bounds[:, 1]


def _chunk_work(
    length: int, count: int, documents: Documents, windows: Sequence[tuple[int | None, int]], rows: int
) -> np.ndarray:
    """Work of each of `count` equal columns of chunks, summed over rows and over layers of every window."""
    at = np.arange(rows)[:, None] * length + np.linspace(0, length, count + 1).astype(np.int64)[None]
    total = np.zeros(count)
    for window, layers in windows:
        total += layers * np.diff(work_prefix(documents, at, window), axis=1).sum(0)
    return total


def _rows_and_calls(layout: Layout, documents: Documents, window: int | None) -> tuple[int, int]:
    """Largest number over ranks of key/value rows fetched from others, and (an estimate) of kernel calls."""
    if not documents:
        return 0, 0
    bounds = _bounds(documents)
    rank, first, _ = _spans(layout)
    holder = np.maximum(np.searchsorted(bounds[:, 0], first, side="right") - 1, 0)
    back = np.where(bounds[holder, 1] > first, bounds[holder, 0], first)
    if window is not None:
        back = np.maximum(back, first - window + 1)
    back = np.minimum(back, first)
    # What a rank needs is the union of its reaches [back, first). Their ends ascend within a rank, so each adds
    # what lies beyond the end of the one before it.
    previous = np.where(np.diff(rank, prepend=-1) == 0, np.concatenate([[0], first[:-1]]), 0)
    reached = np.maximum(previous, back)
    foreign = first - reached - (_owned_before(layout, first) - _owned_before(layout, reached))
    rows = np.bincount(rank, weights=np.maximum(foreign, 0), minlength=layout.cp)
    pieces = np.bincount(rank, minlength=layout.cp)
    blocks = np.ceil((first - back) * pieces[rank] / layout.local_tokens)
    calls = np.bincount(rank, weights=1 + np.minimum(layout.cp - 1, blocks), minlength=layout.cp)
    return int(rows.max()), int(calls.max())


def _owned_before(layout: Layout, at: np.ndarray) -> np.ndarray:
    """For every interval of `_spans`, how many tokens before index `at` its rank owns."""
    rank, first, last = _spans(layout)
    offset = np.concatenate([[0], np.cumsum(last - first)])
    found = np.searchsorted(rank * layout.tokens + first, rank * layout.tokens + at, side="right") - 1
    known = np.maximum(found, 0)
    count = offset[known] + np.minimum(at - first[known], last[known] - first[known])
    return (
        np.where((found >= 0) & (rank[known] == rank), count, rank * layout.local_tokens) - rank * layout.local_tokens
    )


def padded_length(length: int, cp: int, layout: str = "zigzag", multiple: int = 1) -> int:
    """Smallest length of at least `length` that the layout can cut, and whose share divides by `multiple`."""
    parts = {"zigzag": 2, "contiguous": 1, "chunks": 4, "chunks4": 4, "chunks8": 8, "chunks16": 16}[layout]
    # Each rank's share must divide by both its chunks and `multiple` (the tensor-parallel sequence shards).
    share = max(1, ceil(length / cp))
    unit = int(np.lcm(parts, multiple))
    return ceil(share / unit) * unit * cp


@dataclass(frozen=True)
class LayoutChoice:
    """A layout with the figures that it was chosen by: `imbalance` is max/mean work, `cost` in attended pairs.

    `others` are the names and costs of what it was compared with.
    """

    layout: Layout
    imbalance: float
    rows: int
    calls: int
    cost: float
    others: tuple[tuple[str, float], ...] = ()

    @property
    def reason(self) -> str:
        """Why it was chosen, in words."""
        said = f"max/mean work {self.imbalance:.2f}"
        costs = ", ".join(f"{name} would cost {cost / max(self.cost, 1):.2f}×" for name, cost in self.others)
        return f"{said}; in work, transfers and calls {costs}" if costs else said


def price(layout: Layout, documents: Documents, windows: Sequence[tuple[int | None, int]]) -> LayoutChoice:
    """Score a layout: largest attention work of a rank + the KV rows that it fetches + its kernel calls."""
    load = np.zeros(layout.cp)
    fetched = called = 0
    for window, layers in windows:
        load += layers * work(layout, documents, window)
        rows, calls = _rows_and_calls(layout, documents, window)
        fetched += layers * rows
        called += layers * calls
    mean = float(load.mean())
    cost = float(load.max()) + _PAIRS_PER_ROW * fetched + _PAIRS_PER_CALL * called
    return LayoutChoice(layout, float(load.max()) / mean if mean else 1.0, fetched, called, cost)


def move_rows(documents: Documents, length: int, padded: int) -> Documents:
    """Documents of rows of `length` tokens, when every row is padded at its end to `padded` tokens."""
    if length == padded:
        return documents
    shift = padded - length
    return tuple((a + a // length * shift, b + a // length * shift) for a, b in documents)


@lru_cache(maxsize=128)
def choose_layout(
    length: int,
    documents: Documents,
    cp: int,
    *,
    rows: int = 1,
    windows: tuple[tuple[int | None, int], ...] = ((None, 1),),
    layout: str = "auto",
    multiple: int = 1,
) -> LayoutChoice:
    """Pick the cheapest layout of `rows` rows of `length` tokens for these documents.

    Args:
        length: tokens of a row before padding.
        documents: global bounds, row i starting at index `i * length`.
        cp: number of context-parallel ranks.
        rows: rows of the micro-batch; all share the columns that a rank owns.
        windows: `(window, layers)` for every kind of attention layer of the model, None for full causal.
        layout: `"auto"`, `"zigzag"`, `"chunks"` or `"contiguous"`.
        multiple: each rank's share of a row divides by this (tp, when the sequence is sharded over tp too).

    Raises:
        ValueError: for an unknown layout name.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"Unknown layout {layout!r}: choose one of {', '.join(map(repr, LAYOUTS))}.")
    best: LayoutChoice | None = None
    tried = []
    for name in _names(length, cp, layout):
        size = padded_length(length, cp, name, multiple)
        moved = move_rows(documents, length, size)
        if name == "zigzag":
            one = zigzag(size, cp)
        elif name == "contiguous":
            one = contiguous(size, cp)
        elif best is not None and best.imbalance < _BALANCED:
            break  # finer chunks could only add calls
        else:
            one = chunks(size, cp, int(name.removeprefix("chunks")), moved, windows, rows)
        choice = price(one.with_rows(rows), moved, windows)
        tried.append(choice)
        if best is None or choice.cost < best.cost:
            best = choice
    assert best is not None
    return replace(best, others=tuple((c.layout.name, c.cost) for c in tried if c is not best))


def _names(length: int, cp: int, layout: str) -> list[str]:
    """The layouts to compare, coarsest first; chunks only where each still holds a fair number of tokens."""
    fine = [f"chunks{n}" for n in (4, 8, 16) if length >= cp * n * _SMALLEST_CHUNK]
    if layout == "auto":
        return ["zigzag", "contiguous", *fine]
    return (fine or ["chunks4"]) if layout == "chunks" else [layout]
