"""From files to token ids: every row is read, checked and encoded, by as many processes as the node has cores."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from lightning_nd.data.dataset import OnTooLong, Tally
from lightning_nd.data.encode import Encoder, Example
from lightning_nd.data.errors import BadRow, DataError, RowError, Where
from lightning_nd.data.rows import Conversation, parse_row
from lightning_nd.data.sources import Piece, RawRow, read_piece

# Below this many bytes, starting processes costs more than they save; it also is when a progress bar appears.
LARGE = 8 << 20
_MOST_PROCESSES = 32


@dataclass(frozen=True)
class Policy:
    """How rows are judged.

    Args:
        max_length: Longest row in tokens; None for no limit.
        on_too_long: What becomes of a longer row.
        prompts: Rows may be prompts without an answer, and need no supervised token.

    """

    max_length: int | None = None
    on_too_long: OnTooLong = "error"
    prompts: bool = False


@dataclass
class Encoded:
    """The rows of a piece of a file, one after the other, and what happened to those that are missing."""

    file: Path
    arrays: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    fatal: str | None = None  # why nothing of this source can be used


def tokenise(
    pieces: list[Piece], encoder: Encoder, policy: Policy, *, processes: int | None = None, label: str | None = None
) -> Iterator[Encoded]:
    """Encode all rows, in order.

    All rows are gone through before anything is refused, so that one report can name every bad row.

    Args:
        pieces: Of the files, in order.
        encoder: Makes ids and labels.
        policy: How rows are judged.
        processes: At most so many; the cores of this machine if None.
        label: Of the progress bar that large sources get; no bar if None.

    Raises:
        DataError: there is a conversation but no chat template; said at the first one.

    """
    from tqdm import tqdm

    total = sum(piece.size for piece in pieces)
    _ = encoder.renderer  # probed once, and not by every process
    terminal = sys.stderr.isatty()
    with tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        disable=label is None or total < LARGE,
        mininterval=0.2 if terminal else 30,
    ) as bar:
        for piece, encoded in zip(pieces, _encode_all(pieces, encoder, policy, total, processes), strict=True):
            if encoded.fatal is not None:
                raise DataError(encoded.fatal)
            bar.update(piece.size)
            yield encoded


def _encode_all(
    pieces: list[Piece], encoder: Encoder, policy: Policy, total: int, processes: int | None
) -> Iterator[Encoded]:
    work = _Pieces(pieces, encoder, policy)
    count = 0
    # Forked children are ready at once and need no importable main module; elsewhere one process does it all.
    if sys.platform == "linux" and (total >= LARGE or processes is not None):
        count = min(processes or min(_cores(), _MOST_PROCESSES), len(pieces))
    yield from DataLoader(
        work,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=count if count > 1 else 0,
        multiprocessing_context="fork" if count > 1 else None,
        worker_init_fn=_one_thread,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _as_it_is(encoded: Any) -> Any:
    return encoded


def _one_thread(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class _Pieces(Dataset[Encoded]):
    def __init__(self, pieces: list[Piece], encoder: Encoder, policy: Policy) -> None:
        self.pieces, self.encoder, self.policy = pieces, encoder, policy

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Encoded:
        try:
            return encode_piece(self.pieces[index], self.encoder, self.policy)
        except DataError as error:
            return Encoded(self.pieces[index].path, fatal=str(error))


def encode_piece(piece: Piece, encoder: Encoder, policy: Policy) -> Encoded:
    """Read, check and encode the rows of a piece.

    Raises:
        DataError: the file cannot be read, or there is a conversation but no chat template.

    """
    tally = Tally()
    rows = (encode_row(raw, encoder, policy, tally) for raw in read_piece(piece))
    examples = [example for example in rows if example is not None]
    arrays = {
        "input_ids": _flat([e.input_ids for e in examples]),
        "labels": _flat([e.labels for e in examples]),
        "lengths": np.asarray([len(e.input_ids) for e in examples], dtype=np.int32),
        "supervised": np.asarray([e.supervised for e in examples], dtype=np.int32),
    }
    tally.rows, tally.supervised = len(examples), int(arrays["supervised"].sum())
    return Encoded(piece.path, arrays, tally)


def encode_row(raw: RawRow, encoder: Encoder, policy: Policy, tally: Tally) -> Example | None:
    """Check and encode one row; None, and why in ``tally``, if it is not to be used.

    Raises:
        DataError: it is a conversation and there is no chat template.

    """
    if raw.value is None:
        tally.bad.add(BadRow(raw.where, raw.problem or "not a row"))
        return None
    try:
        row = parse_row(raw.value, prompts=policy.prompts)
        if isinstance(row.content, Conversation) and encoder.renderer is None:
            raise _no_template(raw.where, encoder)
        example = encoder(row)
        if example.supervised == 0 and not (example.context_only or policy.prompts):
            raise RowError(f"no supervised token with train_on: {encoder.train_on}")
    except RowError as error:
        tally.bad.add(BadRow(raw.where, error.reason, error.roles))
        return None
    if not fits(example, raw.where, policy, tally):
        return None
    tally.context_rows += example.context_only
    tally.unclosed_rows += not example.closed
    return example


def _flat(lists: list[list[int]]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.zeros(0, dtype=np.int32), *(np.asarray(values, dtype=np.int32) for values in lists)])


def fits(example: Example, where: Where, policy: Policy, tally: Tally) -> bool:
    """Whether a row stays, after the policy was applied to it in case it is too long; counted in ``tally``."""
    length, limit = len(example.input_ids), policy.max_length
    tally.longest = max(tally.longest, length)
    if limit is None or length <= limit:
        return True
    tally.too_long.add(BadRow(where, f"{length:,} tokens"))
    if policy.on_too_long == "truncate":
        example.input_ids = example.input_ids[:limit]
        example.labels = example.labels[:limit]
        if example.supervised or example.context_only or policy.prompts:
            tally.truncated_rows += 1
            tally.truncated_tokens += length - limit
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
