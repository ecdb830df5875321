"""Context-parallel attention against dense one-process attention: output and all gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from attention_cases import Case, Result, check, dense, inputs, local, mask_of, pack, sharded
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


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("name", PACKS)
def test_documents_windows_and_sinks_are_exact(pool, name, cp):
    # ulysses gives each rank whole heads of keys and values
    cases = mixed(PACKS[name], heads=max(4, cp), kv_heads=max(2, cp))[:: {2: 1, 4: 3, 8: 7}[cp]]
    run(pool, cp, cases)
    run(pool, cp, cases, torch.float32, 1e-5)


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


def _bf16(rank, world_size, cases, references):
    rows = []
    for case, reference in zip(cases, references, strict=True):
        got, context = sharded(case, torch.bfloat16, torch.distributed.group.WORLD)
        rows.append(_errors(got, reference, context))
    return rows


def _errors(got, want, context):
    """Sum of squares of the error of every output and gradient; sinks are the same on all ranks."""
    reference = want.named()
    if context is not None:
        reference = {name: x if name == "dsinks" else local(x, context) for name, x in reference.items()}
    return {name: (x.double() - reference[name]).square().sum().item() for name, x in got.named().items()}


def _single(case):
    """One process in bf16, the mask written out: torch's attention, or with sinks the sum that transformers has."""
    q, k, v, sinks, grad = inputs(case, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen, scale = mask_of(case)[:, None], case.scale
    if sinks is None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    else:
        sinks = sinks.requires_grad_()
        group = case.heads // case.kv_heads
        scores = q @ k.repeat_interleave(group, 1).mT * (scale or case.head_dim**-0.5)
        scores = scores.masked_fill(~seen, float("-inf"))
        extra = sinks.view(1, -1, 1, 1).expand(len(q), -1, case.length, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1, dtype=torch.float32)[..., :-1].to(q.dtype)
        out = weights @ v.repeat_interleave(group, 1)
    out.backward(grad)
    return Result(out.detach(), q.grad, k.grad, v.grad, None if sinks is None else sinks.grad)


def test_bf16_is_as_close_to_float64_as_one_process_in_bf16(pool):
    full, packs = ((256,),), (pack(256, 0, 8, 100), pack(256, 1, 50, 150))
    base = Case(full, heads=8, kv_heads=4)
    cases = [replace(base, method=method, layout=layout) for layout, method in WAYS[:4]]
    cases += [replace(base, rows=packs, layout=layout, method=method) for layout, method in WAYS[2:]]
    cases += [
        replace(base, rows=packs, window=40),
        replace(base, window=70, layout="contiguous"),
        replace(base, kv_heads=1),
        replace(base, kv_heads=8, head_dim=48, value_dim=32, scale=0.1),
        replace(base, rows=packs, sinks=True),
        replace(base, window=70, sinks=True, method="ring"),
        replace(base, rows=packs, window=40, sinks=True, method="ulysses", layout="zigzag"),
    ]
    references = [dense(case, torch.bfloat16) for case in cases]
    answers = pool.run(_bf16, 4, cases, references)
    for i, (case, reference) in enumerate(zip(cases, references, strict=True)):
        for name, single in _errors(_single(case), reference, None).items():
            parts = [rank[i][name] for rank in answers]
            ours = parts[0] if name == "dsinks" else sum(parts)
            assert 0 < ours**0.5 <= 1.5 * single**0.5, (case, name, ours**0.5, single**0.5)


@st.composite
def drawn(draw, cp: int) -> Case:
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
    kv_heads = draw(st.sampled_from((cp, 2 * cp) if method == "ulysses" else (1, 2, 3)))
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
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_drawn_mixes_are_exact(pool, cp, data):
    cases = data.draw(st.lists(drawn(cp), min_size=4, max_size=4))
    run(pool, cp, cases)
    run(pool, cp, cases, torch.float32, 1e-5)
