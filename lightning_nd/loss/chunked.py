"""Cross entropy of ``f(Σ xᵢ Wᵢᵀ + b)`` without its logits: they are made, used and dropped chunk by chunk of tokens.

The gradients are computed in the forward pass, while a chunk's logits are there, and only scaled in the backward pass:
three matrix products, as with all logits at once. (Liger Kernel, Hsu et al. 2024, section 3.2, does the same.)

With the vocabulary split over tp ranks, each makes the logits of its own slice. What the ranks exchange is, for each
token, the log-sum-exp of the slice and the label's logit: one small all-gather a chunk. The log-sum-exp of all is that
of the slices', and the softmax of a slice needs nothing else.

    l(t) = lse − (1 − ε) y[t] − ε/V Σ y + z lse²           dl/dy = softmax(y) (1 + 2 z lse) − (1 − ε) 1[t] − ε/V
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_nd.parallelize.collectives import all_gather_single

IGNORE = -100
# Rows of a weight's gradient that are rounded at a time where they are accumulated in a wider dtype.
_ROWS = 4096


@dataclass(frozen=True)
class VocabularySlice:
    """Which part of the vocabulary a tp rank holds.

    Attributes:
        group: the tp ranks.
        first: the first token of this rank's slice.
        width: tokens of the whole vocabulary.
    """

    group: ProcessGroup
    first: int
    width: int


@dataclass(frozen=True)
class Recipe:
    """How logits are made and judged.

    Attributes:
        function: from a chunk of ``Σ xᵢ Wᵢᵀ + b`` to logits, element by element; None where there is nothing between.
        chunk: tokens at a time.
        smoothing: ε of the label smoothing.
        z_loss: weight of lse².
        part: this rank's slice of the vocabulary; None where it has all of it.
    """

    function: Callable[[Tensor], Tensor] | None
    chunk: int
    smoothing: float = 0.0
    z_loss: float = 0.0
    part: VocabularySlice | None = None


def token_losses(y: Tensor, targets: Tensor, recipe: Recipe, gradient: bool) -> Tensor:
    """Losses of tokens from their logits, which are overwritten: by the gradient of the losses' sum, or with rubbish.

    Args:
        y: ``[tokens, v]``, this rank's slice of the logits, at least float32.
        targets: ``[tokens]``, each a token of the vocabulary.
        recipe: what counts.
        gradient: leave the gradient in ``y``.

    Returns:
        ``[tokens]``, equal on every tp rank.
    """
    part, epsilon = recipe.part, recipe.smoothing
    local = targets if part is None else targets - part.first
    index = local.clamp(0, y.shape[1] - 1).unsqueeze(1)
    known = y.gather(1, index).squeeze(1)
    mine = (local >= 0) & (local < y.shape[1])
    if part is not None:
        known = known.masked_fill(~mine, 0)
    top = y.amax(1).clamp(min=torch.finfo(y.dtype).min)
    parts = [known, y.sum(1)] if epsilon else [known]
    y.sub_(top.unsqueeze(1)).exp_()
    lse = top + y.sum(1).log()
    if part is not None:
        mixed = torch.stack([lse, *parts])
        gathered = mixed.new_empty((part.group.size(), *mixed.shape))
        all_gather_single(gathered.view(-1), mixed.view(-1), group=part.group)
        lse = gathered[:, 0].logsumexp(0)
        parts = list(gathered[:, 1:].sum(0))
    width = y.shape[1] if part is None else part.width
    loss = lse - (1 - epsilon) * parts[0]
    if epsilon:
        loss = loss - epsilon / width * parts[1]
    factor = (top - lse).exp()
    if recipe.z_loss:
        loss = loss + recipe.z_loss * lse.square()
        factor = factor * (1 + 2 * recipe.z_loss * lse)
    if gradient:
        y.mul_(factor.unsqueeze(1))
        if epsilon:
            y.sub_(epsilon / width)
        y.scatter_add_(1, index, mine.to(y.dtype).mul_(epsilon - 1).unsqueeze(1))
    return loss


def check_targets(targets: Tensor, width: int) -> None:
    """Refuse labels outside the vocabulary, which no tp rank would find in its slice.

    Raises:
        IndexError: on CPU; on CUDA the kernel asserts.
    """
    inside = ((targets >= 0) & (targets < width)).all()
    if targets.device.type == "cpu" and not inside:
        wrong = targets[(targets < 0) | (targets >= width)]
        raise IndexError(
            f"a label is {int(wrong[0])}, outside the vocabulary of {width} tokens (ignored ones are -100)."
        )
    torch._assert_async(inside, "a label is outside the vocabulary")


def summed_loss(
    pairs: Sequence[tuple[Tensor, Tensor]],
    bias: Tensor | None,
    targets: Tensor,
    recipe: Recipe,
    done: Callable[[], None] | None = None,
) -> Tensor:
    """Sum of the losses of tokens whose logits are ``f(Σ xᵢ Wᵢᵀ + b)``, at least float32.

    Args:
        pairs: ``(x, W)``: ``[tokens, features]`` and this rank's rows of the weight, ``[v, features]``.
        bias: ``[v]``.
        targets: ``[tokens]``, none of them ignored.
        recipe: how.
        done: called when the gradients have gone back.
    """
    flat = [tensor for pair in pairs for tensor in pair]
    wanted = torch.is_grad_enabled()
    result: Tensor = _SummedLoss.apply(recipe, targets, done, wanted, bias, *flat)
    return result


@torch.no_grad()
def each_score(
    pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, targets: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Each token's loss, and whether the likeliest token is the target, both ``[tokens]``; no gradient.

    Arguments as of `summed_loss`.
    """
    losses, hits = [targets.new_zeros(0, dtype=_wide(pairs))], [targets.new_zeros(0, dtype=torch.bool)]
    for start in _starts(targets, recipe):
        tokens = slice(start, start + recipe.chunk)
        z = _products(pairs, bias, tokens)
        y = z if recipe.function is None else recipe.function(z)
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        hits.append(likeliest(y, recipe.part) == targets[tokens])
        losses.append(token_losses(y, targets[tokens], recipe, False))
    return torch.cat(losses), torch.cat(hits)


