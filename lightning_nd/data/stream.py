"""Training rows read while training, for sources too large to be tokenised beforehand."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_nd.data.dataset import OnBadRow, Tally
from lightning_nd.data.encode import IGNORE, Encoder, Example
from lightning_nd.data.inputs import Input
from lightning_nd.data.loader import Batch
from lightning_nd.data.report import check, what_happened
from lightning_nd.data.sources import RawRow
from lightning_nd.data.tokenise import Policy, encode_row

log = logging.getLogger(__name__)

#: So many rows are looked at before training starts.
HEAD = 100
_PLACE = ("seed", "epoch", "position", "rows_per_batch")


class StreamDataset(IterableDataset[Batch]):
    """Micro-batches of one data rank.

    Every worker of every rank goes through the same stream of raw rows, whose order is a function of (seed, epoch), and
    encodes only its own: global micro-batch k is rows ``[k·B·D, (k+1)·B·D)``, rank r reads every D-th of them from the
    r-th on, and worker w does micro-batches w, w + W, …. So ranks do as many steps without knowing how many there
    will be, and rows do not depend on layout or workers. Where rows may be left out (``on_bad_row``, ``on_too_long``),
    everyone encodes all rows, and only usable ones are counted and dealt out, so a step has as many rows as without
    streaming. Only the last micro-batch of an epoch may be smaller, at last an example without a supervised token.

    Args:
        inputs: Files and data sets, in order.
        encoder: Makes ids and labels.
        policy: How rows are judged.
        collate: Makes a batch of examples.
        on_bad_row: What to do with unusable rows, as they come.
        micro_batch_size: B.
        num_replicas: D.
        rank: The data rank of this process.
        seed: Of the order.
        shuffle: Rows that are held to draw from; 0 keeps the order of the files.
        pad_id: The id in the example of a rank without a row.

    """

    def __init__(
        self,
        inputs: Sequence[Input],
        encoder: Encoder,
        policy: Policy,
        collate: Callable[[Sequence[dict[str, Tensor]]], Batch],
        *,
        on_bad_row: OnBadRow,
        micro_batch_size: int,
        num_replicas: int,
        rank: int,
        seed: int,
        shuffle: int,
        pad_id: int,
    ) -> None:
        self.inputs, self.encoder, self.policy, self.collate = list(inputs), encoder, policy, collate
        self.on_bad_row = on_bad_row
        self.micro_batch_size, self.num_replicas, self.rank = micro_batch_size, num_replicas, rank
        self.seed, self.shuffle, self.pad_id = seed, shuffle, pad_id
        self.epoch = self.position = 0

    @property
    def rows_per_batch(self) -> int:
        """Rows that all ranks together read in one micro-batch."""
        return self.micro_batch_size * self.num_replicas

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        tally, number = Tally([one.name for one in self.inputs]), 0
        kept = self._kept(tally) if self.leaves_out else self.rows()
        rows: Iterator[Any] = islice(kept, self.position, None)
        while chunk := list(islice(rows, self.rows_per_batch)):
            if number % workers == mine:
                own = chunk[self.rank :: self.num_replicas]
                examples = own if self.leaves_out else [self._encode(row(), tally) for row in own]
                yield self.collate([e for e in examples if e is not None] or [self._nothing()])
            number += 1
        if self.leaves_out and (self.rank or mine):
            return  # the first one has counted the same rows
        if happened := what_happened(tally, self.on_bad_row):
            log.warning("data: train, epoch %d: %s", self.epoch, happened)

    @property
    def leaves_out(self) -> bool:
        """Whether rows may be left out, so that only one who has encoded all rows before knows a row's place."""
        return self.on_bad_row == "skip" or self.policy.on_too_long != "error"

    def _kept(self, tally: Tally) -> Iterator[dict[str, Tensor]]:
        """Examples of the usable rows, in order."""
        return (example for row in self.rows() if (example := self._encode(row(), tally)) is not None)

    def rows(self) -> Iterator[Callable[[], RawRow]]:
        """All raw rows of the epoch in order, each still to be parsed."""
        inputs, draw = list(self.inputs), random.Random(f"{self.seed} {self.epoch}")
        if self.shuffle:
            draw.shuffle(inputs)
        held: list[Callable[[], RawRow]] = []
        for one in inputs:
            for row in one.rows():
                if len(held) < self.shuffle:
                    held.append(row)
                elif held:
                    at = draw.randrange(len(held))
                    held[at], row = row, held[at]
                    yield row
                else:
                    yield row
        draw.shuffle(held)
        yield from held

    def _encode(self, raw: RawRow, tally: Tally) -> dict[str, Tensor] | None:
        example = encode_row(raw, self.encoder, self.policy, tally)
        refuses = (tally.bad and self.on_bad_row == "error") or (tally.too_long and self.policy.on_too_long == "error")
        if refuses:
            check({"train": tally}, self.on_bad_row, self.policy.on_too_long, self.policy.max_length)
        return None if example is None else _tensors(example)

    def _nothing(self) -> dict[str, Tensor]:
        return _tensors(Example([self.pad_id] * 2, [IGNORE] * 2))

    def head(self) -> tuple[Tally, Example | None]:
        """Check the first rows of the files, up to one that can be learnt from; that example.

        Raises:
            DataError: as for any source, from the first rows.

        """
        tally, shown = Tally([one.name for one in self.inputs]), None
        for number, row in enumerate(row for one in self.inputs for row in one.rows()):
            if number >= HEAD and shown is not None:
                break
            example = encode_row(row(), self.encoder, self.policy, tally)
            if example is not None:
                tally.rows += 1
                tally.supervised += example.supervised
                shown = shown if shown is not None or not example.supervised else example
        check({"train": tally}, self.on_bad_row, self.policy.on_too_long, self.policy.max_length)
        return tally, shown

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a place in the stream to mean the same."""
        same = {"streaming": True, "shuffle_buffer": self.shuffle, "sources": [str(one.name) for one in self.inputs]}
        # Places count usable rows only; what is usable must not have changed.
        return same | ({"left_out": [self.on_bad_row, *vars(self.policy).values()]} if self.leaves_out else {})


def _tensors(example: Example) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(example.input_ids), "labels": torch.tensor(example.labels)}


class StreamLoader(DataLoader[Any]):
    """Runs a ``StreamDataset`` and knows the place in the stream up to which batches were used.

    A batch counts as used when the next one is asked for: Lightning asks for one ahead where it is not told a length.
    """

    dataset: StreamDataset
    _used = 0
    _begun = False
    #: The state that was loaded, until the next epoch.
    resumed: dict[str, Any] | None = None

    def __init__(self, dataset: StreamDataset, **options: Any) -> None:
        # Fresh workers every epoch: they hold copies of the dataset, which are told the epoch by being made.
        options.setdefault("generator", torch.Generator().manual_seed(0))  # see StatefulLoader
        super().__init__(dataset, batch_size=None, persistent_workers=False, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches from the place that was loaded on, then whole epochs."""
        if self._begun:  # the last one was left before its end
            self._next_epoch()
        for batch in super().__iter__():
            self._begun = True
            yield batch
            self._used += 1
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.dataset.epoch, self.dataset.position = self.dataset.epoch + 1, 0
        self._used, self._begun = 0, False

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch that was used, the same on every rank and good for any layout."""
        data = self.dataset
        position = data.position + self._used * data.rows_per_batch
        place = {"seed": data.seed, "epoch": data.epoch, "position": position, "rows_per_batch": data.rows_per_batch}
        return {**place, **data.identity}

    @property
    def rows_per_batch(self) -> int:
        """Rows that all ranks together read in one micro-batch."""
        return self.dataset.rows_per_batch

    def batches_before(self) -> int:
        """Micro-batches of this layout before the place in the epoch."""
        return -(-self.dataset.position // self.rows_per_batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a saved place.

        Raises:
            ValueError: the place is in another stream.

        """
        data = self.dataset
        there = {name: value for name, value in state.items() if name not in _PLACE}
        if state and state["position"] and there != data.identity:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint stands at row {state['position']} of {there}; the data is now "
                f"{data.identity}. Resume with the same data and settings, or from the end of an epoch."
            )
        if state:
            data.seed, data.epoch, data.position = state["seed"], state["epoch"], state["position"]
            self._used, self._begun, self.resumed = 0, False, state
