"""Token accounting: one rule for the loss and its gradient.

    loss = Σ nll over supervised tokens ÷ N

with N the number of supervised tokens of the whole optimizer step: all micro-batches, data ranks and cp ranks. N is
known only when the last micro-batch has been read. So each micro-batch is weighed by its own tokens against the first
one's, and the gradients are rescaled once at the end of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenLedger:
    """Counts of the current accumulation window.

    A micro-batch whose loss is a token mean weighs as much as its supervised tokens. One whose loss is something else
    (no token loss was computed in it) weighs 1, so that such losses are averaged over the micro-batches that there
    really were: a short last window is not under-weighted.
    """

    def __init__(self) -> None:
        self._micro_tokens: Tensor | None = None
        self._micro_nll: Tensor | None = None
        self._reference: Tensor | float | None = None
        self._weights: list[Tensor | float] = []
        self._tokens: list[Tensor] = []
        self._nlls: list[Tensor] = []

    def record(self, nll: Tensor, tokens: Tensor) -> None:
        """Note a token loss of the current micro-batch: global sums of nll and of supervised tokens."""
        if self._micro_tokens is None or self._micro_nll is None:
            self._micro_tokens, self._micro_nll = tokens, nll
        else:
            self._micro_tokens, self._micro_nll = self._micro_tokens + tokens, self._micro_nll + nll

    @property
    def is_noted(self) -> bool:
        """Whether a token loss of the current micro-batch has been noted."""
        return self._micro_tokens is not None

    def discard(self) -> None:
        """Forget token losses that no backward followed (validation, a skipped step)."""
        self._micro_tokens = self._micro_nll = None

    def close_micro_batch(self) -> Tensor | float:
        """End the current micro-batch, at its backward.

        Returns:
            Its weight relative to the window's first micro-batch that has any tokens.
        """
        weight: Tensor | float = 1.0
        if self._micro_tokens is not None and self._micro_nll is not None:
            weight = self._micro_tokens
            self._tokens.append(self._micro_tokens)
            self._nlls.append(self._micro_nll)
        self.discard()
        self._weights.append(weight)
        if self._reference is None:
            self._reference = weight.clamp(min=1) if isinstance(weight, Tensor) else weight
        return weight / self._reference

    def close_window(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """End the accumulation window, after its last backward.

        Returns:
            The factor that turns the accumulated gradients into those of the window's loss (``None``: it is 1), the
            window's loss, and its number of supervised tokens (``None`` where no token loss was computed). A window
            without any supervised token has loss NaN.
        """
        factor = None
        if len(self._weights) > 1:
            total = torch.as_tensor(sum(self._weights)).clamp(min=1)
            assert self._reference is not None
            factor = self._reference / total
        tokens = torch.stack(self._tokens).sum() if self._tokens else None
        loss = torch.stack(self._nlls).sum() / tokens if tokens is not None else None
        self._weights, self._tokens, self._nlls, self._reference = [], [], [], None
        return factor, loss, tokens
