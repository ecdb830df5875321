"""Exchanging tokens for heads, so that every rank attends over the whole sequence with a share of the heads.

DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509: one all-to-all before attention and one after.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_nd.attention.layout import Layout
from lightning_nd.attention.transport import Traffic


def heads_divide(heads: int, kv_heads: int, cp: int) -> bool:
    """True if every rank can take an equal share of query and key/value heads."""
    return heads % cp == 0 and kv_heads % cp == 0


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, layout: Layout, traffic: Traffic) -> Tensor:
        ctx.rest = group, layout, traffic
        return _to_heads(x, group, layout, traffic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _to_tokens(grad, *ctx.rest), None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, layout: Layout, traffic: Traffic) -> Tensor:
        ctx.rest = group, layout, traffic
        return _to_tokens(x, group, layout, traffic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _to_heads(grad, *ctx.rest), None, None, None


def to_heads(x: Tensor, group: ProcessGroup, layout: Layout, traffic: Traffic) -> Tensor:
    """Local tokens of all heads `[T/cp, H, D]` → all tokens in global order of this rank's heads `[T, H/cp, D]`."""
    result: Tensor = _ToHeads.apply(x, group, layout, traffic)
    return result


def to_tokens(x: Tensor, group: ProcessGroup, layout: Layout, traffic: Traffic) -> Tensor:
    """The inverse of `to_heads`."""
    result: Tensor = _ToTokens.apply(x, group, layout, traffic)
    return result


def _to_heads(x: Tensor, group: ProcessGroup, layout: Layout, traffic: Traffic) -> Tensor:
    tokens, heads, width = x.shape
    send = x.reshape(tokens, layout.cp, heads // layout.cp, width).transpose(0, 1).contiguous()
    received = _all_to_all(send, group, layout.cp, traffic).flatten(0, 1)
    return received[_order(layout, x.device)]


def _to_tokens(x: Tensor, group: ProcessGroup, layout: Layout, traffic: Traffic) -> Tensor:
    tokens, heads, width = x.shape
    send = torch.empty_like(x, memory_format=torch.contiguous_format)
    send[_order(layout, x.device)] = x
    received = _all_to_all(send.view(layout.cp, tokens // layout.cp, heads, width), group, layout.cp, traffic)
    return received.transpose(0, 1).reshape(tokens // layout.cp, heads * layout.cp, width)


@lru_cache(maxsize=8)
def _order(layout: Layout, device: torch.device) -> Tensor:
    return torch.from_numpy(layout.order()).to(device)


def _all_to_all(x: Tensor, group: ProcessGroup, cp: int, traffic: Traffic) -> Tensor:
    """Block i of `x` `[cp, ...]` goes to rank i; block i of the result came from it."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    traffic.messages += cp - 1
    moved = x.numel() * x.element_size() * (cp - 1) // cp
    traffic.sent += moved
    traffic.received += moved
    return received
