"""What each rank computes and fetches for one layout of one pack of documents.

Plans are pure Python on the host and the same computation on every rank, so both ends of a transfer know its
shape without asking. Documents are intervals and a rank's tokens ascend, which leaves very few shapes: a rank's
own tokens attend to each other in one causal call with cuts between documents, and a stretch of queries reaches
back to another rank's keys through one document only, the one that holds its first token, as one dense rectangle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise, zip_longest
from math import ceil

from lightning_nd.attention.layout import Documents, Interval, Layout

_SMALLEST_PIECE = 32


class Kind(Enum):
    """Which keys of a rectangle its queries see."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"


@dataclass(frozen=True)
class Rect:
    """Query rows `[q0, q1)` against key/value rows `[k0, k1)`, both in local coordinates.

    FULL: every pair. CAUSAL: a square; query i sees keys 0..i, within the pieces that `cuts` (ascending rows of the
    rectangle, both ends included) separate. BAND: query i sees key j when `0 <= i + offset - j < window`.
    `first` says that no earlier rectangle has touched these query rows.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind
    offset: int = 0
    window: int = 0
    cuts: tuple[int, ...] = ()
    first: bool = False

    @property
    def pairs(self) -> int:
        """Number of attended (query, key) pairs."""
        n, m = self.q1 - self.q0, self.k1 - self.k0
        if self.kind is Kind.FULL:
            return n * m
        if self.kind is Kind.CAUSAL:
            return sum((b - a) * (b - a + 1) // 2 for a, b in self.pieces())
        return sum(max(0, min(m, i + self.offset + 1) - max(0, i + self.offset - self.window + 1)) for i in range(n))

    def pieces(self) -> Iterator[Interval]:
        """The documents of a CAUSAL rectangle, as rows of the rectangle."""
        cuts = self.cuts or (0, self.q1 - self.q0)
        return pairwise(cuts)

    def by_document(self) -> Iterator[Rect]:
        """The same pairs in rectangles without cuts."""
        if not self.cuts:
            yield self
            return
        for a, b in self.pieces():
            at = self.q0 + a, self.q0 + b, self.k0 + a, self.k0 + b
            yield Rect(*at, self.kind, self.offset, self.window, first=self.first)


@dataclass(frozen=True)
class Step:
    """One exchange and the rectangles computed on what it brings.

    `source` is the rank whose keys and values are used, `fetch` the rows of it that this rank receives (in the
    source's local coordinates, ascending and disjoint; the rectangles' key rows count within their concatenation).
    `target` is the rank that receives this rank's rows `give` in the same step. `hop` is the distance to both, 0 for
    a rank's own rows.
    """

    source: int
    target: int
    rects: tuple[Rect, ...]
    fetch: tuple[Interval, ...] = ()
    give: tuple[Interval, ...] = ()
    hop: int = 0


@dataclass(frozen=True)
class Plan:
    """The steps of one rank, its own tokens first.

    `tokens` is the number of local rows, `hops` the last step at which any rank of the group computes (a ring needs
    to turn only that far). `forward` and `backward` are the same steps, cut into pieces that keep what is in flight
    within two blocks, a block being `tokens` rows.
    """

    rank: int
    cp: int
    tokens: int
    steps: tuple[Step, ...]
    hops: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]

    @property
    def pairs(self) -> int:
        """Attended pairs of this rank."""
        return sum(rect.pairs for step in self.steps for rect in step.rects)

    @property
    def fetched_rows(self) -> int:
        """Key/value rows that this rank receives."""
        return sum(b - a for step in self.steps for a, b in step.fetch)

    @property
    def calls(self) -> int:
        """Rectangles that this rank computes."""
        return sum(len(step.rects) for step in self.steps)


class _Owned:
    """One rank's intervals with what is needed to search them and to turn global indices into local ones."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.intervals = intervals
        self.ends = [b for _, b in intervals]
        self.starts = [a for a, _ in intervals]
        self.offsets = [0]
        for a, b in intervals:
            self.offsets.append(self.offsets[-1] + b - a)


@lru_cache(maxsize=64)
def _owned(layout: Layout) -> tuple[_Owned, ...]:
    return tuple(_Owned(own) for own in layout.intervals)


