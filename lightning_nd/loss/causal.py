"""Next-token cross entropy as a global token mean, the same for every model class."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_nd.loss.chunked import IGNORE, Recipe, check_targets, each_score, summed_loss
from lightning_nd.loss.kernels import check_kernel, choose
from lightning_nd.loss.ledger import TokenLedger
from lightning_nd.loss.objective import check_router_loss, labels_are_shifted, own_loss
from lightning_nd.loss.options import LossOptions
from lightning_nd.loss.pending import Head, PendingLogits, find_head

log = logging.getLogger(__name__)

DEFAULT = LossOptions()
_SLICE = 1024  # tokens of a row whose logits are copied to float32 at a time


def shift_labels(labels: Tensor) -> Tensor:
    """The target of each position: the label of the next one; the last position has none.

    Args:
        labels: ``[batch, sequence]``, ``-100`` where not supervised.
    """
    return F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()


def nll_sum(
    logits: Tensor, targets: Tensor, options: LossOptions = DEFAULT, done: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of the supervised tokens (nats, at least float32) and their number, on this rank.

    The loss of a token is its negative log likelihood; where gradients are computed, with the label smoothing and the
    z-loss of ``options``.

    Args:
        logits: ``[batch, sequence, vocabulary]``; pending ones are never made in full.
        targets: ``[batch, sequence]``, shifted already.
        options: how.
        done: called when the gradient has gone through pending logits.
    """
    targets = targets.to(logits.device)
    _check_shapes(logits, targets)
    smoothing, z_loss = options.extras
    if isinstance(logits, PendingLogits) and (parts := _take_apart(logits, targets, options)) is not None:
        pairs, bias, kept, recipe = parts
        kernel = choose(options.kernel, kept.device, pairs, bias, recipe) if len(kept) else None
        if kernel is not None:
            nll = kernel.run(pairs, bias, kept, recipe)
        else:
            nll = summed_loss(pairs, bias, kept, recipe, done)
        return logits.called_back(nll), (targets != IGNORE).sum()
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    flat_targets = targets.reshape(-1)
    supervised = flat_targets != IGNORE
    nll = F.cross_entropy(flat, flat_targets, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    if z_loss:
        nll = nll + z_loss * flat.logsumexp(-1).square().masked_fill(~supervised, 0).sum()
    return nll, supervised.sum()


def token_nll(logits: Tensor, targets: Tensor, options: LossOptions = DEFAULT) -> Tensor:
    """The first of `token_scores`."""
    return token_scores(logits, targets, options)[0]


@torch.no_grad()
def token_scores(logits: Tensor, targets: Tensor, options: LossOptions = DEFAULT) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of every target (nats, at least float32), and whether it is the likeliest token.

    No gradient; 0 and False where a token is not supervised.

    Args:
        logits: ``[batch, sequence, vocabulary]``; pending ones are never made in full.
        targets: ``[batch, sequence]``, shifted already.
        options: how.

    Returns:
        Two of ``[batch, sequence]``.
    """
    targets = targets.to(logits.device)
    _check_shapes(logits, targets)
    supervised = targets != IGNORE
    if isinstance(logits, PendingLogits) and (parts := _take_apart(logits, targets, options)) is not None:
        pairs, bias, kept, recipe = parts
        each, right = each_score(pairs, bias, kept, recipe)
        nll = each.new_zeros(targets.shape).masked_scatter_(supervised, each)
        return nll, right.new_zeros(targets.shape).masked_scatter_(supervised, right)
    losses, hits = [], []
    for part, wanted in zip(logits.split(_SLICE, 1), targets.split(_SLICE, 1), strict=True):
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        losses.append(F.cross_entropy(wide.transpose(1, -1), wanted, ignore_index=IGNORE, reduction="none"))
        hits.append(part.argmax(-1) == wanted)
    return torch.cat(losses, 1), torch.cat(hits, 1) & supervised


def _check_shapes(logits: Tensor, targets: Tensor) -> None:
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"NDStrategy: the loss got logits of shape {list(logits.shape)} and labels of shape {list(targets.shape)};"
            " it needs one label for each token. logits_to_keep must be left out where there are labels."
        )


def _supervised(targets: Tensor) -> Tensor:
    """Places of the supervised tokens; how many there are is known from the data alone."""
    return (targets != IGNORE).nonzero().squeeze(1)


def _take_apart(
    logits: PendingLogits, targets: Tensor, options: LossOptions
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None, Tensor, Recipe] | None:
    """Inputs and weights of the supervised tokens; None if only real logits will do."""
    products = [product for product, _ in logits.terms]
    kinds = {t.dtype for p in products for t in (p.x, p.weight, p.bias) if t is not None}
    if logits.is_made or options.chunk is None or len(kinds) > 1 or any(p.bias is not None for p in products[1:]):
        return None
    flat = targets.reshape(-1)
    index = _supervised(flat)
    kept = flat[index]
    check_targets(kept, logits.shape[-1])
    pairs = []
    for product, scale in logits.terms:
        x = product.x.reshape(-1, product.x.shape[-1])
        x = x if len(kept) == len(flat) else x[index]
        pairs.append((x if scale == 1.0 else x * scale, product.weight))
    # Slices may differ in length, and every tp rank must make the same chunks.
    part = logits.part
    rows = products[0].weight.shape[0] if part is None else -(-part.width // part.group.size())
    chunk = options.tokens_per_chunk(len(kept), rows, kept.device)
    bias = products[0].bias if logits.terms[0][1] == 1.0 else None
    if bias is None and products[0].bias is not None:
        return None
    return pairs, bias, kept, Recipe(logits.function(), chunk, *options.extras, part)


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
    if nll.requires_grad:  # not what a teacher, a probe under no_grad or validation has computed
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
    Targets that the model was called with count also where its class does not pass them on.
    """

    def __init__(
        self,
        ledger: TokenLedger,
        group: ProcessGroup | None,
        sharded: bool = False,
        options: LossOptions = DEFAULT,
        head: Head | None = None,
        shift: bool = True,
    ) -> None:
        self.ledger = ledger
        self.group = group
        self.sharded = sharded
        self.options = options
        self.head = head
        self.shift = shift
        self.calls = 0
        self.targets: Tensor | None = None

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
            labels: ``[batch, sequence]``; ignored where ``shift_labels`` is given. They are shifted here, unless they
                lie on their targets already (``shift=False``).
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
            shift_labels = self.targets
        if shift_labels is None:
            if labels is None:
                raise ValueError("CausalLMLoss: neither labels nor shift_labels were given.")
            if self.sharded:
                raise ValueError(
                    "CausalLMLoss: under cp > 1 labels are shifted over the whole row before it is split, and this"
                    " call got none of those. Pass shift_labels=batch['shift_labels'] to the model beside labels."
                )
            shift_labels = _shift(labels) if self.shift else labels
        done = None
        if self.head is not None:
            done = self.head.close
            if self.head.trained and torch.is_grad_enabled() and not logits.requires_grad:
                raise RuntimeError(
                    "NDStrategy: the model does something with its logits through which their gradient is lost when"
                    " the loss is computed chunk by chunk. Use NDStrategy(loss=LossOptions(chunk=None))."
                )
        return global_token_mean(*nll_sum(logits, shift_labels, self.options, done), self.ledger, self.group)


_shift = shift_labels


def install_loss(
    model: Any,
    ledger: TokenLedger,
    group: ProcessGroup | None,
    *,
    sharded: bool = False,
    options: LossOptions = DEFAULT,
) -> None:
    """Let a transformers causal LM compute its loss by this rule.

    With ``sharded`` rows (cp > 1) it takes only labels that have been shifted over the whole row.
    A class that computes its own loss inside forward is found out at the first batch: the message says what to do.

    Raises:
        ValueError: for a model whose ``loss_function`` somebody has set, or is no cross entropy of tokens.
    """
    installed = model.loss_function
    if isinstance(installed, CausalLMLoss):  # a second fit: the model has the hooks, the strategy is another
        installed.ledger, installed.group, installed.sharded, installed.options = ledger, group, sharded, options
        return
    shifted = labels_are_shifted(model)
    if shifted is None:
        log.info("NDStrategy: the loss of %s is no mean over tokens; it is averaged over ranks.", type(model).__name__)
        return
    check_kernel(options.kernel)
    head = find_head(model)
    if head is None and options.chunk is not None:
        log.info("NDStrategy: the head of %s is no linear layer; its logits are made at once.", type(model).__name__)
    loss = CausalLMLoss(ledger, group, sharded, options, head, shifted)
    model.loss_function = loss
    if head is not None:
        head.install()
    accepted = inspect.signature(type(model).forward).parameters
    takes_targets = "shift_labels" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values())

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("labels") is not None:
            ranks = 1 if loss.group is None else loss.group.size()
            check_router_loss(module, ranks, kwargs.get("output_router_logits"))
        loss.calls = 0
        loss.targets = kwargs.get("shift_labels")
        if head is not None:
            head.begin(loss.options.chunk is not None and kwargs.get("labels") is not None)
        if takes_targets:
            return args, kwargs
        return args, {key: value for key, value in kwargs.items() if key != "shift_labels"}

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss.targets = None
        if head is not None:
            head.active = False
        if getattr(output, "loss", None) is not None and loss.calls == 0:
            raise RuntimeError(own_loss(module))

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=False)
