"""The tokenised rows of one source, and how they are made."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_nd.data.encode import IGNORE, Encoder, Example
from lightning_nd.data.errors import BadRow, DataError, RowError, Where
from lightning_nd.data.rows import Conversation, parse_row
from lightning_nd.data.sources import read_rows

OnBadRow = Literal["error", "skip"]
OnTooLong = Literal["error", "drop", "truncate"]

#: The row number of a data rank that has no row left: an example without a supervised token.
NO_ROW = -1


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Tokenised rows in three flat arrays, so that worker processes share them.

    Args:
        input_ids: ``[tokens]`` ids of all rows, one after the other.
        labels: ``[tokens]`` label of each id, -100 where unsupervised.
        bounds: ``[rows + 1]`` where each row starts.
        pad_id: The id that stands in the example of ``NO_ROW``.

    """

    def __init__(
        self,
        input_ids: npt.NDArray[np.int32],
        labels: npt.NDArray[np.int32],
        bounds: npt.NDArray[np.int64],
        pad_id: int,
    ) -> None:
        self.input_ids, self.labels, self.bounds = input_ids, labels, bounds
        self.pad_id = pad_id

    @classmethod
    def from_examples(cls, examples: Iterable[Example], pad_id: int) -> "TokenDataset":
        """Gather examples into flat arrays."""
        ids, labels, bounds = [], [], [0]
        for example in examples:
            ids.append(np.asarray(example.input_ids, dtype=np.int32))
            labels.append(np.asarray(example.labels, dtype=np.int32))
            bounds.append(bounds[-1] + len(example.input_ids))
        empty = np.zeros(0, dtype=np.int32)
        return cls(
            np.concatenate([empty, *ids]),
            np.concatenate([empty, *labels]),
            np.asarray(bounds, np.int64),
            pad_id,
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` of a row, each ``[length]`` int64."""
        if index == NO_ROW:
            # Two tokens, because a causal model needs a next token to have logits for it.
            ids = torch.full((2,), self.pad_id, dtype=torch.int64)
            return {"input_ids": ids, "labels": torch.full((2,), IGNORE, dtype=torch.int64)}
        start, stop = self.bounds[index], self.bounds[index + 1]
        return {
            "input_ids": torch.from_numpy(self.input_ids[start:stop].astype(np.int64)),
            "labels": torch.from_numpy(self.labels[start:stop].astype(np.int64)),
        }

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """``[rows]`` tokens of each row."""
        return np.diff(self.bounds)

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens that the loss is over."""
        return int((self.labels != IGNORE).sum())


@dataclass
class Tally:
    """What happened to the rows of one source on the way in."""

    bad: list[BadRow] = field(default_factory=list)
    too_long: list[BadRow] = field(default_factory=list)
    dropped_rows: int = 0
    dropped_tokens: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    emptied_rows: int = 0  # truncated until no supervised token was left, then dropped
    context_rows: int = 0
    unclosed_rows: int = 0


def build_dataset(
    files: list[Path],
    encoder: Encoder,
    *,
    pad_id: int,
    max_length: int | None,
    on_too_long: OnTooLong,
    prompts: bool = False,
) -> tuple[TokenDataset, Tally]:
    """Read, check and tokenise every row of the files.

    All rows are gone through before anything is refused, so that one report can name every bad row.

    Args:
        files: Absolute paths.
        encoder: Makes ids and labels.
        pad_id: For the example of a rank without a row.
        max_length: Longest row in tokens; None for no limit.
        on_too_long: What becomes of a longer row.
        prompts: Rows may be prompts without an answer, and need no supervised token.

    Raises:
        DataError: there is a conversation but no chat template; said at the first one.

    """
    tally = Tally()
    examples: list[Example] = []
    for path in files:
        for raw in read_rows(path):
            if raw.value is None:
                tally.bad.append(BadRow(raw.where, raw.problem or "not a row"))
                continue
            try:
                row = parse_row(raw.value, prompts=prompts)
                if isinstance(row.content, Conversation) and encoder.renderer is None:
                    raise _no_template(raw.where, encoder)
                example = encoder(row)
                if example.supervised == 0 and not (example.context_only or prompts):
                    raise RowError(f"no supervised token with train_on: {encoder.train_on}")
            except RowError as error:
                tally.bad.append(BadRow(raw.where, error.reason, error.roles))
                continue
            if not _fits(example, raw.where, max_length, on_too_long, tally, prompts):
                continue
            tally.context_rows += example.context_only
            tally.unclosed_rows += not example.closed
            examples.append(example)
    return TokenDataset.from_examples(examples, pad_id), tally


def _fits(
    example: Example, where: Where, max_length: int | None, policy: OnTooLong, tally: Tally, prompts: bool
) -> bool:
    """Whether a row stays, after the policy was applied to it in case it is too long."""
    length = len(example.input_ids)
    if max_length is None or length <= max_length:
        return True
    tally.too_long.append(BadRow(where, f"{length} tokens, max_length is {max_length}"))
    if policy == "truncate":
        example.input_ids = example.input_ids[:max_length]
        example.labels = example.labels[:max_length]
        if example.supervised or example.context_only or prompts:
            tally.truncated_rows += 1
            tally.truncated_tokens += length - max_length
            return True
        tally.emptied_rows += 1
    tally.dropped_rows += 1
    tally.dropped_tokens += length
    return False


def _no_template(where: Where, encoder: Encoder) -> DataError:
    return DataError(
        f"{where} is a conversation ('messages'), and the tokenizer {encoder.tokenizer.name_or_path!r} has "
        "no chat template. Set data.chat_template to a Jinja file, or data.tokenizer to one with a template "
        "(an instruct version of the model), or use rows of 'prompt' and 'completion'"
    )
