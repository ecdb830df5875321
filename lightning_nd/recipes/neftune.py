"""Noise on the embeddings of training rows (NEFTune, Jain et al. 2023, section 2)."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def noise(input_ids: Tensor, attention_mask: Tensor | None, width: int, alpha: float, seed: int, step: int) -> Tensor:
    """Uniform noise in ±alpha / √(L · width) for the L tokens of each row, drawn from (seed, step, the row itself).

    A row gets the same noise in whatever micro-batch and on whatever data rank it is read; padding gets none.

    Args:
        input_ids: ``[rows, tokens]``.
        attention_mask: 1 at tokens, 0 at padding; None: no padding.
        width: of an embedding.
        alpha: 5 to 15 in the paper.
        seed: of the run.
        step: optimizer steps taken so far.

    Returns:
        ``[rows, tokens, width]`` in float32, on the device of ``input_ids``.
    """
    ids = input_ids.cpu()
    kept = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.cpu().bool()
    made = torch.zeros(*ids.shape, width, device="cpu")
    for row, mask, out in zip(ids, kept, made, strict=True):
        tokens = row[mask]
        if not len(tokens):
            continue
        digest = hashlib.sha256(f"{seed}/{step}/".encode() + tokens.numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        size = alpha / math.sqrt(len(tokens) * width)
        out[mask] = (torch.rand(len(tokens), width, generator=generator) * 2 - 1) * size
    return made.to(input_ids.device)
