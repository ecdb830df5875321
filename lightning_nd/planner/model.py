"""What the formulas need to know of a model: sizes and counts, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements, by how tensor parallelism divides them.

    Attributes:
        split: divided by tp.
        whole: on every tp rank.
        grouped: of key and value projections: divided while tp divides ``groups``, whole where it does not.
        groups: key/value heads.
    """

    split: float = 0.0
    whole: float = 0.0
    grouped: float = 0.0
    groups: int = 1

    @property
    def total(self) -> float:
        """In one process."""
        return self.split + self.whole + self.grouped

    def on(self, tp: int) -> float:
        """On one of ``tp`` ranks."""
        grouped = self.grouped / tp if self.groups % tp == 0 else self.grouped
        return self.split / tp + self.whole + grouped

    def __add__(self, other: Sizes) -> Sizes:
        groups = self.groups if self.grouped else other.groups
        return Sizes(self.split + other.split, self.whole + other.whole, self.grouped + other.grouped, groups)

    def times(self, factor: float) -> Sizes:
        """All of them multiplied."""
        return replace(self, split=self.split * factor, whole=self.whole * factor, grouped=self.grouped * factor)


@dataclass(frozen=True)
class PerToken:
    """Bytes per token of a block's activations, by how tensor parallelism divides them.

    Attributes:
        split: made by split layers: divided by tp.
        whole: the input of split layers and what replicated layers among them make: on every tp rank.
        residual: between attention and MLP: divided by tp under sequence parallelism.
        gathered: copies of the latter, of all rows, that exist only there.
    """

    split: float = 0.0
    whole: float = 0.0
    residual: float = 0.0
    gathered: float = 0.0

    def on(self, tp: int, sequence_parallel: bool) -> float:
        """On one of ``tp`` ranks."""
        rows = tp if sequence_parallel else 1
        return self.split / tp + self.whole + self.residual / rows + (self.gathered if rows > 1 else 0.0)

    @property
    def total(self) -> float:
        """In one process."""
        return self.split + self.whole + self.residual

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(
            self.split + other.split,
            self.whole + other.whole,
            self.residual + other.residual,
            self.gathered + other.gathered,
        )