def likeliest(y: Tensor, part: VocabularySlice | None) -> Tensor:
    """The token with the largest logit, the first of equal ones: ``[tokens, v]`` → ``[tokens]``, on every tp rank."""
    top, index = y.max(1)
    if part is None:
        return index
    mixed = torch.stack([top.double(), (index + part.first).double()])  # both exact
    gathered = mixed.new_empty((part.group.size(), *mixed.shape))
    all_gather_single(gathered.view(-1), mixed.view(-1), group=part.group)
    rank = gathered[:, 0].max(0, keepdim=True).indices  # slices are in order
    return gathered[:, 1].gather(0, rank).squeeze(0).long()


def _starts(targets: Tensor, recipe: Recipe) -> range:
    return range(0, len(targets), recipe.chunk)


def _wide(pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.dtype:
    return torch.promote_types(pairs[0][0].dtype, torch.float32)


def _products(pairs: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None, tokens: slice) -> Tensor:
    x, weight = pairs[0]
    z = torch.nn.functional.linear(x[tokens], weight, bias)
    for x, weight in pairs[1:]:
        z = z.addmm_(x[tokens], weight.t())
    return z


def _chunk(
    pairs: Sequence[tuple[Tensor, Tensor]],
    bias: Tensor | None,
    targets: Tensor,
    recipe: Recipe,
    tokens: slice,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Losses of a chunk, and the gradient of their sum with respect to ``Σ xᵢ Wᵢᵀ + b``."""
    z = _products(pairs, bias, tokens)
    if recipe.function is None:
        y = z.to(_wide(pairs))
        losses = token_losses(y, targets[tokens], recipe, gradient)
        return losses, y.to(z.dtype) if gradient else None
    with torch.set_grad_enabled(gradient):
        z.requires_grad_(gradient)
        out = recipe.function(z)
    y = out.detach().to(torch.promote_types(out.dtype, torch.float32))
    if gradient and y.data_ptr() == out.data_ptr():
        y = y.clone()  # the function may need its output for its gradient
    losses = token_losses(y, targets[tokens], recipe, gradient)
    return losses, torch.autograd.grad(out, z, y.to(out.dtype))[0] if gradient else None


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        targets: Tensor,
        done: Callable[[], None] | None,
        wanted: bool,
        bias: Tensor | None,
        *flat: Tensor,
    ) -> Tensor:
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        needs = [wanted and t is not None and t.requires_grad for t in (bias, *flat)]
        wide = _wide(pairs)
        grads: list[Tensor | None] = [None] * len(needs)
        for i, tensor in enumerate((bias, *flat)):
            if needs[i]:
                assert tensor is not None
                rows = i % 2 == 1  # a gradient of tokens is written once; one of weights is a sum over the chunks
                grads[i] = torch.empty_like(tensor) if rows else torch.zeros_like(tensor, dtype=wide)
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        for start in _starts(targets, recipe):
            tokens = slice(start, start + recipe.chunk)
            losses, dz = _chunk(pairs, bias, targets, recipe, tokens, any(needs))
            total += losses.sum(dtype=torch.float64)
            if dz is None:
                continue
            if (db := grads[0]) is not None:
                db += dz.sum(0, dtype=wide)
            for i, (x, weight) in enumerate(pairs):
                dx, dw = grads[1 + 2 * i], grads[2 + 2 * i]
                if dx is not None:
                    torch.mm(dz, weight, out=dx[tokens])
                if dw is not None:
                    _add_product(dw, dz, x[tokens])
            del dz  # before the next chunk is made
        ctx.grads = [None if g is None else g.to(t.dtype) for g, t in zip(grads, (bias, *flat), strict=True)]  # type: ignore[union-attr]
        ctx.done = done
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "NDStrategy: the chunked loss keeps its gradients for one backward pass. For a second one over the same"
                " forward pass (retain_graph=True) use LossOptions(chunk=None)."
            )
        grads, ctx.grads = ctx.grads, None
        if ctx.done is not None:
            ctx.done()
        return (None, None, None, None, *(None if g is None else g.mul_(grad) for g in grads))


def _add_product(total: Tensor, dz: Tensor, x: Tensor) -> None:
    """``total += dzᵀ x``, in the dtype of ``total``."""
    if total.dtype == dz.dtype:
        total.addmm_(dz.t(), x)
        return
    for row in range(0, len(total), _ROWS):
        total[row : row + _ROWS] += dz[:, row : row + _ROWS].t() @ x
