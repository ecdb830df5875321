"""Next-token cross entropy as a global token mean, the same for every model class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_nd.loss.ledger import TokenLedger

IGNORE = -100


def shift_labels(labels: Tensor) -> Tensor:
    """The target of each position: the label of the next one; the last position has none.

    Args:
        labels: ``[batch, sequence]``, ``-100`` where not supervised.
    """
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()


def nll_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the negative log likelihoods (nats, at least float32) and number of supervised tokens, on this rank.

    Args:
        logits: ``[batch, sequence, vocabulary]``.
        targets: ``[batch, sequence]``, shifted already.
    """
    targets = targets.to(logits.device)
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    nll = F.cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORE, reduction="sum")
    return nll, (targets != IGNORE).sum()


def global_token_mean(nll: Tensor, tokens: Tensor, ledger: TokenLedger, group: ProcessGroup | None) -> Tensor:
    """The mean over all ranks' supervised tokens, with a gradient whose mean over the ranks is that mean's gradient.

    The value is equal on every rank of ``group`` (the ``loss`` mesh). FSDP2 averages gradients over the same ranks, so
    the gradient of a rank's part carries their number. A rank without supervised tokens gives an exact zero; if there
    are none at all, the value is NaN and the gradients are zero.

    Args:
        nll: this rank's sum, with graph.
        tokens: this rank's count.
        ledger: where the sums are noted.
        group: the loss group; ``None`` for one process.
    """
    sums = torch.stack([nll.detach().double(), tokens.double()])
    size = 1
    if group is not None and group.size() > 1:
        size = group.size()
        dist.all_reduce(sums, group=group)
    ledger.record(sums[0], sums[1])
    mean = (sums[0] / sums[1]).to(nll.dtype)
    local = nll * (size / sums[1].clamp(min=1)).to(nll.dtype)
    return _ValueAndGradient.apply(mean, local)


class _ValueAndGradient(torch.autograd.Function):
    """The value of one scalar, the gradient of another.

    Adding their difference would do but for rounding, which is each rank's own; ranks must not differ in a bit of
    what they log, since they decide by it (early stopping, the best checkpoint).
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class CausalLMLoss:
    """A transformers ``loss_function``: the global token mean from logits and labels.

    Set on a model by the strategy. It takes what transformers passes and computes the same number for every class.
    """

    def __init__(self, ledger: TokenLedger, group: ProcessGroup | None, sharded: bool = False) -> None:
        self.ledger = ledger
        self.group = group
        self.sharded = sharded
        self.calls = 0

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int = 0,
        shift_labels: Tensor | None = None,
        *,
        ignore_index: int = IGNORE,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Tensor:
        """The loss of a micro-batch.

        Args:
            logits: ``[batch, sequence, vocabulary]``.
            labels: ``[batch, sequence]``; ignored where ``shift_labels`` is given.
            vocab_size: not needed.
            shift_labels: targets that are shifted already.
            ignore_index: only -100.
            num_items_in_batch: only None.

        Raises:
            ValueError: for what would change the number that is divided by.
        """
        self.calls += 1
        if ignore_index != IGNORE or num_items_in_batch is not None:
            given = f"ignore_index={ignore_index}" if ignore_index != IGNORE else "num_items_in_batch"
            raise ValueError(
                f"NDStrategy: the model was called with {given}. The loss is the mean over all ranks' labels that are"
                " not -100, and the strategy counts them: mark the others with -100 and leave the argument out."
            )
        if shift_labels is None:
            if labels is None:
                raise ValueError("CausalLMLoss: neither labels nor shift_labels were given.")
            if self.sharded:
                raise ValueError(
                    "CausalLMLoss: under cp > 1 labels are shifted over the whole row before it is split, and this"
                    " call got none of those. Pass shift_labels=batch['shift_labels'] to the model beside labels."
                )
            targets = _shift(labels)
        else:
            targets = shift_labels
        return global_token_mean(*nll_sum(logits, targets), self.ledger, self.group)


_shift = shift_labels


def install_loss(model: Any, ledger: TokenLedger, group: ProcessGroup | None, *, sharded: bool = False) -> None:
    """Let a transformers causal LM compute its loss by this rule.

    With ``sharded`` rows (cp > 1) it takes only labels that have been shifted over the whole row.
    A class that computes its own loss inside forward is found out at the first batch: the message says what to do.

    Raises:
        ValueError: for a model whose ``loss_function`` somebody has set.
    """
    installed = model.loss_function
    if isinstance(installed, CausalLMLoss):  # a second fit: the model has the hooks, the strategy is another
        installed.ledger, installed.group, installed.sharded = ledger, group, sharded
        return
    if not getattr(installed, "__module__", "").startswith("transformers."):
        raise ValueError(
            f"NDStrategy: {type(model).__name__} was given a loss_function of its own"
            f" ({getattr(installed, '__qualname__', installed)}), which would be replaced: a loss of one rank's tokens"
            " cannot be made a token mean over all ranks. Take it away (del model._loss_function), or leave `labels`"
            " out of the call and compute it from outputs.logits in training_step."
        )
    loss = CausalLMLoss(ledger, group, sharded)
    model.loss_function = loss

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        loss.calls = 0

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if getattr(output, "loss", None) is not None and loss.calls == 0:
            raise RuntimeError(
                f"NDStrategy: {type(module).__name__} computes its loss by its own code, which cannot be made a token"
                " mean over all ranks. Leave `labels` out of the call and use"
                " lightning_nd.loss.causal_lm_loss(outputs.logits, labels, self.trainer.strategy)."
            )

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
