"""What goes wrong with data, and how it is told."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: How many bad rows one report lists in full; the rest is counted by reason.
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


@dataclass
class RowLog:
    """Rows that something is the matter with: the first ``MAX_LISTED`` as they are, the others counted by reason."""

    first: list[BadRow] = field(default_factory=list)
    rest: Counter[str] = field(default_factory=Counter)

    def add(self, row: BadRow) -> None:
        """Note one row."""
        if len(self.first) < MAX_LISTED:
            self.first.append(row)
        else:
            self.rest[row.reason] += 1

    def extend(self, other: "RowLog") -> None:
        """Note the rows of another log behind those of this one."""
        for row in other.first:
            self.add(row)
        self.rest.update(other.rest)

    def __len__(self) -> int:
        return len(self.first) + self.rest.total()

    def listing(self, at_most: int = MAX_LISTED) -> str:
        """One indented line per row; beyond ``at_most`` rows the rest is counted."""
        lines = [f"  {row}" for row in self.first[:at_most]]
        if (rest := len(self) - at_most) > 0:
            lines.append(f"  … and {rest:,} more" + (":" if at_most == MAX_LISTED else ""))
        if at_most == MAX_LISTED:
            lines += [f"    {n:,} × {reason}" for reason, n in self.rest.most_common(10)]
        return "\n".join(lines)
