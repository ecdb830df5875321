"""Local attention kernels behind one small protocol; a new one is one file and one line in `KERNELS`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_nd.attention.kernels.cpu_flash import CpuFlash
from lightning_nd.attention.kernels.cuda_flash import CudaFlash
from lightning_nd.attention.kernels.flash_attn import FlashAttn
from lightning_nd.attention.kernels.flex import Flex
from lightning_nd.attention.kernels.tiled import Tiled
from lightning_nd.attention.plan import Rect


class Kernel(Protocol):
    """Attention of one rectangle. Tensors are token-major, sliced to the rectangle's rows.

    q `[n, H, D]`, k `[m, Hkv, D]`, v `[m, Hkv, Dv]` with H a multiple of Hkv (never repeated), any row stride.
    """

    name: str

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> bool:
        """True if the kernel can run these inputs."""
        ...

    def split(self, rect: Rect) -> Iterable[Rect]:
        """Cut a rectangle into those that one call each can compute; every row of each sees at least one key."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rect: Rect, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output `[n, H, Dv]` of these keys alone and its log-sum-exp `[n, H]` (natural, fp32 or fp64)."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rect: Rect,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v from these keys, given the *final* output and log-sum-exp of the rows.

        With p = exp(score − lse) and delta = Σ grad·out of the whole row, a rectangle's share needs nothing of the
        other keys (FlashAttention-2, arXiv:2307.08691, algorithm 2).
        """
        ...


KERNELS: tuple[type[Kernel], ...] = (CudaFlash, FlashAttn, CpuFlash, Tiled)
"""In order of preference; the last one runs everything."""

BY_NAME: tuple[type[Kernel], ...] = (Flex,)
"""Kernels that are taken only when they are asked for."""

NAMES: tuple[str, ...] = tuple(kind.name for kind in (*KERNELS, *BY_NAME))


@lru_cache(maxsize=64)
def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float | None = None,
    name: str | None = None,
) -> Kernel:
    """The first kernel that supports the inputs, logged once for each kind of inputs.

    Raises:
        ValueError: if `name` is given and unknown, or that kernel cannot run the inputs.
    """
    what = f"{device.type} {str(dtype).removeprefix('torch.')}, head dim {head_dim}"
    if value_dim != head_dim:
        what += f" (values {value_dim})"
    if softcap is not None:
        what += f", soft-cap {softcap:g}"
    if name is not None and name not in NAMES:
        raise ValueError(f"Unknown attention kernel {name!r}: choose one of {', '.join(map(repr, NAMES))}.")
    for kind in KERNELS if name is None else (*KERNELS, *BY_NAME):
        kernel = kind()
        if name in (None, kind.name) and kernel.supports(device, dtype, head_dim, value_dim, softcap):
            rank_zero_info(f"NDStrategy: context-parallel attention uses the {kernel.name} kernel for {what}.")
            return kernel
    raise ValueError(f"The attention kernel {name!r} cannot run {what}; leave the choice to 'auto'.")
