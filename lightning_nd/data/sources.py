"""Reading rows from JSONL, JSON, CSV and Parquet files, each with the place it came from."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_nd.data.errors import DataError, Where

_BOM = b"\xef\xbb\xbf"
_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*_LINES, ".json", ".csv", ".parquet")
_JSON_COLUMNS = ("messages", "tools", "input_ids", "labels", "train")
_PIECE = 1 << 20


@dataclass(frozen=True)
class RawRow:
    """A row as it stands in its file: an object, or the reason why there is none."""

    where: Where
    value: dict[str, Any] | None
    problem: str | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a file that can be read on its own; ``stop`` None is its end.

    ``start`` and ``stop`` are bytes in files of lines, rows in Parquet. ``number`` is the number of the first row or
    line, ``size`` the bytes (in Parquet, an estimate). A piece of a ``dataset`` is a range of its rows.
    """

    path: Path
    start: int
    stop: int | None
    number: int
    size: int
    dataset: Any = field(default=None, compare=False, repr=False)


def split_file(path: Path) -> tuple[list[Piece], str]:
    """Cut a file into pieces of about ``_PIECE`` bytes, and digest its content; both in one pass over it."""
    digest = hashlib.sha256()
    by_lines = is_lines(path)
    pieces: list[Piece] = []
    start, line, end = 0, 1, 0
    with path.open("rb") as file:
        while block := file.read(_PIECE):
            if by_lines and not block.endswith(b"\n"):
                block += file.readline()
            digest.update(block)
            end += len(block)
            if by_lines:
                pieces.append(Piece(path, start, end, line, end - start))
                start, line = end, line + block.count(b"\n")
    if path.suffix.lower() == ".parquet":
        pieces = _split_parquet(path, end)
    elif not by_lines:
        pieces = [Piece(path, 0, None, 1, end)]
    # The same bytes are other rows in another format.
    digest.update(path.suffix.lower().encode())
    return pieces, digest.hexdigest()


def is_lines(path: Path) -> bool:
    """Whether each line of a file is a row of its own."""
    suffix = path.suffix.lower()
    return suffix in _LINES or (suffix == ".json" and not _starts_with_bracket(path))


def read_rows(path: Path) -> Iterator[RawRow]:
    """Every row of a file. What is not a row, a cut line for example, comes out with its ``problem``.

    Text is UTF-8 with or without a byte-order mark. A byte that is not UTF-8 is a problem of its line, never
    replaced. Blank lines are no rows.
    """
    yield from read_piece(Piece(path, 0, None, 1, 0))


def lazy_rows(path: Path) -> Iterator[Callable[[], RawRow]]:
    """As ``read_rows``; a line is parsed only when its row is called for."""
    if is_lines(path):
        for where, line in _lines(Piece(path, 0, None, 1, 0)):
            yield partial(_row_of_line, where, line)
    else:
        for row in read_rows(path):
            yield partial(_itself, row)


def _itself(row: RawRow) -> RawRow:
    return row


def row_of_dataset(name: Path, number: int, value: dict[str, Any]) -> RawRow:
    """A row of a data set of the hub."""
    return RawRow(Where(name, number, "row"), _without_nulls(value))


def read_piece(piece: Piece) -> Iterator[RawRow]:
    """As ``read_rows``, for a piece of a file."""
    suffix = piece.path.suffix.lower()
    if piece.dataset is not None:
        rows = piece.dataset.with_format("arrow")[piece.start : piece.stop].to_pylist()
        for number, row in enumerate(rows, start=piece.number):
            yield row_of_dataset(piece.path, number, row)
    elif suffix == ".parquet":
        yield from _read_parquet(piece)
    elif suffix == ".csv":
        yield from _read_csv(piece.path)
    elif is_lines(piece.path):
        yield from _read_lines(piece)
    else:
        yield from _read_json_array(piece.path)


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        while chunk := file.read(4096):
            if chunk := chunk.removeprefix(_BOM).lstrip():
                return chunk.startswith(b"[")
    return False


def _parse(text: str) -> tuple[dict[str, Any] | None, str | None]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return None, f"not valid JSON ({error.msg}, column {error.colno})"
    except (ValueError, RecursionError) as error:
        return None, f"not readable as JSON ({error})"
    return _as_object(value)


def _as_object(value: Any) -> tuple[dict[str, Any] | None, str | None]:
    if isinstance(value, dict):
        return value, None
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return None, f"not an object but {names.get(type(value), 'a number')}"


