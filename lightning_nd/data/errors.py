"""What goes wrong with data, and how it is told."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

#: How many rows one report lists in full; the rest is counted by reason.
MAX_LISTED = 100


class DataError(ValueError):
    """A dataset cannot be used as it is. The message lists what was found, where, and what to change."""


class RowError(ValueError):
    """One row cannot be used.

    Args:
        reason: What is wrong, in a few words.
        roles: The role sequence of a chat row, shown beside the reason.

    """

    def __init__(self, reason: str, roles: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.roles = roles


@dataclass(frozen=True)
class Where:
    """The place of a row: an absolute path, and from 1 the physical line (or in Parquet, the row)."""

    path: Path
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.unit == "line" else f"{self.path}, {self.unit} {self.number}"


@dataclass(frozen=True)
class BadRow:
    """A row that was refused, with the reason."""

    where: Where
    reason: str
    roles: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" [roles: {self.roles}]" if self.roles else "")


def list_rows(rows: list[BadRow]) -> str:
    """One indented line per row; beyond ``MAX_LISTED`` rows the rest is counted by reason."""
    lines = [f"  {row}" for row in rows[:MAX_LISTED]]
    if rest := rows[MAX_LISTED:]:
        lines.append(f"  … and {len(rest)} more:")
        lines += [f"    {n} × {reason}" for reason, n in Counter(row.reason for row in rest).most_common(10)]
    return "\n".join(lines)