class _Packed:
    """Documents, searchable."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.starts = [a for a, _ in documents]
        self.longest = max((b - a for a, b in documents), default=0)

    def over(self, a: int, b: int) -> Iterator[Interval]:
        """Documents that share a token with `[a, b)`, clipped to it."""
        i = max(0, bisect_right(self.starts, a) - 1)
        while i < len(self.documents) and self.documents[i][0] < b:
            start, end = self.documents[i]
            if end > a:
                yield max(a, start), min(b, end)
            i += 1

    def holder(self, token: int) -> Interval | None:
        """The document that `token` lies in, None for padding."""
        i = bisect_right(self.starts, token) - 1
        if i < 0 or self.documents[i][1] <= token:
            return None
        return self.documents[i]


@lru_cache(maxsize=16)
def _packed(documents: Documents) -> _Packed:
    return _Packed(documents)


@lru_cache(maxsize=512)
def build_plan(
    layout: Layout, documents: Documents, rank: int, window: int | None = None, *, ring: bool = False
) -> Plan:
    """The plan of `rank`: steps s = 0..cp−1 use the keys and values of rank − s.

    Args:
        layout: who owns which tokens.
        documents: global bounds; tokens outside are padding and take part in nothing.
        rank: rank in the context-parallel group.
        window: a query sees this many keys, itself included; None for full causal.
        ring: whole key/value blocks travel from neighbour to neighbour, in place of the rows needed.

    Raises:
        ValueError: if documents overlap, are not ascending, or leave the global axis.
    """
    _check(layout, documents)
    cp, owned, packed = layout.cp, _owned(layout), _packed(documents)
    if window is not None and window >= packed.longest:
        window = None
    own = owned[rank]
    steps, fetched = [Step(rank, rank, _local(own, packed, window))], [[0]]
    for s in range(1, cp):
        source, target = (rank - s) % cp, (rank + s) % cp
        rects, fetch = _wanted(own, owned[source], packed, window)
        fetched.append([count_rows(_wanted(owned[r], owned[r - s], packed, window)[1]) for r in range(cp)])
        if ring:
            everything = ((0, layout.local_tokens),)
            steps.append(Step(source, target, rects, everything, everything, s))
            continue
        give = _wanted(owned[target], own, packed, window)[1]
        steps.append(Step(source, target, _rebase(rects, fetch), fetch, give, s))
    hops = max((s for s in range(1, cp) if any(fetched[s])), default=0)
    # In flight in forward: the block at hand, the next one, and a copy for the wire where rows are scattered. In
    # backward those, and gradients: what a kernel returns, the sum being made, one leaving, one arriving.
    block = layout.local_tokens
    half, quarter = ceil(block / 2), ceil(block / 4)
    if ring:
        made = tuple(steps[: hops + 1])
        backward = tuple(_cut_ring(made, 4, max(map(len, layout.intervals))))
        return Plan(rank, cp, block, made, hops, made, backward)
    made = tuple(steps)
    forward = tuple(_cut_direct(made, block, half, [1] * cp))
    backward = tuple(_cut_direct(made, quarter, quarter, [ceil(max(rows) / quarter) for rows in fetched]))
    return Plan(rank, cp, block, made, hops, forward, backward)


def most_fetched(layout: Layout, documents: Documents, window: int | None) -> int:
    """The most key/value rows that a rank receives with direct transfers."""
    cp, owned, packed = layout.cp, _owned(layout), _packed(documents)
    pairs = [[(owned[r], owned[r - s]) for s in range(1, cp)] for r in range(cp)]
    return max(sum(count_rows(_wanted(q, k, packed, window)[1]) for q, k in row) for row in pairs)


def count_rows(rows: Sequence[Interval]) -> int:
    """Number of rows in the intervals."""
    return sum(b - a for a, b in rows)


def _check(layout: Layout, documents: Documents) -> None:
    last = 0
    for a, b in documents:
        if a < last or b <= a or b > layout.tokens:
            raise ValueError(
                f"Document [{a}, {b}) is empty, overlaps the one before it (which ends at {last}), or leaves the "
                f"{layout.tokens} tokens of the layout: documents are ascending disjoint [start, end) intervals."
            )
        last = b


def _cut_direct(steps: Sequence[Step], most: int, scattered: int, pieces: Sequence[int]) -> Iterator[Step]:
    """Cut the rows of every transfer into pieces of at most `most` rows, `scattered` if they are several intervals.

    Both ends of a transfer know its rows and so cut alike. `pieces` is the number that a step is cut into if they do
    not get tiny, the same on all ranks so that they keep time with each other.
    """
    for step, wanted in zip(steps, pieces, strict=True):
        fetches, gives = (
            _pieces(count_rows(rows), most if len(rows) <= 1 else scattered, wanted) for rows in (step.fetch, step.give)
        )
        if len(fetches) <= 1 and len(gives) <= 1:
            yield step
            continue
        for (a, b), (c, d) in zip_longest(fetches, gives, fillvalue=(0, 0)):
            yield replace(
                step,
                rects=tuple(_cut_keys(step.rects, [(a, b)])),
                fetch=_portion(step.fetch, a, b),
                give=_portion(step.give, c, d),
            )


def _cut_ring(steps: Sequence[Step], pieces: int, stripes: int) -> Iterator[Step]:
    """Cut the blocks of a ring: one piece travels all the way, then the next.

    A piece takes its share of each of `stripes` parts of a block, since early rows are seen by more ranks.
    """
    own, *travels = steps
    yield own
    if not travels:
        return
    tokens = count_rows(travels[0].fetch)
    bounds = [(tokens * i // stripes, tokens * (i + 1) // stripes) for i in range(stripes)]
    for p in range(pieces):
        shares = ((a + (b - a) * p // pieces, a + (b - a) * (p + 1) // pieces) for a, b in bounds)
        if rows := tuple((a, b) for a, b in shares if a < b):
            for step in travels:
                yield replace(step, rects=tuple(_cut_keys(step.rects, rows)), fetch=rows, give=rows)


def _pieces(rows: int, most: int, wanted: int = 1) -> list[Interval]:
    """Cut `rows` rows into equal pieces of at most `most`, and into `wanted` if they do not get tiny."""
    number = max(ceil(rows / most), min(wanted, rows // _SMALLEST_PIECE))
    return [(rows * i // number, rows * (i + 1) // number) for i in range(number)]


def _portion(rows: Sequence[Interval], start: int, end: int) -> tuple[Interval, ...]:
    """The part `[start, end)` of the concatenation of `rows`."""
    found, at = [], 0
    for a, b in rows:
        c, d = max(start, at), min(end, at + b - a)
        if c < d:
            found.append((a + c - at, a + d - at))
        at += b - a
    return tuple(found)


def _cut_keys(rects: Sequence[Rect], rows: Sequence[Interval]) -> list[Rect]:
    """What rectangles have in the key rows of some intervals, key rows counted within their concatenation."""
    found: list[Rect] = []
    for rect in rects:
        base = 0
        for start, end in rows:
            k0, k1 = max(rect.k0, start), min(rect.k1, end)
            at, base = base + k0 - start, base + end - start
            if k0 >= k1:
                continue
            moved = replace(rect, k0=at, k1=at + k1 - k0)
            if rect.kind is Kind.FULL:
                before = found[-1] if found and found[-1].kind is Kind.FULL else None
                if before and (before.q0, before.q1, before.k1) == (rect.q0, rect.q1, at):
                    moved = replace(moved, k0=found.pop().k0)
                found.append(moved)
                continue
            assert rect.kind is Kind.BAND, "the keys of other ranks lie before the queries"
            offset, keys = rect.offset - (k0 - rect.k0), k1 - k0
            first, last = max(0, -offset), min(rect.q1 - rect.q0, rect.window + keys - 1 - offset)
            if first < last:  # the rows that see a key at all
                found.append(replace(moved, q0=rect.q0 + first, q1=rect.q0 + last, offset=offset + first))
    return found


def _local(own: _Owned, packed: _Packed, window: int | None) -> tuple[Rect, ...]:
    """A rank's queries against its own keys."""
    if window is None:
        return _causal(own, packed)
    rects = []
    for (a, b), base in zip(own.intervals, own.offsets, strict=False):
        for start, end in packed.over(a, b):
            q0, q1 = base + start - a, base + end - a
            if end - start <= window:
                rects.append(Rect(q0, q1, q0, q1, Kind.CAUSAL, first=True))
            else:
                rects.append(Rect(q0, q1, q0, q1, Kind.BAND, 0, window, first=True))
    return (*rects, *_remote(own, own, packed, window))


