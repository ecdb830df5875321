"""Does this layout give one process's numbers? Trains both ways and compares.

The reference is plain transformers and a plain torch loop in one process; it shares nothing with the strategy but the
weights that both start from and the token ids that both read.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import instantiate_class
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_nd.checkpoint._transformers import clean_name
from lightning_nd.checkpoint.shards import gather_full

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Batch = dict[str, Tensor]
IGNORE = -100
# An error is relative to the largest value of its tensor, but at least to this part of the largest value of all
# tensors: some gradients are zero in exact arithmetic (a key bias), and their rounding noise has no size of its own.
_FLOOR = {"gradient": 1e-4, "weight": 1e-2}
_HEAD_DIM, _VOCABULARY, _EXPERTS, _WINDOW = 16, 512, 8, 16


@dataclass(frozen=True)
class Plan:
    """What is trained: ``steps`` windows of ``accumulate`` global micro-batches.

    Attributes:
        optimizer: ``class_path`` and ``init_args`` of a torch optimizer.
        clip: largest gradient norm, None without clipping.
        rows: of a global micro-batch.
        length: tokens of its longest row.
        label_smoothing: of the loss; as in `lightning_nd.loss.LossOptions`, and so is ``z_loss``.
    """

    optimizer: dict[str, Any]
    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    rows: int = 4
    length: int = 48
    vocabulary: int = _VOCABULARY
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def batches(self) -> list[Batch]:
        """Right-padded rows of random ids; lengths and numbers of supervised tokens differ strongly between rows.

        The second micro-batch has a row without any supervised token.
        """
        generator = torch.Generator().manual_seed(0)
        batches = []
        for index in range(self.steps * self.accumulate):
            ids = torch.randint(0, self.vocabulary, (self.rows, self.length), generator=generator)
            lengths = torch.randint(4, self.length + 1, (self.rows,), generator=generator)
            lengths[index % self.rows] = self.length
            starts = (torch.rand(self.rows, generator=generator) * (lengths - 2)).long()
            position = torch.arange(self.length)
            mask = position < lengths[:, None]
            labels = ids.masked_fill(~mask | (position < starts[:, None]), IGNORE)
            if index == 1:
                labels[0] = IGNORE
            batches.append({"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels})
        return batches


@dataclass
class Numbers:
    """What a run gives: one entry per step, gradients of the first step before clipping, weights after the last."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One comparison: the relative error, what it may be, and the parameter or step where it is largest."""

    what: str
    where: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """False also for NaN."""
        return self.error <= self.allowed


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A small configuration of the same architecture: every kind of layer, the same heads, odd or even vocabulary.

    Raises:
        ValueError: if the architecture cannot be built that small.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds: list[Any] = getattr(text, "layer_types", None) or []
    layers = max(2, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))
    heads = text.num_attention_heads
    hidden = heads * _HEAD_DIM
    size: dict[str, Any] = {
        "num_hidden_layers": min(text.num_hidden_layers, layers),
        "hidden_size": hidden,
        "vocab_size": min(text.vocab_size, _VOCABULARY + text.vocab_size % 8),
    }
    if kinds:
        size["layer_types"] = kinds[: size["num_hidden_layers"]]
    if getattr(text, "head_dim", None):
        size["head_dim"] = _HEAD_DIM
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(text, name, None):
            size[name] = 2 * hidden if name == "intermediate_size" else hidden
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(text, name, None):
            size[name] = min(getattr(text, name), _EXPERTS)
    if getattr(text, "sliding_window", None):
        size["sliding_window"] = _WINDOW
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            size[name] = 0
    for name, value in (size | no_dropout(text)).items():
        setattr(text, name, value)
    try:
        from lightning_nd.checkpoint import from_config

        from_config(small)
    except Exception as error:
        raise ValueError(f"{type(config).__name__} cannot be built small ({error}); use --full.") from error
    return small