def _bad_byte(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"byte 0x{byte:02x} at byte {error.start + 1} of the line is not valid UTF-8 ({error.reason})"


def _read_lines(piece: Piece) -> Iterator[RawRow]:
    for where, line in _lines(piece):
        yield _row_of_line(where, line)


def _lines(piece: Piece) -> Iterator[tuple[Where, bytes]]:
    path, at = piece.path, piece.start
    with path.open("rb") as file:
        file.seek(at)
        for number, line in enumerate(file, start=piece.number):
            if piece.stop is not None and at >= piece.stop:
                return
            at += len(line)
            if number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DataError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8")
                line = line.removeprefix(_BOM)
            if line.strip():
                yield Where(path, number), line


def _row_of_line(where: Where, line: bytes) -> RawRow:
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return RawRow(where, None, _bad_byte(error))
    return RawRow(where, *_parse(text))


def _read_json_array(path: Path) -> Iterator[RawRow]:
    data = path.read_bytes().removeprefix(_BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        in_line = UnicodeDecodeError("utf-8", data[start:], error.start - start, error.end - start, error.reason)
        yield RawRow(Where(path, data.count(b"\n", 0, error.start) + 1), None, _bad_byte(in_line))
        return
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    line, counted = 1, 0
    first = True
    while True:
        at = _skip_space(text, at)
        line, counted = line + text.count("\n", counted, at), at
        where = Where(path, line)
        if text[at : at + 1] == "]":
            if text[at + 1 :].strip():
                yield RawRow(where, None, "not valid JSON (text after the closing bracket)")
            return
        if not first:
            if text[at : at + 1] != ",":
                yield RawRow(where, None, "not valid JSON (a comma or the closing bracket is missing)")
                return
            at = _skip_space(text, at + 1)
            line, counted = line + text.count("\n", counted, at), at
            where = Where(path, line)
        first = False
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            # Nothing after a broken element can be trusted, so the file ends here.
            yield RawRow(Where(path, error.lineno), None, f"not valid JSON ({error.msg}, column {error.colno})")
            return
        except (ValueError, RecursionError) as error:
            yield RawRow(where, None, f"not readable as JSON ({error})")
            return
        yield RawRow(where, *_as_object(value))


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _split_parquet(path: Path, size: int) -> list[Piece]:
    import pyarrow.parquet as pq

    with _readable(path):
        metadata = pq.read_metadata(path)
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    pieces, row = [], 0
    for group, count in enumerate(counts):
        pieces.append(Piece(path, group, group + 1, row + 1, size * count // max(1, sum(counts))))
        row += count
    return pieces


def _read_parquet(piece: Piece) -> Iterator[RawRow]:
    import pyarrow.parquet as pq

    with _readable(piece.path), pq.ParquetFile(piece.path) as file:
        groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
        number = piece.number
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups)):
            for row in batch.to_pylist():
                yield RawRow(Where(piece.path, number, "row"), _without_nulls(row))
                number += 1


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _read_csv(path: Path) -> Iterator[RawRow]:
    # A byte that is not UTF-8 becomes half of a surrogate pair, by which its row is found.
    text = path.read_bytes().removeprefix(_BOM).decode("utf-8", errors="surrogateescape")
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    try:
        yield from list(_csv_rows(path, csv.reader(io.StringIO(text, newline=""), strict=True)))
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path, reader: Any) -> Iterator[RawRow]:
    header: list[str] | None = None
    line = 1
    while True:
        where, line = Where(path, line), 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # Nothing behind a quote that is not closed can be trusted.
            yield RawRow(where, None, f"not valid CSV ({error})")
            return
        line = reader.line_num + 1
        if not fields:
            continue
        if header is None:
            header = [name.strip() for name in fields]
            if twice := next((name for name in header if header.count(name) > 1), None):
                yield RawRow(where, None, f"the header names {twice!r} more than once, and one of them would be lost")
                return
        elif len(fields) != len(header):
            yield RawRow(where, None, f"{len(fields)} fields, but the header names {len(header)}")
        else:
            yield RawRow(where, *_csv_row(dict(zip(header, fields, strict=True))))


def _csv_row(fields: dict[str, str]) -> tuple[dict[str, Any] | None, str | None]:
    """Empty fields are absent; the columns that are no text hold JSON."""
    row: dict[str, Any] = {}
    for name, text in fields.items():
        if not text.isascii() and any("\udc80" <= c <= "\udcff" for c in text):
            return None, f"column {name!r} holds a byte that is not valid UTF-8"
        if not text:
            continue
        if name in _JSON_COLUMNS:
            try:
                row[name] = json.loads(text.lower() if name == "train" else text)
            except (ValueError, RecursionError) as error:
                return None, f"column {name!r} is not valid JSON ({error})"
        else:
            row[name] = text
    return row, None


def _without_nulls(value: Any) -> Any:
    """Drop null keys of nested objects.

    Parquet gives every struct of a column the union of their keys; a key that a row never had must not reach
    its prompt.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
