"""Batches: padding, and a loader that knows how far it has come."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_nd.data.encode import IGNORE
from lightning_nd.data.sampler import PlacedSampler

Batch = dict[str, Tensor]


class Collator:
    """Pads examples on the right to the longest of the batch, whatever side the tokenizer pads on.

    Args:
        pad_id: The id to pad ``input_ids`` with. It may equal any other token's id: attention mask and labels
            follow from lengths.
        pad_to_multiple_of: Round the length of the batch up to a multiple of this.

    """

    def __init__(self, pad_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.pad_id, self.multiple = pad_id, pad_to_multiple_of or 1

    def __call__(self, examples: Sequence[dict[str, Tensor]]) -> Batch:
        """``input_ids``, ``attention_mask`` and ``labels``, each ``[batch, length]`` int64.

        Packs have ``position_ids`` in place of the mask: transformers tells documents apart by positions that restart,
        and only where no mask is given. Their padding is a document of its own, without labels.
        """
        ids = [example["input_ids"] for example in examples]
        longest = max(len(row) for row in ids)
        extra = -longest % self.multiple

        def pad(rows: list[Tensor], value: int) -> Tensor:
            padded = pad_sequence(rows, batch_first=True, padding_value=value)
            return torch.nn.functional.pad(padded, (0, extra), value=value)

        batch = {"input_ids": pad(ids, self.pad_id), "labels": pad([example["labels"] for example in examples], IGNORE)}
        if "position_ids" not in examples[0]:
            return batch | {"attention_mask": pad([torch.ones_like(row) for row in ids], 0)}
        length = longest + extra
        positions = [torch.cat([e["position_ids"], torch.arange(length - len(e["position_ids"]))]) for e in examples]
        return batch | {"position_ids": torch.stack(positions)}


class StatefulLoader(DataLoader[Any]):
    """A ``DataLoader`` whose state is a place in the global order.

    Lightning saves and restores the state of a loader that has one, so a run continues behind the last batch
    that was handed out, on any layout and with any number of workers.
    """

    _handed_out = 0
    #: The state that was loaded, until the next epoch.
    resumed: dict[str, Any] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        # A generator of its own: workers' seeds must not change what the run draws, or a resumed run would differ.
        options.setdefault("generator", torch.Generator().manual_seed(0))
        super().__init__(*args, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches from the place that was loaded on, then whole epochs."""
        self._handed_out = 0
        for batch in super().__iter__():
            self._handed_out += 1
            yield batch
        if isinstance(self.sampler, PlacedSampler):
            self.sampler.position, self._handed_out = 0, self.sampler.batches
        self.resumed = None

    @property
    def rows_per_batch(self) -> int | None:
        """Rows that all ranks together read in one micro-batch."""
        return self.sampler.rows_per_batch if isinstance(self.sampler, PlacedSampler) else None

    def batches_before(self) -> int | None:
        """Micro-batches of this layout before the place in the epoch; those left are as many as there are rows for."""
        sampler = self.sampler
        if not isinstance(sampler, PlacedSampler):
            return None
        return sampler.batches - -(-max(0, sampler.rows - sampler.position) // sampler.rows_per_batch)

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch handed out."""
        if not isinstance(self.sampler, PlacedSampler):
            return {}
        return {**self.sampler.state_dict(self._handed_out), "rows_per_batch": self.rows_per_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a saved place."""
        self._handed_out = 0
        if state and isinstance(self.sampler, PlacedSampler):
            self.sampler.load_state_dict(state)
            self.resumed = state
