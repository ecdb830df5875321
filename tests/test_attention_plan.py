"""Layouts and plans: every pair is computed once, work is balanced, nothing needless is sent, and it is cheap."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nd.attention import layout as layouts
from lightning_nd.attention import plan as plans
from lightning_nd.attention.layout import Documents, Layout, choose_layout, chunks, contiguous, work, zigzag
from lightning_nd.attention.plan import Kind, Plan, Step, build_plan, most_fetched

LONG = 131_072


def seen(tokens: int, documents: Documents, window: int | None) -> np.ndarray:
    """The mask, written out."""
    document = np.full(tokens, -1)
    for number, (a, b) in enumerate(documents):
        document[a:b] = number
    i = np.arange(tokens)
    mask = (i[:, None] >= i[None]) & (document[:, None] == document[None]) & (document >= 0)[:, None]
    return mask if window is None else mask & (i[:, None] - i[None] < window)


def drawn_pairs(plan: Plan, layout: Layout, steps: tuple[Step, ...]) -> np.ndarray:
    """How often some steps of a rank's plan compute each (query, key) pair of global indices."""
    count = np.zeros((layout.tokens, layout.tokens), dtype=int)
    queries = layout.indices(plan.rank)
    for step in steps:
        keys = layout.indices(step.source)
        if step.source != plan.rank:
            keys = np.concatenate([keys[a:b] for a, b in step.fetch] or [keys[:0]])
        for rect in step.rects:
            i, j = np.arange(rect.q1 - rect.q0)[:, None], np.arange(rect.k1 - rect.k0)[None]
            if rect.kind is Kind.FULL:
                inside = np.ones((len(i), j.shape[1]), dtype=bool)
            elif rect.kind is Kind.BAND:
                inside = (i + rect.offset >= j) & (i + rect.offset - j < rect.window)
            else:
                piece = np.searchsorted(np.asarray(rect.cuts or (0, len(i)))[1:], np.arange(len(i)), side="right")
                inside = (i >= j) & (piece[:, None] == piece[None])
            assert inside.any(1).all(), f"a row of {rect} sees nothing"
            assert rect.pairs == inside.sum()
            count[np.ix_(queries[rect.q0 : rect.q1], keys[rect.k0 : rect.k1])] += inside
    return count


@st.composite
def packs(draw) -> tuple[int, Documents]:
    at, documents = 0, []
    for _ in range(draw(st.integers(1, 7))):
        at += draw(st.sampled_from((0, 0, 3)))
        size = draw(st.integers(1, 30))
        documents.append((at, at + size))
        at += size
    return at + draw(st.sampled_from((0, 5))), tuple(documents)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    pack=packs(),
    cp=st.integers(1, 5),
    rows=st.integers(1, 2),
    kind=st.sampled_from(("auto", "zigzag", "chunks", "contiguous")),
    window=st.none() | st.integers(1, 70),
    ring=st.booleans(),
)
def test_plans_compute_every_pair_exactly_once(pack, cp, rows, kind, window, ring):
    length, documents = pack
    documents = tuple((a + row * length, b + row * length) for row in range(rows) for a, b in documents)
    layout = choose_layout(length, documents, cp, rows=rows, layout=kind, windows=((window, 1),)).layout
    documents = layouts.move_rows(documents, length, layout.length)
    made = [build_plan(layout, documents, rank, window, ring=ring) for rank in range(cp)]
    wanted = seen(layout.tokens, documents, window)
    for way in ("steps", "forward", "backward"):
        assert (sum(drawn_pairs(plan, layout, getattr(plan, way)) for plan in made) == wanted).all(), way
    assert [plan.pairs for plan in made] == work(layout, documents, window).astype(int).tolist()
    if not ring:
        assert most_fetched(layout, documents, window) == max(plan.fetched_rows for plan in made)
    for plan in made:
        for s, step in enumerate(plan.steps[1:], 1):  # both ends of a transfer agree on its rows
            assert made[step.target].steps[s].fetch == step.give
            assert made[step.source].steps[s].give == step.fetch
            if not ring:
                assert bool(step.fetch) == bool(step.rects), "rows are fetched that nothing is computed on"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(pack=packs(), cp=st.integers(2, 5), kind=st.sampled_from(("zigzag", "chunks")), ring=st.booleans())