def no_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Every dropout of a configuration set to zero: two runs would drop different elements."""
    return {
        name: 0.0
        for name, value in config.to_dict().items()
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop"))
    }


def write_random_model(config: PretrainedConfig, folder: Path) -> None:
    """A random model in float32, made and stored by transformers alone."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def train_reference(folder: Path, plan: Plan) -> Numbers:
    """One process, plain transformers, plain torch, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **no_dropout(config))
    model.train()
    optimizer = instantiate_class(list(model.parameters()), plan.optimizer)
    numbers, batches = Numbers(), plan.batches()
    for first in range(0, len(batches), plan.accumulate):
        window = batches[first : first + plan.accumulate]
        tokens = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in window)
        loss = 0.0
        for batch in window:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits = model(**inputs, use_cache=False).logits[:, :-1].float()
            logits, targets = logits.flatten(0, 1), batch["labels"][:, 1:].flatten()
            nll = torch.nn.functional.cross_entropy(
                logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=plan.label_smoothing
            )
            nll = nll + plan.z_loss * logits[targets != IGNORE].logsumexp(-1).square().sum()
            (nll / tokens).backward()
            loss += nll.item() / tokens
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if not numbers.gradients:
            numbers.gradients = {name: grad.detach().clone() for name, grad in gradients.items()}
        numbers.losses.append(loss)
        numbers.grad_norms.append(float(torch.nn.utils.get_total_norm(list(gradients.values()))))
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad()
    numbers.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return numbers


class VerifyModule(LightningModule):
    """The same training under a Trainer with `NDStrategy`; rank 0 holds the numbers afterwards.

    Args:
        folder: the model to train.
        config: instead of it, a random model of this configuration, which rank 0 puts into a temporary folder.
    """

    def __init__(self, plan: Plan, folder: Path | None, config: PretrainedConfig | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.folder = folder
        self.small = config
        self.numbers = Numbers()
        self.model: Any = None

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        from transformers import AutoConfig

        from lightning_nd.checkpoint import load_pretrained

        if self.small is not None and self.trainer.is_global_zero:
            self.folder = Path(tempfile.mkdtemp(prefix="lightning-nd-verify-"))
            write_random_model(self.small, self.folder)
        self.folder = self.trainer.strategy.broadcast(self.folder)  # also waits until it is written
        assert self.folder is not None
        still: dict[str, Any] = no_dropout(AutoConfig.from_pretrained(self.folder))
        self.model = load_pretrained(self.folder, dtype=torch.float32, **still)
        self.model.train()

    @override
    def train_dataloader(self) -> Any:
        ranks = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        step = slice(ranks["rank"], None, ranks["num_replicas"])
        rows = [{name: value[step] for name, value in batch.items()} for batch in self.plan.batches()]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return instantiate_class(list(self.model.parameters()), self.plan.optimizer)

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.numbers.grad_norms.append(float(strategy.grad_norm()))
        self.numbers.losses.append(float(strategy.step_loss))
        if len(self.numbers.losses) == 1:
            self.numbers.gradients = self._gather({n: p.grad for n, p in self._by_name().items()})

    @override
    def on_train_end(self) -> None:
        self.numbers.weights = self._gather(self._by_name())

    def _by_name(self) -> dict[str, Tensor]:
        return {clean_name(name): parameter for name, parameter in self.model.named_parameters()}

    def _gather(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Whole tensors on rank 0, one at a time."""
        kept = {}
        for name, tensor in tensors.items():
            whole = None if tensor is None else gather_full(tensor)
            if whole is not None and self.trainer.is_global_zero:
                kept[name] = whole.detach().cpu().clone()
        return kept


def compare(expected: Numbers, got: Numbers, tolerance: float = 1e-5) -> list[Line]:
    """The largest relative errors; weights may be ten times as far off as the rest."""
    return [
        _worst_step("loss", expected.losses, got.losses, tolerance),
        _worst_step("gradient norm", expected.grad_norms, got.grad_norms, tolerance),
        _worst_tensor("gradient", expected.gradients, got.gradients, tolerance),
        _worst_tensor("weight", expected.weights, got.weights, 10 * tolerance),
    ]


def _worst_step(what: str, expected: Sequence[float], got: Sequence[float], allowed: float) -> Line:
    if len(expected) != len(got):
        return Line(what, f"{len(got)} steps instead of {len(expected)}", float("inf"), allowed)
    errors = [abs(g - e) / abs(e) if e else abs(g) for e, g in zip(expected, got, strict=True)]
    worst = max(range(len(errors)), key=lambda i: _rank(errors[i]))
    return Line(what, f"step {worst + 1}", errors[worst], allowed)


def _worst_tensor(what: str, expected: Mapping[str, Tensor], got: Mapping[str, Tensor], allowed: float) -> Line:
    unmatched = sorted(expected.keys() ^ got.keys())
    if unmatched:
        side = "missing from" if unmatched[0] in expected else "only in"
        return Line(what, f"{unmatched[0]} ({side} this layout)", float("inf"), allowed)
    floor = _FLOOR[what] * max((float(tensor.abs().max()) for tensor in expected.values()), default=0.0)
    errors = {}
    for name, reference in expected.items():
        if reference.shape != got[name].shape:
            return Line(what, f"{name} ({tuple(got[name].shape)}, not {tuple(reference.shape)})", float("inf"), allowed)
        difference = float((got[name].double() - reference.double()).abs().max())
        scale = max(float(reference.abs().max()), floor)
        errors[name] = difference / scale if scale else difference
    worst = max(errors, key=lambda name: _rank(errors[name]), default="no parameter")
    return Line(what, worst, errors.get(worst, float("inf")), allowed)


def _rank(error: float) -> float:
    return float("inf") if error != error else error


def table(lines: Sequence[Line]) -> str:
    """The comparison as text, one line each, with a verdict."""
    rows = [("", "relative error", "allowed", "verdict", "largest at")]
    rows += [(n.what, f"{n.error:.2e}", f"{n.allowed:.0e}", "ok" if n.ok else "MISMATCH", n.where) for n in lines]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
