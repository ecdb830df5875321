"""Give every rank the weights of rank 0, where they differ."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger(__name__)


def agree_on_weights(model: nn.Module) -> list[str]:
    """Make parameters and buffers equal on all ranks, taking those of rank 0; collective over the world.

    A model that each rank has built without a common seed would otherwise be cut into shards of different models.

    Returns:
        The names that differed.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: t.detach() for name, t in named.items() if not t.is_meta and t.numel()}
    if not tensors or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    digest = torch.stack([_digest(t) for t in tensors.values()]).to(_group_device())
    low, high = digest.clone(), digest.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    differ = (low != high).any(dim=1).tolist()
    names = [name for name, different in zip(tensors, differ, strict=True) if different]
    for name in names:
        tensor = tensors[name]
        value = tensor.to(_group_device()).contiguous()
        dist.broadcast(value, src=0)
        tensor.copy_(value)
    if names:
        log.info(
            "NDStrategy: %d of %d tensors differed between ranks (first: %s); all ranks now have those of rank 0."
            " Call seed_everything() before the model is built to start all ranks alike.",
            len(names),
            len(tensors),
            names[0],
        )
    return names


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums over the bit patterns: of all elements, and of every third one. Exact, and no copy is made."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(-1).view(words)
    return torch.stack([bits.sum(dtype=torch.int64), bits[::3].sum(dtype=torch.int64)]).cpu()


def _group_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
