"""Whether a model keeps the documents of a pack apart."""

from typing import Any

import torch
from torch import nn

_DOCUMENT = 8
# Largest change of a logit against the largest logit. Where documents are apart, all that is left is the rounding of
# experts that get other batches of tokens; what leaks changes logits of a trained model by tens of percent.
_TOLERANCE = 1e-4
_LOW_PRECISION_TOLERANCE = 0.02


@torch.no_grad()
def leak(model: nn.Module, rows: int, device: torch.device) -> float:
    """How much the logits of one document change with the tokens of the document before it in its pack.

    Two forward passes over a few tokens; collective where the model is sharded.

    Args:
        model: A causal LM in the manner of transformers, with its weights.
        rows: Packs of a micro-batch; some kernels tell documents apart in one row only.
        device: Where the model is.

    Returns:
        The largest change over the largest logit; 0 where documents are apart.

    """
    size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    first = torch.arange(_DOCUMENT, device=device)
    positions = torch.cat([first, first]).repeat(rows, 1)
    was_training = model.training
    model.eval()
    second = []
    for before in (3 * first, size - 1 - 7 * first):
        ids = torch.cat([before, 5 * first + 1]).remainder(size).repeat(rows, 1)
        logits: Any = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        second.append(whole[:, _DOCUMENT:].double())
    model.train(was_training)
    a, b = second
    return float((a - b).abs().max() / a.abs().max())


def check_isolation(model: nn.Module, rows: int, device: torch.device, *, exact: bool = True) -> None:
    """Refuse to train packs with a model whose documents see each other.

    Args:
        model: As in ``leak``.
        rows: As in ``leak``.
        device: As in ``leak``.
        exact: It computes in at least single precision.

    Raises:
        ValueError: with how far it is off, and what to change.

    """
    found = leak(model, rows, device)
    if found > (_TOLERANCE if exact else _LOW_PRECISION_TOLERANCE):
        attention = getattr(model.config, "_attn_implementation", None)
        raise ValueError(
            f"data.packing: {type(model).__name__} (attention {attention!r}, {rows} {'pack' if rows == 1 else 'packs'} "
            "a micro-batch) lets the documents of a pack see each other: changing one changes the logits of the next "
            f"by {found:.1%}. Set data.packing: false"
            + (", or data.micro_batch_size: 1" if rows > 1 else "")
            + (", or model.attn_implementation: sdpa" if attention != "sdpa" else "")
            + "."
        )