def _causal(own: _Owned, packed: _Packed) -> tuple[Rect, ...]:
    """One causal rectangle for each stretch of own tokens without padding, cut where the document changes.

    Tokens of one document are neighbours in local order, so a document that skips other ranks' tokens is still one
    piece of the rectangle.
    """
    rects: list[Rect] = []
    cuts: list[int] = []
    origin = position = 0
    document: Interval | None = None
    for (a, b), base in zip(own.intervals, own.offsets, strict=False):
        for start, end in packed.over(a, b):
            at, holder = base + start - a, packed.holder(start)
            if cuts and at == position:
                if holder != document:
                    cuts.append(at - origin)
            else:
                if cuts:
                    rects.append(_square(origin, position, cuts))
                origin, cuts = at, [0]
            document, position = holder, base + end - a
    if cuts:
        rects.append(_square(origin, position, cuts))
    return tuple(rects)


def _square(start: int, end: int, cuts: list[int]) -> Rect:
    return Rect(start, end, start, end, Kind.CAUSAL, cuts=(*cuts, end - start), first=True)


@lru_cache(maxsize=4096)
def _wanted(q: _Owned, k: _Owned, packed: _Packed, window: int | None) -> tuple[tuple[Rect, ...], tuple[Interval, ...]]:
    """What one rank computes on the keys of another, and the rows that it needs for that."""
    rects = _remote(q, k, packed, window)
    return rects, _key_rows(rects)


