"""Local kernels against attention in plain float64, rectangle by rectangle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_nd.attention.kernels import Kernel, choose_kernel
from lightning_nd.attention.kernels.cpu_flash import CpuFlash
from lightning_nd.attention.kernels.cuda_flash import CudaFlash
from lightning_nd.attention.kernels.flash_attn import FlashAttn
from lightning_nd.attention.kernels.flex import Flex
from lightning_nd.attention.kernels.tiled import Tiled
from lightning_nd.attention.plan import Kind, Rect

RECTS = [
    Rect(0, 96, 0, 96, Kind.CAUSAL, cuts=(0, 30, 31, 96)),
    Rect(0, 300, 0, 300, Kind.CAUSAL),
    Rect(0, 96, 0, 96, Kind.BAND, 0, 17),
    Rect(0, 300, 0, 300, Kind.BAND, 0, 140),
    Rect(0, 40, 0, 96, Kind.FULL),
    Rect(0, 30, 0, 70, Kind.BAND, 75, 90),
    Rect(0, 200, 0, 300, Kind.BAND, 310, 330),
]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@dataclass
class Problem:
    """One rectangle's inputs, and what float64 says of it when the rows see other keys, too."""

    rect: Rect
    softcap: float | None
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    final_out: Tensor
    final_lse: Tensor
    gradients: tuple[Tensor, ...]


