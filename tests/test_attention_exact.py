"""Context-parallel attention against dense one-process attention: output and all gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from attention_cases import Case, check, compare, dense, pack, sharded
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

S = 96
PACKS = {
    "full": ((S,),),
    "short documents": (pack(S, 0, 1, 9),),
    "one long": ((3, 61, 2, 1, *pack(29, 1, 1, 8)),),
    "empty tail": ((20, 31, -45),),
    "right-padded": ((70, -26), (96,), (1, -95)),
    "left-padded": ((-26, 70), (96,), (-95, 1)),
    "padding inside": ((-5, 30, -11, 40, -10),),
    "packed rows": (pack(S, 2), pack(S, 3), (S,)),
    "all padding": ((-96,),),
}
WAYS = (("zigzag", "direct"), ("contiguous", "ring"), ("chunks", "direct"), ("zigzag", "ulysses"), ("chunks", "ring"))


def run(pool, world_size: int, cases: list[Case], dtype=torch.float64, tolerance: float = 1e-10) -> None:
    wrong = [line for rank in pool.run(check, world_size, cases, dtype, tolerance) for line in rank]
    assert not wrong, "\n".join(wrong)


def mixed(rows: tuple, **fixed) -> list[Case]:
    """Every window with and without sinks, the layouts and methods taking turns."""
    ways = cycle(WAYS)
    return [
        Case(rows, window=window, sinks=sinks, layout=way[0], method=way[1], **fixed)
        for (window, sinks), way in zip(product((None, 1, 7, 40, 200), (False, True)), ways, strict=False)
    ]


@pytest.mark.parametrize("name", PACKS)
def test_documents_windows_and_sinks_are_exact_in_float64(pool, name):
    run(pool, 2, mixed(PACKS[name]))


@pytest.mark.parametrize(("layout", "method"), WAYS)
def test_every_layout_and_method_on_four_ranks(pool, layout, method):
    fixed = {"heads": 8, "kv_heads": 4, "head_dim": 32, "layout": layout, "method": method}
    rows = (PACKS["full"], PACKS["one long"], PACKS["right-padded"])
    run(pool, 4, [Case(r, window=w, sinks=True, **fixed) for r, w in product(rows, (None, 30))])


def test_eight_ranks(pool):
    cases = [
        Case(PACKS["one long"], method="direct", sinks=True),
        Case(PACKS["full"], method="ring", window=13),
        Case(PACKS["packed rows"], method="ulysses", heads=16, kv_heads=8),
        Case(((3,),), method="direct"),  # fewer tokens than ranks
    ]
    run(pool, 8, cases)


def test_a_window_larger_than_a_share_and_many_row_tiles(pool):
    long = Case(((1500, 40, 460),), heads=2, kv_heads=1, head_dim=32)
    run(
        pool, 2, [replace(long, window=w, layout=x) for w, x in ((700, "zigzag"), (1200, "contiguous"), (90, "chunks"))]
    )


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_head_dims_in_float32(pool, head_dim):
    run(pool, 2, [Case(PACKS["one long"], head_dim=head_dim, sinks=True)], torch.float32, 1e-5)


@pytest.mark.parametrize("kernel", ["cpu-flash", "tiled"])
def test_grouped_and_single_heads_and_narrow_values(pool, kernel):
    base = Case(PACKS["padding inside"], heads=6, kernel=kernel, window=20, sinks=True)
    cases = [replace(base, kv_heads=n) for n in (1, 2, 3, 6)]
    cases += [replace(base, kv_heads=6, head_dim=48, value_dim=32, scale=0.1)]  # multi-head latent attention
    run(pool, 2, cases)
    run(pool, 2, cases, torch.float32, 1e-5)


@pytest.mark.parametrize("method", ["direct", "ring", "ulysses"])
def test_softcap(pool, method):
    base = Case(PACKS["one long"], softcap=2.0, scale=1.0, method=method, value_dim=16)
    cases = [base, replace(base, window=9, sinks=True), replace(base, rows=((700, -20, 600),), window=300)]
    run(pool, 2, cases)


def test_wider_values_than_keys(pool):
    run(pool, 2, [Case(PACKS["full"], head_dim=16, value_dim=40)])


def _bf16(rank, world_size, cases):
    group, rows = torch.distributed.group.WORLD, []
    for case in cases:
        got, context = sharded(case, torch.bfloat16, group)
        want = dense(case, torch.bfloat16)
        rows.append((compare(got, want, context), compare(_single(case), want, _alone(case))))
    return rows


def _alone(case):
    from attention_cases import context_of

    return context_of(case, _own_group())


def _own_group():
    groups = [torch.distributed.new_group([r]) for r in range(torch.distributed.get_world_size())]
    return groups[torch.distributed.get_rank()]


def _single(case):
    """One process in bf16: torch's own attention, with the mask written out."""
    from attention_cases import Result, inputs

    q, k, v, _, grad = inputs(case, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(grad)
    return Result(out.detach(), q.grad, k.grad, v.grad, None)


def test_bf16_is_as_close_to_float64_as_one_process_in_bf16(pool):
    cases = [Case(((512,),), method=method, layout=layout) for layout, method in WAYS[:4]]
    answers = pool.run(_bf16, 4, [replace(c, heads=8, kv_heads=4) for c in cases])
    for i, case in enumerate(cases):
        for name in ("out", "dq", "dk", "dv"):
            ours = max(rank[i][0][name] for rank in answers)
            single = answers[0][i][1][name]
            assert 0 < ours <= 1.5 * single, (case, name, ours, single)


@st.composite
def drawn(draw) -> Case:
    length = draw(st.integers(1, 120))
    row = st.lists(st.integers(1, 60).map(lambda n: n) | st.integers(-9, -1), min_size=1, max_size=12)

    def fit(segments: list[int]) -> tuple[int, ...]:
        out, left = [], length
        for segment in segments:
            size = min(abs(segment), left)
            if size:
                out.append(size if segment > 0 else -size)
            left -= size
        return tuple(out) if not left else (*out, draw(st.sampled_from((1, -1))) * left)

    method = draw(st.sampled_from(("auto", "direct", "ring", "ulysses")))
    kv_heads = draw(st.sampled_from((2, 4) if method == "ulysses" else (1, 2, 3)))
    head_dim = draw(st.sampled_from((8, 32, 40)))
    return Case(
        rows=tuple(fit(s) for s in draw(st.lists(row, min_size=1, max_size=3))),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.sampled_from((None, 8, 24))),
        window=draw(st.none() | st.integers(1, 130)),
        sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from((None, None, 3.0))),
        layout=draw(st.sampled_from(("auto", "zigzag", "chunks", "contiguous"))),
        method=method,
        seed=draw(st.integers(0, 9)),
    )


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(cases=st.lists(drawn(), min_size=4, max_size=4))
def test_drawn_mixes_are_exact(pool, cases):
    run(pool, 2, cases)