def test_pieces_bound_what_is_in_flight_and_both_ends_cut_alike(pack, cp, kind, ring):
    length, documents = pack
    layout = choose_layout(length, documents, cp, layout=kind).layout
    documents = layouts.move_rows(documents, length, layout.length)
    made = [build_plan(layout, documents, rank, ring=ring) for rank in range(cp)]
    for way in ("forward", "backward"):
        gone: dict[tuple[int, int], list] = {(a, b): [] for a in range(cp) for b in range(cp)}
        came: dict[tuple[int, int], list] = {(a, b): [] for a in range(cp) for b in range(cp)}
        for plan in made:
            for step in getattr(plan, way)[1:]:
                gone[plan.rank, step.target] += [step.give] * bool(step.give)
                came[step.source, plan.rank] += [step.fetch] * bool(step.fetch)
                for rows in (step.fetch, step.give):
                    size = sum(b - a for a, b in rows)
                    if way == "backward":
                        assert size <= math.ceil(plan.tokens / 4) + (len(layout.intervals[0]) if ring else 0)
                    elif len(rows) > 1:
                        assert size <= math.ceil(plan.tokens / 2)
        assert gone == came


@pytest.mark.parametrize("kind", ["zigzag", "chunks", "contiguous", "auto"])
@pytest.mark.parametrize(("length", "cp", "multiple"), [(1, 8, 1), (13, 4, 1), (100, 3, 2), (1000, 4, 3), (777, 2, 4)])
def test_layouts_are_partitions_with_equal_shares(kind, length, cp, multiple):
    layout = choose_layout(length, ((0, length),), cp, layout=kind, multiple=multiple).layout
    owned = np.concatenate([layout.indices(rank) for rank in range(cp)])
    assert sorted(owned) == list(range(layout.length))
    assert {len(layout.indices(rank)) for rank in range(cp)} == {layout.length // cp}
    assert layout.length // cp % multiple == 0
    assert 0 <= layout.length - length < cp * multiple * 8
    assert (
        np.concatenate([layout.indices(rank) for rank in range(cp)])[layout.order()] == np.arange(layout.length)
    ).all()
    for own in layout.intervals:
        assert all(a < b for a, b in own)
        assert all(b < c for (_, b), (c, _) in pairwise(own))


def pack_of(kind: str, seed: int) -> Documents:
    """Document lengths as in chat data, with a heavy tail, or one long one with many short ones."""
    draw, at, found = random.Random(seed), 0, []
    while at < LONG:
        short = int(draw.lognormvariate(math.log(900), 1.0))
        size = {
            "full": LONG,
            "chat": short,
            "heavy tail": int(draw.lognormvariate(math.log(3000), 1.5)),
            "long first": LONG // 2 if at == 0 else short,
            "long last": short if at < LONG // 2 else LONG,
            "mostly one": LONG * 4 // 5 if at == 0 else short,
            "equal": 256,
        }[kind]
        size = max(8, min(size, LONG - at))
        found.append((at, min(LONG, at + size)))
        at += size
    return tuple(found)


@pytest.mark.parametrize("cp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["full", "chat", "heavy tail", "long first", "long last", "mostly one", "equal"])
def test_work_is_balanced_at_128k(kind, cp):
    ratios = []
    for seed in range(1 if kind == "full" else 6):
        documents = pack_of(kind, seed)
        layout = choose_layout(LONG, documents, cp).layout
        pairs = [build_plan(layout, documents, rank).pairs for rank in range(cp)]
        assert sum(pairs) == sum((b - a) * (b - a + 1) // 2 for a, b in documents)
        ratios.append(max(pairs) * cp / sum(pairs))
    assert sum(ratios) / len(ratios) <= 1.05
    assert max(ratios) <= 1.10


@pytest.mark.parametrize("cp", [4, 8, 16])
def test_a_window_fetches_what_it_needs(cp):
    window, documents = 4096, ((0, LONG),)
    layout = choose_layout(LONG, documents, cp, windows=((window, 1),)).layout
    for rank in range(cp):
        plan = build_plan(layout, documents, rank, window)
        own = np.zeros(LONG, dtype=bool)
        own[layout.indices(rank)] = True
        needed = np.zeros(LONG, dtype=bool)
        for a, b in layout.intervals[rank]:
            needed[max(0, a - window + 1) : b] = True
        assert plan.fetched_rows <= 1.2 * (needed & ~own).sum()
        assert all(step.rects for step in plan.steps[1:] if step.fetch)


def test_documents_that_end_at_shards_send_nothing():
    layout = contiguous(4096, 4)
    documents = tuple((a, a + 256) for a in range(0, 4096, 256))
    for rank in range(4):
        plan = build_plan(layout, documents, rank)
        assert (plan.fetched_rows, plan.calls, plan.hops) == (0, 1, 0)
        assert not any(step.give for step in plan.steps)
        assert len(build_plan(layout, documents, rank, ring=True).steps) == 1


def test_direct_moves_less_than_a_ring():
    layout, documents = zigzag(8192, 8), ((0, 8192),)
    direct = [build_plan(layout, documents, rank).fetched_rows for rank in range(8)]
    ring = [build_plan(layout, documents, rank, ring=True).fetched_rows for rank in range(8)]
    assert sum(direct) / sum(ring) == pytest.approx(0.75, abs=0.01)


def clear() -> None:
    for module in (layouts, plans):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def test_a_new_pack_of_500_documents_is_planned_without_a_full_search():
    """Counted, not timed: the plan looks at no pair of tokens and at each document a few times."""
    documents = tuple((a, a + 262) for a in range(0, 500 * 262, 262))
    clear()
    choice = choose_layout(500 * 262, documents, 16)
    plan = build_plan(choice.layout, documents, 3)
    assert plan.calls <= 16 * 8
    assert build_plan(choice.layout, documents, 3) is plan
    assert choose_layout(500 * 262, documents, 16) is choice


def test_documents_must_be_ascending_and_inside():
    layout = zigzag(16, 2)
    for documents in (((0, 9), (8, 16)), ((0, 17),), ((4, 4),), ((8, 12), (0, 4))):
        with pytest.raises(ValueError, match="ascending disjoint"):
            build_plan(layout, documents, 0)


def test_lengths_that_do_not_divide_name_the_length_that_does():
    with pytest.raises(ValueError, match="Pad the row to 12"):
        zigzag(10, 2)
    with pytest.raises(ValueError, match="Unknown layout 'striped'"):
        choose_layout(16, ((0, 16),), 2, layout="striped")


def test_rows_share_columns():
    layout = chunks(64, 2, 4, ((0, 64), (64, 80)), rows=2).with_rows(2)
    for rank in range(2):
        own = layout.indices(rank)
        assert (own[own < 64] == own[own >= 64] - 64).all()
        assert (layout.columns(rank) == own[own < 64]).all()


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_of_a_pack(tmp_path, ending):
    from lightning_nd.attention.draw import draw_attention

    documents = ((0, 300), (300, 310), (320, 1000))
    layout = choose_layout(1024, documents, 4, layout="chunks").layout
    path = draw_attention(tmp_path / f"pack.{ending}", layout, documents, 100, title="a pack")
    content = path.read_bytes()
    if ending == "svg":
        assert b"chunks" in content or b"<path" in content
        return
    from matplotlib.image import imread

    assert content.startswith(b"\x89PNG")
    pixels = imread(path)[..., :3].reshape(-1, 3)
    assert len(np.unique((pixels * 255).astype(int), axis=0)) > 8, "the ranks' colours are missing"
