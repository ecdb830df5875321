"""What a user reads about a dataset before training starts."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_nd.data.dataset import OnBadRow, OnTooLong, Tally, TokenDataset
from lightning_nd.data.encode import IGNORE
from lightning_nd.data.errors import DataError, RowLog
from lightning_nd.data.order import PackOrder, RowOrder

OPEN, CLOSE = "⟦", "⟧"
#: How many rows that are too long one report lists; there is no mending them one by one.
LONG_LISTED = 5


def check(
    tallies: dict[str, Tally], on_bad_row: OnBadRow, on_too_long: OnTooLong, max_length: int | None = None
) -> None:
    """Refuse datasets with bad rows, or with nothing left to learn.

    Args:
        tallies: By name of the source (train, val, …).
        on_bad_row: ``error`` refuses, ``skip`` has left them out.
        on_too_long: As applied already.
        max_length: As applied already; for the message.

    Raises:
        DataError: one report over all sources, a line per row.

    """
    bad, long = RowLog(), RowLog()
    for tally in tallies.values():
        if on_bad_row == "error":
            bad.extend(tally.bad)
        if on_too_long == "error":
            long.extend(tally.too_long)
    parts = []
    if bad:
        parts.append(
            f"{_count(len(bad), 'row')} cannot be used:\n{bad.listing()}\n"
            "Mend the file, or set data.on_bad_row: skip to leave such rows out, counted and listed."
        )
    if long:
        parts.append(
            f"{_count(len(long), 'row')} longer than data.max_length ({max_length:,} tokens), the longest "
            f"{max(tally.longest for tally in tallies.values()):,} tokens:\n{long.listing(LONG_LISTED)}\n"
            "Raise data.max_length, or set data.on_too_long: drop or truncate (both are counted)."
        )
    if not parts:
        parts = [
            f"{name}: nothing is left to learn from ({_why_empty(tally, on_bad_row)})"
            for name, tally in tallies.items()
            if name != "predict" and tally.supervised == 0
        ]
    if not parts and "predict" in tallies and not tallies["predict"].rows:
        parts.append(f"predict: no row is left ({_why_empty(tallies['predict'], on_bad_row)})")
    if parts:
        raise DataError("\n".join(parts))


def _why_empty(tally: Tally, on_bad_row: OnBadRow) -> str:
    happened = what_happened(tally, on_bad_row) or "there is no row in " + ", ".join(map(str, tally.files))
    return happened + (":\n" + tally.bad.listing() + "\n" if tally.bad else "")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def what_happened(tally: Tally, on_bad_row: OnBadRow) -> str:
    """What became of the rows that are not used as they are; empty if there are none."""
    parts = []
    if tally.bad and on_bad_row == "skip":
        parts.append(f"{_count(len(tally.bad), 'bad row')} skipped")
    if tally.dropped_rows:
        reason = "too long"
        if tally.emptied_rows:
            reason += f", {tally.emptied_rows:,} of them without a supervised token after truncation"
        what = f"{_count(tally.dropped_rows, 'row')} with {_count(tally.dropped_tokens, 'token')}"
        parts.append(f"{what} dropped ({reason})")
    if tally.truncated_rows:
        cut = _count(tally.truncated_tokens, "token")
        parts.append(f"{_count(tally.truncated_rows, 'row')} truncated, {cut} cut off")
    if tally.context_rows:
        parts.append(f"{_count(tally.context_rows, 'row')} with 'train': false")
    return "; ".join(parts)


def describe(
    name: str,
    dataset: TokenDataset,
    tally: Tally,
    order: RowOrder,
    tokenizer: PreTrainedTokenizerBase,
    on_bad_row: OnBadRow,
) -> str:
    """Rows, tokens, lengths and losses of a source, and one sample with its supervised tokens marked."""
    lengths = dataset.lengths
    tokens, supervised = int(lengths.sum()), dataset.supervised_tokens
    share = f" ({supervised / tokens:.1%})" if tokens else ""
    lines = [f"{name}: {_count(len(lengths), 'row')}, {_count(tokens, 'token')}, {supervised:,} supervised{share}"]
    if len(lengths):
        low, middle, high = np.percentile(lengths, [0, 50, 95]).astype(int)
        lines.append(f"  length in tokens: shortest {low}, median {middle}, 95% within {high}, longest {lengths.max()}")
    if len(order.groups) > 1 or order.groups[0].weight != 1:
        for group in order.groups:
            part = f"{_count(len(group.rows), 'row')} with {_count(int(lengths[group.rows].sum()), 'token')}"
            lines.append(f"  weight {group.weight:g}: {part}, read {group.weight:g} times an epoch")
    for path, rows in zip(tally.files, tally.rows_of, strict=True):
        if not rows:
            lines.append(f"  warning: no row of {path} is used")
    if isinstance(order, PackOrder):
        packs = f"{_count(order.packs, 'pack')} of {order.capacity:,} tokens"
        lines.append(f"  packed end to end into {packs}, {order.efficiency:.1%} full")
    happened = what_happened(tally, on_bad_row)
    if happened:
        lines.append(f"  {happened}")
    if tally.bad and on_bad_row == "skip":
        lines += ["  " + line for line in tally.bad.listing().splitlines()]
    if tally.unclosed_rows:
        lines.append(
            f"  warning: in {_count(tally.unclosed_rows, 'row')} the last supervised turn has no end token, "
            "so the model is not taught to stop there"
        )
    if len(lengths):
        lines.append(f"  sample, supervised tokens in {OPEN}{CLOSE}:")
        lines += ["    " + line for line in show(dataset, _sample(dataset), tokenizer).splitlines()]
    return "\n".join(lines)


def _sample(dataset: TokenDataset) -> int:
    """The first row with something supervised."""
    first = np.flatnonzero(dataset.labels != IGNORE)[:1]
    return int(np.searchsorted(dataset.bounds, first[0], side="right") - 1) if len(first) else 0


def show(dataset: TokenDataset, index: int, tokenizer: PreTrainedTokenizerBase, limit: int = 1500) -> str:
    """Decode a row, with each run of supervised tokens between marks; at most ``limit`` characters."""
    row = dataset[index]
    return mark(row["input_ids"].tolist(), row["labels"].tolist(), tokenizer, limit)


def mark(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase, limit: int = 1500) -> str:
    """Decode ids, with each run of supervised tokens between marks; at most ``limit`` characters."""
    supervised = [label != IGNORE for label in labels]
    text, start = "", 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or supervised[stop] != supervised[start]:
            piece = str(tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False))
            text += f"{OPEN}{piece}{CLOSE}" if supervised[start] else piece
            start = stop
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"
