"""What a rank holds of a tensor, as the rectangles that torch.distributed.checkpoint writes and reads.

DCP knows how to cut a DTensor whose shard is one rectangle. A packed weight that tensor parallelism splits (gate and up
projections of experts, say) is several on each rank. Here every shard is given as its rectangles, whatever made it, so
that a checkpoint knows nothing of the layout it was saved on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_nd.checkpoint.shards import Box, local_box


class Pieces:
    """The part of a tensor that this rank holds.

    Args:
        shape: of the whole tensor.
        local: this rank's part, a plain tensor.
        box: for each dim the ranges of the whole that ``local`` covers.
    """

    def __init__(self, shape: torch.Size, local: Tensor, box: Box) -> None:
        self.shape, self.local, self.box = shape, local, box

    @classmethod
    def of(cls, tensor: Tensor) -> Pieces:
        """The pieces of a DTensor, or of a plain tensor that every rank holds whole."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return cls(tensor.shape, local.detach(), local_box(tensor))

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.shape

    def rectangles(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Each rectangle: offsets in the whole, and the view of ``local`` that holds it."""
        spans = []
        for intervals in self.box:
            at, found = 0, []
            for start, stop in intervals:
                found.append((start, at, stop - start))
                at += stop - start
            spans.append(found)
        for corner in itertools.product(*spans):
            view = self.local
            for dim, (_, at, length) in enumerate(corner):
                view = view.narrow(dim, at, length)
            if view.numel():
                yield torch.Size(start for start, _, _ in corner), view

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's part out of the whole tensor."""
        for offsets, view in self.rectangles():
            part = whole
            for dim, (start, length) in enumerate(zip(offsets, view.shape, strict=True)):
                part = part.narrow(dim, start, length)
            view.copy_(part)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The rectangles as DCP has them."""
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self.rectangles()]

    def at(self, index: MetadataIndex) -> Tensor:
        """The view that starts at an offset."""
        return next(view for offsets, view in self.rectangles() if offsets == index.offset)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """The protocol by which DCP asks what is to be written."""
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.chunks()
        ]


class SavePlanner(DefaultSavePlanner):
    """Writes `Pieces`; of equal ones on several ranks only one."""

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, Pieces) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Reads into `Pieces`, which are all that the state has."""

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, pieces in self.state_dict.items()
                for item in create_read_items_for_chunk_list(
                    name, cast(TensorStorageMetadata, entries[name]), pieces.chunks()
                )
            ]
        )

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index)
