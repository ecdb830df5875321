"""What a configuration names as data: files, globs and data sets of the hub, each with a weight."""

import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_nd.assets import resolve
from lightning_nd.data.errors import DataError
from lightning_nd.data.sources import SUFFIXES, Piece, RawRow, lazy_rows, row_of_dataset, split_file
from lightning_nd.names import nearest

_HUB_ROWS = 1000


@dataclass(frozen=True)
class Source:
    """Files or a data set of the hub, and how often an epoch reads their rows.

    Args:
        path: File or glob.
        hub: Instead: id of a data set, for ``datasets.load_dataset``.
        config: Of the data set, where it has several.
        split: Of the data set; a part of it as ``train[:10%]``.
        weight: How many times an epoch reads each row; 0.5 reads half of them in one epoch, the others in the next.

    """

    path: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str = "train"
    weight: float = 1.0

    def check(self) -> None:
        """Refuse what is no source.

        Raises:
            ValueError: it names neither or both of ``path`` and ``hub``, or the weight is not positive.

        """
        if (self.path is None) == (self.hub is None):
            raise ValueError(f"a source has either 'path' or 'hub', got {self}")
        number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not (number and 0 < self.weight < float("inf")):
            raise ValueError(f"the weight of a source is a positive number, got {self}")

    def __str__(self) -> str:
        values = {name: value for name, value in vars(self).items() if value != type(self).__dict__.get(name)}
        return "{" + ", ".join(f"{name}: {value}" for name, value in values.items()) + "}"


Sources = str | PathLike[str] | Source | dict[str, Any] | Sequence[str | PathLike[str] | Source | dict[str, Any]]


@dataclass(frozen=True)
class Input:
    """One file, or one data set of the hub.

    Args:
        name: Absolute path, or the id with the split.
        weight: As of ``Source``.
        dataset: The data set, if it is one of the hub.

    """

    name: Path
    weight: float
    dataset: Any = None

    def split(self) -> tuple[list[Piece], str]:
        """Pieces to tokenise, and a digest of the content.

        Raises:
            DataError: the file cannot be read.

        """
        return split_file(self.name) if self.dataset is None else _split_dataset(self.name, self.dataset)

    def rows(self) -> Iterator[Callable[[], RawRow]]:
        """Every row, one after the other, each still to be parsed."""
        if self.dataset is None:
            yield from lazy_rows(self.name)
        else:
            number = 0
            # In tables: iterated by rows, a streamed set gives each worker of a DataLoader other ones.
            for table in self.dataset.with_format("arrow").iter(batch_size=_HUB_ROWS):
                for index in range(len(table)):
                    number += 1
                    yield partial(_row_of_table, self.name, number, table, index)


def _row_of_table(name: Path, number: int, table: Any, index: int) -> RawRow:
    return row_of_dataset(name, number, table.slice(index, 1).to_pylist()[0])


def as_sources(given: Sources | None, setting: str) -> list[Source]:
    """What a user may write as sources, made uniform.

    Raises:
        ValueError: a source is not one.

    """
    if given is None:
        return []
    several = [given] if isinstance(given, str | PathLike | Source | dict) else given
    found = []
    for one in several:
        try:
            if isinstance(one, dict):
                for name in one:
                    if name not in (known := [f.name for f in fields(Source)]):
                        raise ValueError(f"unknown key {name!r} of a source: {nearest(name, known)}")
                one = Source(**one)
            found.append(one if isinstance(one, Source) else Source(str(one)))
            found[-1].check()
        except ValueError as error:
            raise ValueError(f"{setting}: {error}") from error
    if any(source.weight != 1 for source in found) and setting != "data.train":
        raise ValueError(f"{setting}: weights are for data.train; here every row is read once")
    return found


def find_inputs(sources: Sequence[Source], setting: str, *, streaming: bool = False) -> list[Input]:
    """The files and data sets of sources, in the order given and sorted within one glob; none comes twice.

    A relative path starts at the current directory, ``~`` is the home directory, ``**`` crosses folders and
    ``lightning_nd://quickstart/train.jsonl`` names a file of the package.

    Args:
        sources: From the configuration.
        setting: The option that they come from, for messages.
        streaming: Data sets of the hub are read while they are used, and not downloaded first.

    Raises:
        DataError: nothing matches, a folder is given, the format is unknown (the absolute path is shown), a file is
            named with two weights, or a data set cannot be loaded.

    """
    inputs: dict[Path, Input] = {}
    for source in sources:
        if source.path is not None:
            found = [Input(path, source.weight) for path in _find_files(source.path, setting)]
        else:
            found = [_load(source, setting, streaming)]
        for one in found:
            before = inputs.setdefault(one.name, one)
            if before.weight != one.weight:
                raise DataError(f"{setting}: {one.name} is named with the weights {before.weight:g} and {one.weight:g}")
    if not inputs:
        raise DataError(f"{setting}: an empty list of files")
    return list(inputs.values())


def _find_files(pattern: str, setting: str) -> list[Path]:
    try:
        path = Path(resolve(pattern)).expanduser().absolute()
    except FileNotFoundError as error:
        raise DataError(f"{setting}: {error}") from error
    if path.is_dir():
        raise DataError(f"{setting}: {path} is a folder. Name its files, for example {path}/*.jsonl")
    # A file may have brackets in its name, so the literal path comes first.
    found = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    found = [p for p in found if p.is_file()]
    if not found:
        raise DataError(
            f"{setting}: no file {path} (given as {pattern!r}; a relative path starts at the "
            f"current directory, {Path.cwd()}). A data set of the hub is named by {{hub: …}}"
        )
    for path in found:
        if path.suffix.lower() not in SUFFIXES:
            allowed = ", ".join(SUFFIXES)
            raise DataError(f"{setting}: {path} has an unknown format {path.suffix!r}; allowed are {allowed}")
    return found


def _load(source: Source, setting: str, streaming: bool) -> Input:
    from datasets import load_dataset

    assert source.hub is not None
    try:
        dataset = load_dataset(source.hub, source.config, split=source.split, streaming=streaming)
    except Exception as error:  # datasets, the hub client and the network have a great many
        raise DataError(f"{setting}: cannot load {source}: {type(error).__name__}: {error}") from error
    config = f"/{source.config}" if source.config else ""
    return Input(Path(f"{source.hub}{config}:{source.split}"), source.weight, dataset)


class _Hash:
    """A file that only its digest is kept of."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)


def _split_dataset(name: Path, dataset: Any) -> tuple[list[Piece], str]:
    import pyarrow as pa

    content = _Hash()
    tables = dataset.with_format("arrow").iter(batch_size=_HUB_ROWS)
    pieces, row, writer = [], 0, None
    for table in tables:
        if writer is None:
            writer = pa.ipc.new_stream(pa.PythonFile(content, mode="w"), table.schema)
        writer.write_table(table.combine_chunks())
        pieces.append(Piece(name, row, row + len(table), row + 1, table.nbytes, dataset))
        row += len(table)
    if writer is not None:
        writer.close()
    return pieces, content.digest.hexdigest()
