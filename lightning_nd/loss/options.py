"""What a user can choose about the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

# Bytes of a chunk's logits in float32 under `chunk="auto"`; large enough that the matrix products run at full speed.
_BUDGET = {"cpu": 16 << 20, "cuda": 512 << 20}
_FEWEST = 128


@dataclass(frozen=True)
class LossOptions:
    """How the next-token loss of transformers models is computed, and what is added to it.

    Attributes:
        chunk: tokens whose logits are held at a time; ``"auto"`` takes about 16 MiB of them on CPU, 512 MiB on CUDA,
            at least 128 tokens, at most an eighth. None makes all logits at once, gathered over tp.
        label_smoothing: ε in [0, 1): the target is 1 − ε on the label and ε/V on every token of the vocabulary (Szegedy
            et al. 2016, section 7).
        z_loss: weight of log² Z, the squared log of the softmax's denominator (Chowdhery et al. 2022, section 5).
        kernel: ``"torch"`` is the implementation of this package, the same on every device; ``"auto"`` takes a kernel
            for CUDA where one is installed and computes the same, see `lightning_nd.loss.kernels`; a name asks for it.

    ``label_smoothing`` and ``z_loss`` are part of the training loss; validation and test report the plain nll, of which
    a perplexity can be made.

    Raises:
        ValueError: for values that are not allowed.
    """

    chunk: int | Literal["auto"] | None = "auto"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    kernel: str = "auto"

    @classmethod
    def of(cls, given: LossOptions | Mapping[str, Any] | None) -> LossOptions:
        """Options as they are, from a mapping of a configuration file, or the defaults for None.

        Raises:
            ValueError: for names that are no options.
        """
        if isinstance(given, Mapping):
            names = {field.name for field in fields(cls)}
            if unknown := [name for name in given if name not in names]:
                raise ValueError(f"LossOptions: there is no {unknown[0]!r}; options are {', '.join(sorted(names))}.")
            return cls(**given)
        return cls() if given is None else given

    def __post_init__(self) -> None:
        from lightning_nd.loss.kernels import KERNELS

        if self.chunk not in ("auto", None) and (
            isinstance(self.chunk, bool) or not isinstance(self.chunk, int) or self.chunk < 1
        ):
            raise ValueError(
                f"LossOptions: chunk={self.chunk!r}: give a number of tokens, 'auto' or None (all at once)."
            )
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"LossOptions: label_smoothing={self.label_smoothing}: it must be in [0, 1).")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"LossOptions: z_loss={self.z_loss}: it must be 0 or a positive weight, say 1e-4.")
        allowed = ("auto", "torch", *KERNELS)
        if self.kernel not in allowed:
            raise ValueError(f"LossOptions: kernel={self.kernel!r}: choose one of {', '.join(map(repr, allowed))}.")

    def tokens_per_chunk(self, tokens: int, vocabulary: int, device: torch.device) -> int:
        """Tokens of a chunk, where a rank has so many tokens and holds so many logits of each."""
        if isinstance(self.chunk, int):
            return self.chunk
        budget = _BUDGET.get(device.type, _BUDGET["cuda"]) // (4 * vocabulary)
        if tokens <= budget:
            return max(tokens, 1)
        # Fewer tokens than this and every chunk spends its time on reading the weight.
        return min(max(budget, _FEWEST), -(-tokens // 8))

    @property
    def extras(self) -> tuple[float, float]:
        """``label_smoothing`` and ``z_loss`` as they count now: only where gradients are computed."""
        return (self.label_smoothing, self.z_loss) if torch.is_grad_enabled() else (0.0, 0.0)
