"""Noise on the embeddings of training rows (NEFTune, Jain et al. 2023, section 2)."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def noise(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    width: int,
    alpha: float,
    seed: int,
    step: int,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Uniform noise in ±alpha / √(L · width) for the L tokens of each row, drawn from (seed, step, the row itself).

    A row gets the same noise in whatever micro-batch or pack and on whatever data rank it is read; padding gets none,
    or, behind the rows of a pack, noise of its own that nothing sees.

    Args:
        input_ids: ``[rows, tokens]``.
        attention_mask: 1 at tokens, 0 at padding; None: no padding.
        width: of an embedding.
        alpha: 5 to 15 in the paper.
        seed: of the run.
        step: optimizer steps taken so far.
        position_ids: 0 where a row of a pack begins; None: no packs.

    Returns:
        ``[rows, tokens, width]`` in float32, on the device of ``input_ids``.
    """
    ids = input_ids.cpu()
    kept = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.cpu().bool()
    made = torch.zeros(*ids.shape, width, device="cpu")
    for number, (row, mask) in enumerate(zip(ids, kept, strict=True)):
        places = mask.nonzero()[:, 0]
        starts = torch.zeros(0, dtype=torch.long)
        if position_ids is not None:
            starts = (position_ids[number].cpu()[places] == 0).nonzero()[:, 0]
        for part in torch.tensor_split(places, starts):
            if not len(part):
                continue
            digest = hashlib.sha256(f"{seed}/{step}/".encode() + row[part].numpy().tobytes()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            size = alpha / math.sqrt(len(part) * width)
            made[number, part] = (torch.rand(len(part), width, generator=generator) * 2 - 1) * size
    return made.to(input_ids.device)