@lru_cache(maxsize=256)
def _reaches(q: _Owned, packed: _Packed, window: int | None) -> tuple[tuple[int, int, int, int], ...]:
    """Stretches of queries that see keys before themselves: first local row, first token, end, first key token."""
    found = []
    for (a, b), base in zip(q.intervals, q.offsets, strict=False):
        document = packed.holder(a)
        if document is not None and document[0] < a:
            low = document[0] if window is None else max(document[0], a - window + 1)
            found.append((base, a, min(b, document[1]), low))
    return tuple(found)


def _remote(q: _Owned, k: _Owned, packed: _Packed, window: int | None) -> tuple[Rect, ...]:
    """Queries against keys that lie before the query's interval, key rows in the source's local coordinates."""
    rects: list[Rect] = []
    for base, a, last, low in _reaches(q, packed, window):
        i, j = bisect_right(k.ends, low), bisect_left(k.starts, a)
        if i >= j:
            continue
        if window is None:
            k0 = k.offsets[i] + max(0, low - k.starts[i])
            rect = Rect(base, base + last - a, k0, k.offsets[j], Kind.FULL)
            before = rects[-1] if rects else None
            if before and before.q1 == rect.q0 and (before.k0, before.k1) == (rect.k0, rect.k1):
                rect = Rect(before.q0, rect.q1, rect.k0, rect.k1, Kind.FULL)
                rects.pop()
            rects.append(rect)
            continue
        for n in range(i, j):
            start, end = max(low, k.starts[n]), k.ends[n]
            stop = min(last, end - 1 + window)
            k0 = k.offsets[n] + start - k.starts[n]
            kind = Kind.FULL if stop - 1 - start < window else Kind.BAND
            band = (a - start, window) if kind is Kind.BAND else (0, 0)
            rects.append(Rect(base, base + stop - a, k0, k0 + end - start, kind, *band))
    return tuple(rects)


def _key_rows(rects: Sequence[Rect]) -> tuple[Interval, ...]:
    """The union of the rectangles' key rows, as ascending disjoint intervals."""
    rows: list[Interval] = []
    for k0, k1 in sorted((rect.k0, rect.k1) for rect in rects):
        if rows and k0 <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(rows[-1][1], k1))
        else:
            rows.append((k0, k1))
    return tuple(rows)


def _rebase(rects: Sequence[Rect], fetch: tuple[Interval, ...]) -> tuple[Rect, ...]:
    """Count the rectangles' key rows within the concatenation of the fetched rows."""
    if not rects:
        return ()
    starts = [a for a, _ in fetch]
    bases = [0]
    for a, b in fetch:
        bases.append(bases[-1] + b - a)
    moved = []
    for rect in rects:
        i = bisect_right(starts, rect.k0) - 1
        k0 = bases[i] + rect.k0 - starts[i]
        moved.append(Rect(rect.q0, rect.q1, k0, k0 + rect.k1 - rect.k0, rect.kind, rect.offset, rect.window, rect.cuts))
    return tuple(moved)
