"""Kernels of other packages for the same loss, on CUDA. To add one, write a `Kernel` and put it into `KERNELS`.

A kernel gives the sum of the losses of tokens from their hidden states and the head's weight, with the gradients of
both. What it cannot do, it says; then the chunks of this package do it. ``"auto"`` takes only kernels whose gradients
are those of the formula: not ones that leave small terms out.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_nd.loss.chunked import Recipe

log = logging.getLogger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """One implementation.

    Attributes:
        package: its name for pip.
        module: its name for import.
        exact: its gradients are the formula's, up to rounding.
        refuses: why it cannot compute a loss, in a few words; None if it can.
        run: ``(pairs, bias, targets, recipe)`` to the sum of the losses.
    """

    package: str
    module: str
    exact: bool
    refuses: Callable[[Pairs, Tensor | None, Recipe], str | None]
    run: Callable[[Pairs, Tensor | None, Tensor, Recipe], Tensor]

    @property
    def installed(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.module) is not None


def _common(pairs: Pairs, recipe: Recipe) -> str | None:
    if recipe.part is not None:
        return "the vocabulary is split over tp"
    if len(pairs) > 1:
        return "the head has an adapter"
    if recipe.function is not None:
        return "the model scales or caps its logits"
    return None


def _liger_class() -> type:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    kind: type = LigerFusedLinearCrossEntropyLoss
    return kind


def _liger_refuses(pairs: Pairs, bias: Tensor | None, recipe: Recipe) -> str | None:
    accumulates = "accum_dtype" in inspect.signature(_liger_class().__init__).parameters  # type: ignore[misc]
    if pairs[0][1].dtype != torch.float32 and not accumulates:
        return "this version adds up the gradient of a 16-bit weight in 16 bits"
    return _common(pairs, recipe)


def _liger(pairs: Pairs, bias: Tensor | None, targets: Tensor, recipe: Recipe) -> Tensor:
    kind, ((x, weight),) = _liger_class(), pairs
    options = {"reduction": "sum", "label_smoothing": recipe.smoothing, "lse_square_scale": recipe.z_loss}
    if "accum_dtype" in inspect.signature(kind.__init__).parameters:  # type: ignore[misc]
        options["accum_dtype"] = torch.float32
    loss: Tensor = kind(**options)(weight, x, targets, bias)
    return loss.float()


def _cut_refuses(pairs: Pairs, bias: Tensor | None, recipe: Recipe) -> str | None:
    if bias is not None:
        return "the head has a bias"
    if recipe.smoothing or recipe.z_loss:
        return "it knows neither label smoothing nor z-loss"
    if pairs[0][1].dtype not in (torch.bfloat16, torch.float16):
        return "it computes in 16 bits"
    return _common(pairs, recipe)


def _cut(pairs: Pairs, bias: Tensor | None, targets: Tensor, recipe: Recipe) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    ((x, weight),) = pairs
    loss: Tensor = linear_cross_entropy(x, weight, targets, reduction="sum")
    return loss.float()


KERNELS: dict[str, Kernel] = {
    "liger": Kernel("liger-kernel", "liger_kernel", True, _liger_refuses, _liger),
    "cut-cross-entropy": Kernel("cut-cross-entropy", "cut_cross_entropy", False, _cut_refuses, _cut),
}


def check_kernel(name: str) -> None:
    """Refuse a kernel that was asked for by name and is not installed.

    Raises:
        ValueError: with what to install.
    """
    if name in KERNELS and not KERNELS[name].installed:
        raise ValueError(
            f"NDStrategy: LossOptions(kernel={name!r}) needs the package {KERNELS[name].package}, which is not"
            f" installed: pip install {KERNELS[name].package}, or use kernel='auto'."
        )


def choose(name: str, device: torch.device, pairs: Pairs, bias: Tensor | None, recipe: Recipe) -> Kernel | None:
    """The kernel for a loss with gradients; None for this package's own chunks. Says once what it chose and why.

    Raises:
        ValueError: if a kernel was asked for by name and cannot compute this loss.
    """
    if name == "torch" or not torch.is_grad_enabled():
        return None
    if name != "auto":
        kernel = KERNELS[name]
        check_kernel(name)
        reason = "it runs on CUDA" if device.type != "cuda" else kernel.refuses(pairs, bias, recipe)
        if reason is not None:
            raise ValueError(
                f"NDStrategy: LossOptions(kernel={name!r}) cannot compute this loss: {reason}. Use 'auto'."
            )
        return kernel
    if device.type != "cuda":
        return None
    exact = {key: kernel for key, kernel in KERNELS.items() if kernel.exact}
    found = [key for key, kernel in exact.items() if kernel.installed]
    if not found:
        _say(f"NDStrategy: the loss is computed by torch; faster where one of these is installed: {', '.join(exact)}.")
    for key in found:
        reason = exact[key].refuses(pairs, bias, recipe)
        if reason is None:
            _say(f"NDStrategy: the loss is computed by {key}.")
            return exact[key]
        _say(f"NDStrategy: the loss is computed by torch and not by {key}: {reason}.")
    return None


@cache
def _say(words: str) -> None:
    log.info(words)
