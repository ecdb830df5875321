"""The tokenised rows of one source: four flat arrays in a folder, memory-mapped by every process that reads them."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_nd.data.encode import IGNORE
from lightning_nd.data.errors import BadRow, RowLog, Where

OnBadRow = Literal["error", "skip"]
OnTooLong = Literal["error", "drop", "truncate"]

#: The row number of a data rank that has no row left: an example without a supervised token.
NO_ROW = -1
META = "meta.json"
#: Name and type of each array in a folder.
ARRAYS: dict[str, type[np.generic]] = {
    "input_ids": np.int32,  # [tokens] ids of all rows, one after the other
    "labels": np.int32,  # [tokens] -100 where unsupervised
    "lengths": np.int32,  # [rows]
    "supervised": np.int32,  # [rows] tokens of each row that the loss is over
}


class TokenDataset(Dataset[dict[str, Tensor]]):
    """The tokenised rows in a folder that `lightning_nd.data.cache` has written. Pickles as the folder's name.

    Args:
        folder: Holds ``<name>.bin`` for each of ``ARRAYS``.
        pad_id: The id that stands in the example of ``NO_ROW``.

    """

    def __init__(self, folder: Path, pad_id: int) -> None:
        self.folder, self.pad_id = folder, pad_id
        self.input_ids, self.labels, self.lengths, self.supervised = (read_array(folder, name) for name in ARRAYS)
        self.bounds: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.pad_id)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | tuple[int, ...]) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` of a row, each ``[length]`` int64.

        A tuple of rows is a pack: they are laid end to end, and ``position_ids`` start at 0 in each.
        """
        if isinstance(index, tuple):
            rows = [self[row] for row in index]
            pack = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            pack["position_ids"] = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])
            return pack
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
    def digest(self) -> str:
        """Tells these tokens and labels from others; the folder's checksums of both."""
        sums = json.loads((self.folder / META).read_text(encoding="utf-8"))["checksums"]
        return "-".join(f"{sums[name][1]:08x}" for name in ("input_ids", "labels"))

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens that the loss is over."""
        return int(self.supervised.sum(dtype=np.int64))


def read_array(folder: Path, name: str) -> npt.NDArray[Any]:
    """Map one array of a folder into memory, read only."""
    path = folder / f"{name}.bin"
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype=ARRAYS[name])
    return np.memmap(path, dtype=ARRAYS[name], mode="r")


@dataclass
class Tally:
    """What happened to the rows of one source on the way in."""

    files: list[Path] = field(default_factory=list)
    rows_of: list[int] = field(default_factory=list)  # of each file
    rows: int = 0
    supervised: int = 0
    bad: RowLog = field(default_factory=RowLog)
    too_long: RowLog = field(default_factory=RowLog)
    longest: int = 0  # tokens, of all rows before any was dropped or cut
    dropped_rows: int = 0
    dropped_tokens: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    emptied_rows: int = 0  # truncated until no supervised token was left, then dropped
    context_rows: int = 0
    unclosed_rows: int = 0

    def add(self, other: "Tally") -> None:
        """Take in the tally of the rows that follow."""
        for name, value in vars(other).items():
            if isinstance(value, RowLog):
                getattr(self, name).extend(value)
            elif name == "longest":
                self.longest = max(self.longest, value)
            elif name not in ("files", "rows_of"):
                setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> str:
        """As text; files go by their place in ``files``, so that the text holds for copies of them."""

        def log(rows: RowLog) -> dict[str, Any]:
            places = [(self.files.index(r.where.path), r.where.number, r.where.unit) for r in rows.first]
            listed = [(*p, r.reason, r.roles) for p, r in zip(places, rows.first, strict=True)]
            return {"first": listed, "rest": dict(rows.rest)}

        values = {name: log(v) if isinstance(v, RowLog) else v for name, v in vars(self).items() if name != "files"}
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str, files: list[Path]) -> "Tally":
        """Read back what ``to_json`` wrote, for these files."""
        values = json.loads(text)
        for name in ("bad", "too_long"):
            first = [
                BadRow(Where(files[f], n, unit), reason, roles) for f, n, unit, reason, roles in values[name]["first"]
            ]
            values[name] = RowLog(first, Counter(values[name]["rest"]))
        return cls(files, **values)
