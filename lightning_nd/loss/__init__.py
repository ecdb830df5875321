"""Token accounting and cross entropy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_nd.loss.causal import (
    CausalLMLoss,
    global_token_mean,
    install_loss,
    nll_sum,
    shift_labels,
    token_nll,
    token_scores,
)
from lightning_nd.loss.ledger import TokenLedger
from lightning_nd.loss.options import LossOptions
from lightning_nd.loss.pending import made, read_real_logits


def causal_lm_loss(logits: Tensor, labels: Tensor, strategy: Any, *, shifted: bool = False) -> Tensor:
    """Next-token loss from logits as the global token mean of this micro-batch, under an `NDStrategy`.

    For models that do not compute a loss, or compute it by their own code.

    Args:
        logits: ``[batch, sequence, vocabulary]``.
        labels: ``[batch, sequence]``, not shifted, ``-100`` where not supervised.
        strategy: ``self.trainer.strategy``.
        shifted: ``labels`` are the batch's ``shift_labels``, which alone are right under cp > 1.

    Raises:
        ValueError: if labels that are not shifted are given under cp > 1.
    """
    if not shifted and strategy.dims.cp > 1:
        raise ValueError("causal_lm_loss: under cp > 1 pass batch['shift_labels'] with shifted=True.")
    targets = labels if shifted else shift_labels(labels)
    return global_token_mean(
        *nll_sum(logits, targets, strategy.loss), strategy.ledger, strategy.meshes.loss.get_group()
    )


__all__ = [
    "CausalLMLoss",
    "LossOptions",
    "TokenLedger",
    "causal_lm_loss",
    "global_token_mean",
    "install_loss",
    "made",
    "nll_sum",
    "read_real_logits",
    "shift_labels",
    "token_nll",
    "token_scores",
]
