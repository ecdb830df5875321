"""The loss by its definitions, from the logits of plain transformers."""

from __future__ import annotations

import torch
from reference import Batch
from torch import Tensor, nn


def formula(model: nn.Module, batch: Batch, smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum over supervised tokens, written out, and their number: plain transformers and the definitions."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    seen = targets != -100
    y, t = logits[seen], targets[seen]
    log_p = y - y.logsumexp(1, keepdim=True)
    target = torch.full_like(y, smoothing / y.shape[1])
    target[torch.arange(len(t)), t] += 1 - smoothing
    return (-(target * log_p).sum() + z_loss * y.logsumexp(1).square().sum()), seen.sum()
