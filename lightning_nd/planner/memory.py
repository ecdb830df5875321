"""How much memory one rank needs, in closed form: what is live at each moment of a step, by category.

The moments are those at which a step can peak: the last block's forward, the loss forward and backward, the first and
the last block's backward, the embedding's gradient, and the optimizer. FSDP2 holds, while a block computes, its
gathered parameters and those of the next one; in the backward pass also the reduction of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_nd.parallelize.data import MOST_PADDING
from lightning_nd.planner.hardware import GIB
from lightning_nd.planner.layout import Setting, Work, is_recomputed, recomputed
from lightning_nd.planner.model import Block, ModelFacts, Moment

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "loss", "communication")
#: Reserved over live memory: the allocator's fragments, beside the context of CUDA and NCCL's buffers, in GiB.
#: Published peaks of reserved memory are 1.12 to 1.23 times the live one.
FRAGMENTS, CONTEXT = 1.10, 1.5


@lru_cache(maxsize=4096)
def _chunk(tokens: int, vocabulary: int) -> int:
    """Tokens whose logits are held at a time, as the loss itself chooses them on a GPU."""
    import torch

    from lightning_nd.loss import LossOptions

    return LossOptions(kernel="torch").tokens_per_chunk(tokens, vocabulary, torch.device("cuda"))


@dataclass(frozen=True)
class Memory:
    """Live bytes of one rank at the worst moment of a step.

    Attributes:
        moment: when that is.
        parts: bytes by category.
        moments: bytes at every moment that was looked at.
    """

    moment: str
    parts: dict[str, float]
    moments: dict[str, float]

    @property
    def live(self) -> float:
        """Bytes in tensors."""
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """Bytes that the device is short of, fragments and context included."""
        return reserved(self.live)


def reserved(live: float) -> float:
    """Bytes that a device is short of where so many are in tensors."""
    return FRAGMENTS * live + CONTEXT * GIB


def memory(model: ModelFacts, setting: Setting, work: Work) -> Memory:
    """The largest moment of a step, and all others."""
    moments = dict(_moments(model, setting, work))
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    worst = max(totals, key=lambda name: totals[name])
    return Memory(worst, {key: moments[worst].get(key, 0.0) for key in CATEGORIES}, totals)


@dataclass(frozen=True)
class _Rank:
    """Sizes on one rank, in bytes unless said otherwise."""

    model: ModelFacts
    setting: Setting
    work: Work

    @property
    def tp(self) -> int:
        return self.setting.dims.tp

    @property
    def tokens(self) -> float:
        return self.setting.tokens(self.work.length)

    @property
    def stream(self) -> float:
        """The residual stream of one rank between attention and MLP."""
        shards = self.tp if self.work.sequence_parallel else 1
        return self.work.compute_bytes * self.model.hidden * self.tokens / shards

    @property
    def whole_stream(self) -> float:
        return self.work.compute_bytes * self.model.hidden * self.tokens

    def gathered(self, numel: float) -> float:
        return self.work.compute_bytes * numel

    def unit(self, block: Block) -> float:
        """Elements of a block's gathered parameters; FSDP2 pads experts to a multiple of the shards, within a limit."""
        return block.parameters.on(self.tp) + (0.0 if self.later(block) else self.padded(block))

    def padded(self, block: Block) -> float:
        shards, experts = self.setting.shards, block.experts
        return block.packed.on(self.tp) * (-(-experts // shards) * shards / experts - 1) if experts else 0.0

    def later(self, block: Block) -> float:
        """Elements of those that are split along a later dim, for which FSDP2 needs a copy (`shard_placement`)."""
        packed = block.packed.on(self.tp)
        return packed if self.padded(block) > (MOST_PADDING - 1) * packed else 0.0

    def saved(self, block: Block) -> float:
        """Kept from forward to backward, of all blocks of this kind."""
        again = recomputed(self.setting.checkpointing, block.count, self.model.layers)
        return again * self.kept(block, True) + (block.count - again) * self.kept(block, False)

    def kept(self, block: Block, again: bool) -> float:
        """Kept from forward to backward, of one block that is recomputed or not."""
        if not again:
            return self.full(block)
        if self.setting.checkpointing == "selective":
            return block.kept.on(self.tp, self.work.sequence_parallel) * self.tokens + self.stream
        return self.stream

    def full(self, block: Block) -> float:
        """Kept of one block that is not checkpointed."""
        # peft casts the input of a block's first pair to the pair's float32, before FSDP2 gathers it in bf16
        has_pairs = block.frozen.total > 0 and block.trainable.total > 0 and self.work.precision == "bf16-mixed"
        cast = self.whole_stream if has_pairs else 0.0
        return block.saved.on(self.tp, self.work.sequence_parallel) * self.tokens + self.masked(block) + cast

    def most(self, moments: Sequence[Moment]) -> tuple[float, float]:
        """Bytes of activations and of gradients at that of some moments at which their sum is largest."""

        def parts(moment: Moment) -> tuple[float, float]:
            activations = moment.activations.on(self.tp, self.work.sequence_parallel) * self.tokens
            return activations, self.gathered(moment.gradients.on(self.tp))

        return max(map(parts, moments), key=sum, default=(0.0, 0.0))

    def is_masked(self, block: Block) -> bool:
        """Whether torch's attention needs a mask, where the strategy's own (cp) does not run: for windows and packs."""
        packed = self.work.documents is not None and self.work.documents < self.work.length
        return self.setting.dims.cp == 1 and any(
            packed or (call.window is not None and call.window < self.work.length) for call in block.attention
        )

    def masked(self, block: Block) -> float:
        """What a mask adds to a block: a copy of it in the dtype of compute, and keys and values for every head."""
        if not self.is_masked(block):
            return 0.0
        more = sum((c.heads - c.kv_heads) * (c.head_dim + c.value_dim) for c in block.attention) / self.tp
        return self.work.compute_bytes * (self.pairs + more * self.tokens)

    @property
    def pairs(self) -> float:
        """Pairs of tokens of a micro-batch's rows, which a mask has an element for."""
        return self.setting.micro_batch * float(self.work.length) ** 2

    @property
    def mask(self) -> float:
        """The mask that the blocks share, a byte a pair."""
        return self.pairs if any(map(self.is_masked, self.model.blocks)) else 0.0


def _moments(model: ModelFacts, setting: Setting, work: Work) -> Iterator[tuple[str, dict[str, float]]]:
    rank = _Rank(model, setting, work)
    tp, shards, tokens, width = rank.tp, setting.shards, rank.tokens, work.compute_bytes
    trainable, frozen = model.trainable.on(tp), model.frozen.on(tp)
    frozen_bytes = 2 if work.precision != "32-true" else 4
    state = {
        "parameters": (work.weight_bytes * trainable + frozen_bytes * frozen) / shards,
        "optimizer": work.state_bytes * trainable / shards,
    }
    gradient = work.weight_bytes * trainable / shards
    unreduced = 4 * trainable if setting.accumulation > 1 else 0.0  # FSDP2 keeps them whole, in the dtype of reduction
    saved = sum(rank.saved(block) for block in model.blocks) + rank.mask
    largest = max(model.blocks, key=lambda block: block.parameters.on(tp))
    heaviest = max(model.blocks, key=rank.full)
    unit, trained, copied = rank.unit(largest), largest.trainable.on(tp), rank.gathered(rank.later(largest))
    if largest.trainable.total:  # the buffer that gradients are reduced from is padded likewise
        trained += unit - largest.parameters.on(tp)
    held = 0.0 if setting.reshard else rank.gathered(sum(b.count * b.parameters.on(tp) for b in model.blocks) - unit)
    head = (model.embedding if model.is_tied else model.head).on(tp)
    table = rank.gathered(head if model.is_tied else 0.0)  # a tied table is the root's, gathered for the whole pass
    is_split = shards > 1 or setting.dims.dp_replicate > 1
    # the norm after the last block, which sees whole rows on every tp rank, and the head's input
    final = tokens * model.tail.kept.total
    rotary = (
        2
        * width
        * max((c.head_dim for b in model.blocks for c in b.attention), default=0)
        * work.length
        / setting.dims.cp
    )
    passes = heaviest.working
    again = is_recomputed(setting.checkpointing, model.layers - 1)
    forward, _ = rank.most(passes.checkpointed if again else passes.forward)
    backward, products = rank.most(passes.backward)
    backward += rank.masked(heaviest)
    whole = rank.kept(heaviest, again)

    def moment(**parts: float) -> dict[str, float]:
        return {**state, "gradients": unreduced, **parts}

    # the last block forward, beside everything kept before
    yield (
        "forward",
        moment(
            activations=saved - (0.0 if setting.checkpointing == "selective" else whole) + forward + rotary,
            communication=held + table + 2 * rank.gathered(unit),
        ),
    )
    yield (
        "last block's gathering",
        moment(
            activations=saved - whole + rank.stream + rotary,
            communication=held + table + 3 * rank.gathered(unit) + copied,
        ),
    )
    logits_forward, logits_backward, grads = _loss(model, rank, head)
    # the head's parameters: gathered, and the buffer that they came in
    gather = rank.gathered(head) + (rank.gathered(unit if model.is_tied else head) if is_split else 0.0)
    # the head's input is there twice: a row's last token has no target, so the others are gathered
    gathered = saved + final + rank.whole_stream + rotary
    yield "loss forward", moment(activations=gathered, loss=logits_forward, communication=held + gather)
    yield (
        "loss backward",
        moment(
            activations=saved + final + rotary,
            loss=logits_backward,
            communication=held + rank.gathered(head),
            gradients=unreduced + grads,
        ),
    )
    trains_head = model.trains_head or (model.is_tied and model.trains_embedding)
    if trains_head and not model.is_tied:
        yield (
            "head's gradient",
            moment(
                activations=saved + 2 * rank.whole_stream + rotary,
                communication=held + (width + width + 4) * head,
                gradients=unreduced,
            ),
        )
    # that norm's backward, while the head's gradient is reduced and a block gathered
    yield (
        "last norm's backward",
        moment(
            activations=saved + rank.most(model.tail.backward)[0] + rotary,
            communication=held + table + rank.gathered(unit) + (4 * head if trains_head and not model.is_tied else 0.0),
            gradients=unreduced + work.weight_bytes * (0.0 if model.is_tied or not trains_head else head) / shards,
        ),
    )
    # the last block's backward: all activations are there, and few gradients
    separate = head if trains_head and not model.is_tied else 0.0
    reducing = 0.0 if unreduced else 4 * separate  # in place of what was accumulated
    pending = width * head if trains_head and model.is_tied else 0.0  # a tied head's gradient waits for the embedding's
    reduced = work.weight_bytes * separate / shards
    passing = held + table + (2 if setting.reshard and model.layers > 1 else 1) * rank.gathered(unit)
    yield (
        "first block's backward",
        moment(
            activations=saved - whole + backward + (rank.stream if again else 0.0) + rotary,
            communication=passing + reducing,
            gradients=unreduced + products + pending + reduced,
        ),
    )
    if model.layers > 1:
        left = max(0.0, unreduced - 4 * (separate + trained))
        reduced += work.weight_bytes * trained / shards
        yield (
            "second block's gathering",
            moment(
                activations=saved - whole + rank.stream + rotary,
                communication=passing + copied + 4 * trained,
                gradients=left + pending + reduced,
            ),
        )
        behind = rank.kept(heaviest, is_recomputed(setting.checkpointing, model.layers - 2))
        yield (
            "second block's backward",
            moment(
                activations=saved - whole - behind + backward + (rank.stream if again else 0.0) + rotary,
                communication=passing + 4 * trained,
                gradients=left + products + pending + reduced,
            ),
        )
    rows = model.embedding.on(tp)
    reduced = gradient - work.weight_bytes * (trained + rows) / shards
    embedded = 4 * rows if unreduced and model.trains_embedding else 0.0
    yield (
        "last block's backward",
        moment(
            activations=backward
            + (rank.stream if is_recomputed(setting.checkpointing, 0) else 0.0)
            + rank.mask
            + rotary,
            communication=rank.gathered(unit) + table + (4 * trained if model.layers > 1 else 0.0),
            gradients=(4 * trained if unreduced else 0.0) + embedded + products + pending + reduced,
        ),
    )
    if model.trains_embedding:
        yield (
            "embedding's gradient",
            moment(
                activations=rank.stream,
                communication=(4 + width) * rows + 4 * trained + table,
                gradients=embedded + gradient + width * rows,
            ),
        )
    # foreach kernels make one temporary of the size of the weights
    yield "optimizer", moment(gradients=gradient, communication=0.0, activations=work.weight_bytes * trainable / shards)


def _loss(model: ModelFacts, rank: _Rank, head: float) -> tuple[float, float, float]:
    """Bytes of logits and loss, forward and backward, and of the head's gradient made there."""
    width, tokens = rank.work.compute_bytes, rank.tokens
    if not rank.work.chunked_loss:
        logits = tokens * model.vocabulary
        return (width + 4 + (4 if width == 2 else 0)) * logits, 12 * logits, 0.0
    vocabulary = model.vocabulary / rank.tp
    chunk = _chunk(round(tokens), round(vocabulary))
    trains = model.trains_head or (model.is_tied and model.trains_embedding)
    # a chunk's logits, in float32, their gradient; the gradients of tokens and weights, which wait for backward
    waiting = width * model.hidden * tokens
    chunks = ((4 if model.scales_logits else 2) * width + 4) * chunk * vocabulary
    weights = 4 * head if trains else 0.0
    # at the end the weight's gradient is there in float32 and in the weight's dtype
    chunks = max(chunks, width * head if trains else 0.0)
    return chunks + waiting + weights, waiting + (width * head if trains else 0.0), 0.0