def visible(rect: Rect) -> Tensor:
    """Which keys each query of a rectangle sees, bool `[n, m]`."""
    n, m = rect.q1 - rect.q0, rect.k1 - rect.k0
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    if rect.kind is Kind.FULL:
        return torch.ones(n, m, dtype=torch.bool)
    if rect.kind is Kind.BAND:
        return (i + rect.offset - j >= 0) & (i + rect.offset - j < rect.window)
    document = torch.bucketize(torch.arange(n), torch.tensor((rect.cuts or (0, n))[1:]), right=True)
    return (i >= j) & (document[:, None] == document[None])


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Output `[n, H, Dv]` and log-sum-exp `[n, H]`, differentiable."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->nhm", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.to(scores.device)[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("nhm,mhd->nhd", torch.exp(scores - lse.unsqueeze(-1)), v), lse


def problem(rect: Rect, softcap: float | None, value_dim: int = 32, dtype: torch.dtype = torch.float64) -> Problem:
    """Draw one; the reference is exact for the inputs in `dtype`."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    n, m = rect.q1 - rect.q0, rect.k1 - rect.k0
    q, k, v, grad = draw(n, 4, 32), draw(m, 2, 32), draw(m, 2, value_dim), draw(n, 4, value_dim)
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, visible(rect), 0.2, softcap)
    # 24 more keys, on another rank, that all rows see
    others = draw(24, 2, 32).double(), draw(24, 2, value_dim).double()
    beside, beside_lse = dense(leaves[0].detach(), *others, torch.ones(n, 24, dtype=torch.bool), 0.2, softcap)
    final = torch.logaddexp(lse, beside_lse)
    whole = (lse - final).exp().unsqueeze(-1) * out + (beside_lse - final).exp().unsqueeze(-1) * beside
    gradients = torch.autograd.grad(whole, leaves, grad.double())
    return Problem(
        rect, softcap, q, k, v, grad, out.detach(), lse.detach(), whole.detach(), final.detach(), tuple(gradients)
    )


def check(kernel: Kernel, case: Problem, device: str = "cpu", forward: float = 1e-10, backward: float = 1e-10) -> None:
    """Run a kernel as attention does: part by part, gradients with the final output and log-sum-exp."""
    q, k, v, grad = (x.to(device) for x in (case.q, case.k, case.v, case.grad))
    final_out, final_lse = case.final_out.to(device, q.dtype), case.final_lse.to(device)
    final_lse = final_lse if q.dtype == torch.float64 else final_lse.float()
    out, lse = torch.zeros_like(case.out), torch.zeros_like(case.lse)
    found = [torch.zeros_like(x) for x in case.gradients]
    for part in kernel.split(case.rect):
        rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
        part_out, part_lse = kernel.forward(q[rows], k[keys], v[keys], part, 0.2, case.softcap)
        out[rows], lse[rows] = part_out.cpu().double(), part_lse.cpu().double()
        new = kernel.backward(
            grad[rows], q[rows], k[keys], v[keys], final_out[rows], final_lse[rows], part, 0.2, case.softcap
        )
        for whole, at, share in zip(found, (rows, keys, keys), new, strict=True):
            whole[at] += share.cpu().double()
    torch.testing.assert_close(out, case.out, atol=forward, rtol=forward)
    torch.testing.assert_close(lse, case.lse, atol=forward, rtol=forward)
    for name, got, want in zip("qkv", found, case.gradients, strict=True):
        # against what all keys give: q's share of this rectangle alone
        want = want.to(got.dtype)
        torch.testing.assert_close(
            got, want, atol=backward, rtol=backward, msg=lambda text, name=name: f"d{name}: {text}"
        )


@pytest.mark.parametrize("rect", RECTS, ids=str)
def test_tiled_and_cpu_flash(rect: Rect) -> None:
    check(CpuFlash(), problem(rect, None))
    check(CpuFlash(), problem(rect, None, value_dim=24))
    for softcap in (None, 1.5):
        check(Tiled(), problem(rect, softcap))
    check(Tiled(), problem(rect, 1.5, value_dim=40))


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash-attn package's two functions in plain float64, with its rules for windows and alignment."""

    def pieces(options: dict[str, Any]) -> Any:
        for (a, b), (c, d) in zip(
            zip(options["cu_seqlens_q"].tolist(), options["cu_seqlens_q"].tolist()[1:], strict=False),
            zip(options["cu_seqlens_k"].tolist(), options["cu_seqlens_k"].tolist()[1:], strict=False),
            strict=True,
        ):
            assert b - a <= options["max_seqlen_q"]
            assert d - c <= options["max_seqlen_k"]
            at = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)[None]
            left, right = options["window_size_left"], options["window_size_right"]
            right = 0 if options["causal"] else right
            yield slice(a, b), slice(c, d), ((left < 0) | (at <= left)) & ((right < 0) | (-at <= right))

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        assert q.shape[-1] == v.shape[-1], "the kernels want one width"
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0], dtype=q.dtype)
        for rows, keys, mask in pieces(options):
            part = dense(q[rows], k[keys], v[keys], mask, options["softmax_scale"], options["softcap"])
            out[rows], lse[:, rows] = part[0], part[1].T
        return out, lse, torch.empty(0), torch.empty(2)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        deterministic: bool,
        **options: Any,
    ) -> Tensor:
        tensors = (grad, q, k, v, out, lse, dq, dk, dv)
        assert all(x.is_contiguous() for x in tensors), "the kernels read a sliced log-sum-exp wrongly"
        for x in (dq, dk, dv):
            x.zero_()
        for rows, keys, mask in pieces(options):
            leaves = [x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
            with torch.enable_grad():
                own, own_lse = dense(*leaves, mask, options["softmax_scale"], options["softcap"])
                weight = torch.exp(own_lse - lse.T[rows]).detach()
                to_lse = weight * (grad[rows] * (own - out[rows])).sum(-1).detach()
                found = torch.autograd.grad((own, own_lse), leaves, (weight.unsqueeze(-1) * grad[rows], to_lse))
            for whole, at, share in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
                whole[at] += share
        return torch.empty(0)

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface.__dict__.update(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    package.__dict__["flash_attn_interface"] = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


@pytest.mark.parametrize("rect", RECTS, ids=str)
def test_what_flash_attn_is_asked_for(flash_attn: None, rect: Rect) -> None:
    for softcap, value_dim in ((None, 32), (1.5, 32), (None, 24)):
        check(FlashAttn(), problem(rect, softcap, value_dim))


def test_flash_attn_is_taken_where_torch_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_nd.attention.kernels.flash_attn as module

    cuda, cpu, half = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    choose_kernel.cache_clear()
    try:
        assert choose_kernel(cuda, half, 64, 64, 50.0).name == "tiled"
        choose_kernel.cache_clear()
        monkeypatch.setattr(module, "find_spec", lambda name: object())
        assert choose_kernel(cuda, half, 64, 64, 50.0).name == "flash-attn"
        assert choose_kernel(cuda, half, 64, 64).name == "cuda-flash"
        assert choose_kernel(cuda, half, 64, 64, None, "flash-attn").name == "flash-attn"
        assert choose_kernel(cuda, torch.float32, 64, 64).name == "tiled"
        assert choose_kernel(cuda, torch.float32, 64, 64, None, "flex").name == "flex"
        assert choose_kernel(cpu, torch.float32, 64, 64).name == "cpu-flash"
        with pytest.raises(ValueError, match="kernel 'flex' cannot run cpu float32"):
            choose_kernel(cpu, torch.float32, 64, 64, None, "flex")
    finally:
        choose_kernel.cache_clear()


@pytest.mark.parametrize("rect", [part for rect in RECTS for part in Flex().split(rect)], ids=str)
def test_flex_forward_by_torch_itself(rect: Rect) -> None:
    for softcap, value_dim in ((None, 32), (1.5, 24)):
        case = problem(rect, softcap, value_dim)
        rows, keys = slice(rect.q0, rect.q1), slice(rect.k0, rect.k1)
        q, k, v = problem(Rect(0, 300, 0, 300, Kind.FULL), softcap, value_dim).q[rows], case.k, case.v
        del keys
        out, lse = Flex().forward(q, k, v, rect, 0.2, softcap)
        want, want_lse = dense(q, k, v, visible(rect), 0.2, softcap)
        torch.testing.assert_close(out, want, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(lse, want_lse, atol=1e-10, rtol=1e-10)


def plain_flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, SimpleNamespace]:
    """`flex_attention` with a backward pass on CPU; blocks that the block mask leaves out are not seen."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if (blocks := options["block_mask"]) is not None:
        i, j = torch.arange(mask.shape[0])[:, None], torch.arange(mask.shape[1])[None]
        mask = blocks.mask_mod(0, 0, i, j) & (blocks.to_dense()[0, 0][i // 128, j // 128] > 0)
    cap = options["score_mod"]
    softcap = None if cap is None else float(cap(torch.tensor(1e9), 0, 0, 0, 0))
    out, lse = dense(
        q[0].mT.mT.transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), mask, options["scale"], softcap
    )
    return out.transpose(0, 1)[None], SimpleNamespace(lse=lse.T[None])


@pytest.mark.parametrize("rect", RECTS, ids=str)
def test_flex_gradients(monkeypatch: pytest.MonkeyPatch, rect: Rect) -> None:
    import lightning_nd.attention.kernels.flex as module

    monkeypatch.setattr(module.flex, "flex_attention", plain_flex)
    for softcap, value_dim in ((None, 32), (1.5, 24)):
        check(Flex(), problem(rect, softcap, value_dim))


KINDS: list[Callable[[], Kernel]] = [CudaFlash, FlashAttn, Flex, Tiled]


@on_cuda
@pytest.mark.parametrize("rect", RECTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_cuda(kind: Callable[[], Kernel], rect: Rect) -> None:
    kernel, device = kind(), torch.device("cuda")
    for softcap in (None, 1.5):
        if not kernel.supports(device, torch.bfloat16, 32, 32, softcap):
            continue
        check(kernel, problem(rect, softcap, dtype=torch.bfloat16), "cuda", forward=2e-2, backward=4e-2)