@dataclass(frozen=True)
class Moment:
    """What is live at one moment of a block's pass.

    Attributes:
        activations: bytes per token.
        gradients: elements of gradients of its weights, in the dtype of compute.
    """

    activations: PerToken = field(default_factory=PerToken)
    gradients: Sizes = field(default_factory=Sizes)

    def is_within(self, other: Moment) -> bool:
        """Whether ``other`` has no less of anything."""
        mine, theirs = (
            (a.split, a.whole, a.residual, a.gathered, g.split, g.whole, g.grouped)
            for a, g in ((m.activations, m.gradients) for m in (self, other))
        )
        return all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Working:
    """The largest moments of a block's passes: forward, forward when it is checkpointed, backward.

    Its input counts from the start of the forward pass; backward begins with what is kept and the output's gradient.

    Attributes:
        kept: what is there after forward, its output among it.
    """

    forward: tuple[Moment, ...] = ()
    checkpointed: tuple[Moment, ...] = ()
    backward: tuple[Moment, ...] = ()
    kept: PerToken = field(default_factory=PerToken)

    def doubled(self) -> Working:
        """With twice the bytes for each number."""

        def twice(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
            return tuple(replace(m, activations=m.activations + m.activations) for m in moments)

        return Working(twice(self.forward), twice(self.checkpointed), twice(self.backward), self.kept + self.kept)


@dataclass(frozen=True)
class Attention:
    """One attention call of a block.

    Attributes:
        heads, kv_heads: in one process.
        head_dim, value_dim: features of a head's queries and keys, and of its values.
        window: latest keys that a query sees; ``None`` for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None

    def pairs(self, length: int) -> float:
        """Attended (query, key) pairs of one causal document of ``length`` tokens."""
        w = length if self.window is None else min(self.window, length)
        return w * (w + 1) / 2 + (length - w) * w

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over one document: two products a pair."""
        return 2 * self.pairs(length) * self.heads * (self.head_dim + self.value_dim)

    @property
    def kv_features(self) -> int:
        """Features of a token's keys and values together."""
        return self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Block:
    """A kind of transformer block.

    Attributes:
        count: blocks of this kind in the model.
        trainable, frozen: parameters.
        products: weights that one token is multiplied with; of experts, those that it is routed to.
        trained_products: those of them whose gradient is computed.
        attention: the attention calls.
        saved: kept for the backward pass without checkpointing.
        kept: what selective checkpointing keeps, beside the block's input.
        traffic: bytes read and written forward by all that is no matrix product and no attention.
        working: what is live while it runs.
        kernels: operations launched forward.
        routed: experts that a token goes to; 0 in a dense block.
        experts, packed: experts of a block, and their parameters: one tensor of all experts each.
    """

    count: int
    trainable: Sizes
    frozen: Sizes
    products: Sizes
    trained_products: Sizes
    attention: tuple[Attention, ...]
    saved: PerToken
    kept: PerToken
    traffic: PerToken
    working: Working = field(default_factory=Working)
    kernels: int = 40
    routed: int = 0
    experts: int = 0
    packed: Sizes = field(default_factory=Sizes)

    @property
    def parameters(self) -> Sizes:
        """All of them."""
        return self.trainable + self.frozen

    def attention_flops(self, pairs: Mapping[int | None, float]) -> float:
        """Of one forward pass of one block, from the attended pairs by window."""
        return sum(2 * pairs[a.window] * a.heads * (a.head_dim + a.value_dim) for a in self.attention)


@dataclass(frozen=True)
class ModelFacts:
    """A causal language model in numbers.

    Attributes:
        name: what the user called it.
        hidden: features of the residual stream.
        vocabulary: rows of the head.
        embedding, head: parameters; the head's are 0 when it is tied to the embedding.
        rest: parameters outside blocks, embedding and head.
        blocks: the kinds of blocks.
        tail: what follows the blocks and precedes the head (a norm), which sees whole rows on every tp rank.
        scales_logits: something stands between the head's product and the logits.
        trains_embedding, trains_head: whether these have gradients.
        max_length: longest sequence that the config names; ``None`` if it names none.
        width: bytes of a number in compute.
    """

    name: str
    hidden: int
    vocabulary: int
    embedding: Sizes
    head: Sizes
    rest: Sizes
    blocks: tuple[Block, ...]
    tail: Working = field(default_factory=Working)
    scales_logits: bool = False
    trains_embedding: bool = True
    trains_head: bool = True
    trains_rest: bool = True
    max_length: int | None = None
    width: int = 2

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return sum(block.count for block in self.blocks)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.total == 0

    @property
    def parameters(self) -> Sizes:
        """All parameters, tied ones once."""
        return self.trainable + self.frozen

    @property
    def trainable(self) -> Sizes:
        """Parameters that have gradients."""
        return self._of(True)

    @property
    def frozen(self) -> Sizes:
        """Parameters that have none."""
        return self._of(False)

    def _of(self, trained: bool) -> Sizes:
        outside = (
            (self.embedding, self.trains_embedding),
            (self.head, self.trains_head),
            (self.rest, self.trains_rest),
        )
        total = Sizes()
        for sizes, trains in outside:
            if trains == trained:
                total += sizes
        for block in self.blocks:
            total += (block.trainable if trained else block.frozen).times(block.count)
        return total

    @property
    def head_products(self) -> float:
        """Weights of the head that a token is multiplied with."""
        return float(self.hidden * self.vocabulary)

    def flops_per_token(self, length: int, *, backward: bool = True) -> float:
        """Model floating-point operations per token of one document: no recomputation (PaLM, appendix B)."""
        factor = 3 if backward else 1
        forward = 2 * self.head_products
        for block in self.blocks:
            attention = sum(a.flops(length) for a in block.attention) / length
            forward += block.count * (2 * block.products.total + attention)
        return factor * forward

    def training_flops(self, tokens: float, pairs: Mapping[int | None, float]) -> float:
        """Floating-point operations of forward and backward, as PaLM's appendix B counts them: no recomputation.

        A frozen weight needs no gradient of itself: two products a token instead of three (LoRA).

        Args:
            tokens: of all rows.
            pairs: attended (query, key) pairs of all rows, by window.
        """
        head = 2 + (self.trains_head if not self.is_tied else self.trains_embedding)
        total = head * 2 * self.head_products * tokens
        for block in self.blocks:
            products = 2 * block.products.total + block.trained_products.total
            total += block.count * (2 * products * tokens + 3 * block.attention_flops(pairs))
        return total

    def recomputed_flops(self, tokens: float, pairs: Mapping[int | None, float], blocks: float) -> float:
        """What activation checkpointing repeats.

        Args:
            tokens, pairs: as of `training_flops`.
            blocks: how many of all blocks are recomputed.
        """
        forward = sum(b.count * (2 * b.products.total * tokens + b.attention_flops(pairs)) for b in self.blocks)
        return forward * blocks / max(self.layers, 1)
