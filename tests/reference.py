"""What one process computes with plain transformers and plain torch: the numbers that every layout must give.

Nothing here imports lightning_nd. The loss is written out from the logits: the sum of the negative
log-likelihoods of all supervised tokens of an optimizer step, over all its micro-batches and rows, divided by
their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100
Batch = dict[str, Tensor]


def make_batches(
    count: int, *, rows: int = 4, length: int = 24, vocab: int = 256, seed: int = 0, silent_row: bool = True
) -> list[Batch]:
    """`count` global micro-batches of `[rows, length]`: right-padded rows, each with a prompt of label -100.

    Supervised lengths differ strongly between rows and micro-batches, so that a mean of means is far from the
    token mean. With `silent_row`, one row of every second micro-batch has no supervised token at all.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        ids = torch.randint(3, vocab, (rows, length), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        for row in range(rows):
            end = length if row == i % rows else int(torch.randint(4, length + 1, (1,), generator=generator))
            start = int(torch.randint(1, end, (1,), generator=generator))
            labels[row, :start] = IGNORE
            labels[row, end:] = IGNORE
            ids[row, end:] = 0
            mask[row, end:] = 0
        if silent_row and i % 2:
            labels[(i // 2) % rows] = IGNORE
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def rows_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """The rows that data rank `rank` of `ranks` reads of a global micro-batch."""
    return {name: tensor.tensor_split(ranks)[rank] for name, tensor in batch.items()}


def nll_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Sum of the negative log-likelihoods of the supervised tokens (nats), and their number."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    targets = batch["labels"][:, 1:]
    nll = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).to(dtype), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return nll, int((targets != IGNORE).sum())


def adamw(parameters: Iterable[nn.Parameter], **kwargs: Any) -> torch.optim.AdamW:
    """AdamW with an eps of 1e-5.

    Adam divides by the gradient's size, so where a gradient is nearly zero its rounding noise (about 1e-8 before
    clipping) would decide the sign of a full step. With this eps fp32 ends within 1e-5 of fp64 after five steps,
    while clipping at another norm or forgetting the weight decay moves weights by more than 1e-3.
    """
    return torch.optim.AdamW(parameters, **({"lr": 2e-3, "eps": 1e-5, "weight_decay": 0.1} | kwargs))


@dataclass
class Run:
    """Numbers of a training run, one entry per optimizer step where a list."""

    losses: list[float]
    tokens: list[int]
    grad_norms: list[float]  # before clipping
    micro_losses: list[float]  # token mean of each global micro-batch; nan without supervised tokens
    grads: dict[str, Tensor | None]  # of the first step, before clipping
    weights: dict[str, Tensor]  # after the last step


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    accumulate: int = 1,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: torch.dtype | None = None,
) -> Run:
    """Train `model` in place on all batches, in windows of `accumulate` (the last may be shorter)."""
    run = Run([], [], [], [], {}, {})
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    for first in range(0, len(batches), accumulate):
        window = batches[first : first + accumulate]
        total = sum(int((b["labels"][:, 1:] != IGNORE).sum()) for b in window)
        loss = 0.0
        for batch in window:
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                nll, count = nll_sum(model, batch)
            (nll / total).backward()
            loss += nll.item() / total
            run.micro_losses.append(nll.item() / count if count else float("nan"))
        if not run.grads:
            run.grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        with_grad = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
        if clip_norm is not None:
            nn.utils.clip_grads_with_norm_(with_grad, clip_norm, norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(with_grad, clip_value)
        opt.step()
        opt.zero_grad()
        run.losses.append(loss)
        run.tokens.append(total)
        run.grad_norms.append(norm.item())
    run.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def compare(expected: Mapping[str, Tensor | None], got: Mapping[str, Tensor | None]) -> list[tuple[float, str]]:
    """Relative error of every tensor, worst first: max abs error over the largest absolute value expected.

    Raises AssertionError, naming the tensors, where names or shapes differ, where a gradient is missing or is
    there without reason, and where a value is not finite.
    """
    problems = [f"missing: {name}" for name in expected.keys() - got.keys()]
    problems += [f"unexpected: {name}" for name in got.keys() - expected.keys()]
    errors = []
    for name in expected.keys() & got.keys():
        want, have = expected[name], got[name]
        if want is None or have is None:
            if want is not None:
                problems.append(f"None where a tensor is expected: {name}")
            elif have is not None and bool(have.count_nonzero()):
                problems.append(f"a tensor where None is expected: {name}")
            continue
        if want.shape != have.shape:
            problems.append(f"shape {tuple(have.shape)}, expected {tuple(want.shape)}: {name}")
            continue
        if not bool(have.isfinite().all()):
            problems.append(f"not finite: {name}")
            continue
        error = (have.double() - want.double()).abs().max().item()
        errors.append((error / max(want.double().abs().max().item(), 1e-30) if error else 0.0, name))
    if problems:
        raise AssertionError("\n".join(sorted(problems)))
    return sorted(errors, reverse=True)


def relative(expected: float, got: float) -> float:
    """Relative error of a number."""
    return abs(got - expected) / abs(expected)
