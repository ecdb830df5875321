"""One row of the plan: a layout with everything that decides its memory and its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_nd.mesh import ParallelDims

Checkpointing = Literal["none", "full", "selective"] | int
Precision = Literal["bf16-mixed", "bf16-true", "32-true"]


@dataclass(frozen=True)
class Work:
    """What is to be trained, whatever the layout.

    Attributes:
        length: tokens of a row.
        rows: rows of an optimizer step over all ranks; ``None`` leaves it open.
        precision: as for the Trainer.
        optimizer_bytes: per trainable parameter, beside the weight itself; ``None``: two moments of the weight's width.
        compiled: blocks are compiled.
        chunked_loss: logits are made chunk by chunk, and split over tp.
        sequence_parallel: as for `NDStrategy`.
        documents: mean length of the documents in a row; ``None``: a row is one document.
    """

    length: int
    rows: int | None = None
    precision: Precision = "bf16-mixed"
    optimizer_bytes: float | None = None
    compiled: bool = False
    chunked_loss: bool = True
    sequence_parallel: bool = True
    documents: int | None = None
    reduce_bytes: int = field(default=4, repr=False)  # of a gradient on its way; `NDStrategy` reduces in fp32

    @property
    def weight_bytes(self) -> int:
        """Of a parameter as the optimizer sees it."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def compute_bytes(self) -> int:
        """Of a number in forward and backward."""
        return 4 if self.precision == "32-true" else 2

    @property
    def state_bytes(self) -> float:
        """Of optimizer state per parameter."""
        return 2.0 * self.weight_bytes if self.optimizer_bytes is None else self.optimizer_bytes


@dataclass(frozen=True)
class Setting:
    """A layout and how the batch goes through it.

    Attributes:
        dims: the degrees.
        micro_batch: rows of a data rank's micro-batch.
        accumulation: micro-batches of an optimizer step.
        checkpointing: as `NDStrategy(activation_checkpointing=...)`.
        reshard: parameters are freed between forward and backward.
    """

    dims: ParallelDims
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: Checkpointing = "none"
    reshard: bool = True
    reduces_always: bool = field(default=False, repr=False)  # of other frameworks: every micro-batch is reduced
    owners: int = field(
        default=0, repr=False
    )  # of other frameworks: parameters whole, updated by so many ranks (ZeRO-1)

    @property
    def shards(self) -> int:
        """Ranks over which parameters are sharded."""
        return self.dims.dp_shard * self.dims.cp

    @property
    def rows(self) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.dims.data

    def tokens(self, length: int) -> float:
        """Tokens of a micro-batch on one rank, before tensor parallelism."""
        return self.micro_batch * length / self.dims.cp

    def __str__(self) -> str:
        d = self.dims
        batch = f"{self.micro_batch}×{self.accumulation}"
        checkpointing = self.checkpointing if isinstance(self.checkpointing, str) else f"every {self.checkpointing}"
        return f"dp {d.dp_replicate}×{d.dp_shard} cp {d.cp} tp {d.tp}, batch {batch}, checkpointing {checkpointing}"


def is_recomputed(checkpointing: Checkpointing, index: int) -> bool:
    """Whether a block is recomputed, all of it or in parts."""
    return checkpointing != "none" if isinstance(checkpointing, str) else index % checkpointing == 0


def recomputed(checkpointing: Checkpointing, count: int, layers: int) -> float:
    """How many of ``count`` blocks of a kind are recomputed, all of them or in parts, in a model of ``layers``."""
    if isinstance(checkpointing, str):
        return 0 if checkpointing == "none" else count
    return -(-layers // checkpointing) * count / layers
