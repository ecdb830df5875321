"""Tokenised once, by one process a node, kept under a key of all that decides the tokens."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from pool import Pool, WorkerError, tiny_trainer
from tiny import TEMPLATE, tiny_model, tiny_tokenizer

from lightning_nd.data import ChatDataModule, DataError, sources, tokenise
from lightning_nd.data.node import once_per_node


def chats(path: Path, count: int = 40, bad: tuple[int, ...] = ()) -> Path:
    """Conversations of growing length, one a line; the lines ``bad`` are cut."""
    rows = [
        json.dumps({"messages": [{"role": "user", "content": f"row {i}"}, {"role": "assistant", "content": "a" * i}]})
        for i in range(1, count + 1)
    ]
    path.write_text("".join((row[:20] if i in bad else row) + "\n" for i, row in enumerate(rows, start=1)))
    return path


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose pieces were encoded so far in this process."""
    names: list[str] = []
    original = tokenise.encode_piece

    def counting(piece, *args):
        names.append(piece.path.name)
        return original(piece, *args)

    monkeypatch.setattr(tokenise, "encode_piece", counting)
    return names


def ready(train: Path, cache: Path, stage: str = "fit", **options) -> ChatDataModule:
    options.setdefault("tokenizer", tiny_tokenizer())
    data = ChatDataModule(str(train), cache_dir=str(cache), **options)
    data.setup(stage)
    return data


def tokens(data: ChatDataModule) -> list[tuple[list[int], list[int]]]:
    rows = data.dataset("train")
    return [(rows[i]["input_ids"].tolist(), rows[i]["labels"].tolist()) for i in range(len(rows))]


def test_the_second_run_reads_what_the_first_has_tokenised(tmp_path, encoded):
    path, cache = chats(tmp_path / "a.jsonl", bad=(3,)), tmp_path / "cache"
    first = ready(path, cache, on_bad_row="skip")
    assert encoded == ["a.jsonl"]
    second = ready(path, cache, on_bad_row="skip")
    assert encoded == ["a.jsonl"]
    assert tokens(first) == tokens(second)
    assert first.describe() == second.describe()
    assert f"{path}:3: not valid JSON" in second.describe()


def test_a_copy_of_a_file_is_known_and_reported_under_its_own_name(tmp_path, encoded):
    ready(chats(tmp_path / "a.jsonl", bad=(3,)), tmp_path / "cache", on_bad_row="skip")
    again = ready(chats(tmp_path / "b.jsonl", bad=(3,)), tmp_path / "cache", on_bad_row="skip")
    assert encoded == ["a.jsonl"]
    assert f"{tmp_path}/b.jsonl:3: not valid JSON" in again.describe()
    with pytest.raises(DataError, match=r"b\.jsonl:3: not valid JSON"):
        ready(tmp_path / "b.jsonl", tmp_path / "cache")


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 100},
        {"max_length": 30, "on_too_long": "drop"},
        {"train_on": "all"},
        {"tokenizer": tiny_tokenizer(TEMPLATE.replace("<|end|>{%", "<|end|>\n{%"))},
        {"tokenizer": tiny_tokenizer(prepend_bos=True)},
        {"system": "fold"},
    ],
    ids=["max_length", "on_too_long", "train_on", "template", "tokenizer", "system"],
)
def test_whatever_decides_tokens_is_in_the_key(tmp_path, encoded, change):
    path = chats(tmp_path / "a.jsonl")
    ready(path, tmp_path / "cache")
    ready(path, tmp_path / "cache", **change)
    assert encoded == ["a.jsonl", "a.jsonl"]


def test_changed_files_are_tokenised_again(tmp_path, encoded):
    path = chats(tmp_path / "a.jsonl")
    stamp = path.stat().st_mtime_ns
    first = ready(path, tmp_path / "cache")
    path.write_text(path.read_text().replace("row 7", "row 8"))  # as long, and as old
    os.utime(path, ns=(stamp, stamp))
    second = ready(path, tmp_path / "cache")
    assert encoded == ["a.jsonl", "a.jsonl"]
    assert tokens(first) != tokens(second)


def truncated(folder: Path) -> None:
    with (folder / "labels.bin").open("r+b") as file:
        file.truncate(100)


def flipped(folder: Path) -> None:
    data = bytearray((folder / "input_ids.bin").read_bytes())
    data[40] ^= 1
    (folder / "input_ids.bin").write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        flipped,
        lambda folder: (folder / "meta.json").unlink(),
        lambda folder: (folder / "meta.json").write_text("{"),
        lambda folder: (folder / "meta.json").write_text("{}"),
        lambda folder: (folder / "lengths.bin").unlink(),
    ],
    ids=["truncated", "flipped bit", "no meta", "half meta", "empty meta", "missing array"],
)
def test_a_damaged_entry_is_made_again(tmp_path, encoded, damage, caplog):
    path, cache = chats(tmp_path / "a.jsonl"), tmp_path / "cache"
    expected = tokens(ready(path, cache))
    (folder,) = cache.iterdir()
    damage(folder)
    with caplog.at_level(logging.WARNING):
        assert tokens(ready(path, cache)) == expected
    assert encoded == ["a.jsonl", "a.jsonl"]
    assert "are damaged" in caplog.text
    assert [p.name for p in cache.iterdir()] == [folder.name]


def test_what_was_refused_leaves_nothing_behind(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="1 row cannot be used"):
        ready(chats(tmp_path / "a.jsonl", bad=(5,)), cache)
    assert list(cache.iterdir()) == []

    def breaks(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenise, "encode_piece", breaks)
    with pytest.raises(KeyboardInterrupt):
        ready(chats(tmp_path / "a.jsonl"), cache)
    assert list(cache.iterdir()) == []


def test_many_processes_and_pieces_give_the_same_rows_and_line_numbers(tmp_path, monkeypatch):
    path = chats(tmp_path / "a.jsonl", count=200, bad=(17, 130))
    one = ready(path, tmp_path / "one", on_bad_row="skip")
    monkeypatch.setattr(sources, "_PIECE", 300)
    pieces, _ = sources.split_file(path)
    assert len(pieces) > 20
    many = ready(path, tmp_path / "many", on_bad_row="skip", num_proc=2)
    assert tokens(one) == tokens(many)
    assert one.describe() == many.describe()
    assert f"{path}:130: not valid JSON" in many.describe()


def test_pieces_of_a_parquet_file_are_its_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"text": [f"row {i}" if i != 7 else "" for i in range(10)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    assert [p.number for p in sources.split_file(tmp_path / "a.parquet")[0]] == [1, 5, 9]
    data = ready(tmp_path / "a.parquet", tmp_path / "cache", on_bad_row="skip", num_proc=2)
    assert len(data.dataset("train")) == 9
    assert "a.parquet, row 8: 'text' is empty" in data.describe()


def test_a_large_source_shows_its_progress(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokenise, "LARGE", 1000)
    ready(chats(tmp_path / "a.jsonl"), tmp_path / "cache")
    assert "Tokenising train: 100%" in capsys.readouterr().err
    ready(chats(tmp_path / "a.jsonl"), tmp_path / "cache")
    assert "Tokenising" not in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    path = chats(tmp_path / "a.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.cache_dir: .*file/cache cannot be written"):
        ready(path, tmp_path / "file" / "cache")
    monkeypatch.setenv("LIGHTNING_ND_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = ChatDataModule(str(path), tokenizer=tiny_tokenizer())
    data.setup("fit")  # a default gives way
    assert "cannot be written" in caplog.text
    assert len(data.dataset("train")) == 40


# -- several ranks ----------------------------------------------------------------------------------------------------


class Nothing(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_model()

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(rank: int, world_size: int, path: str, cache: str, fail: str = "") -> tuple[int, int, str]:
    from lightning_nd import NDStrategy

    calls = []
    original = tokenise.encode_piece

    def counting(*args):
        calls.append(1)
        if fail:
            raise MemoryError(fail)
        return original(*args)

    data = ChatDataModule(path, tokenizer=tiny_tokenizer(), cache_dir=cache)
    text = ""
    tokenise.encode_piece = counting
    try:
        tiny_trainer(rank, world_size, NDStrategy(), max_steps=1).fit(Nothing(), data)
    except (DataError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        tokenise.encode_piece = original
    return len(calls), 0 if text else len(data.dataset("train")), text


def test_one_rank_of_a_node_tokenises_for_all(pool: Pool, tmp_path):
    path = chats(tmp_path / "a.jsonl")
    assert pool.run(fit, 3, str(path), str(tmp_path / "cache")) == [(1, 40, ""), (0, 40, ""), (0, 40, "")]
    assert pool.run(fit, 2, str(path), str(tmp_path / "cache")) == [(0, 40, ""), (0, 40, "")]


def test_all_ranks_see_why_the_one_failed(pool: Pool, tmp_path):
    path = chats(tmp_path / "a.jsonl", bad=(4,))
    (_, _, first), (_, _, second) = pool.run(fit, 2, str(path), str(tmp_path / "cache"))
    assert f"{path}:4: not valid JSON" in first
    assert second == "DataError: 1 row cannot be used (rank 0 has the whole report)"
    path = chats(tmp_path / "b.jsonl")
    (_, _, first), (_, _, second) = pool.run(fit, 2, str(path), str(tmp_path / "cache"), "of all bytes")
    assert first == "MemoryError: of all bytes"
    assert second == "DataError: MemoryError: of all bytes (rank 0 has the whole report)"


def on_two_nodes(rank: int, world_size: int, failing: int | None) -> str:
    """Four ranks, two a node."""

    def work() -> str:
        if rank == failing:
            raise DataError("no file x\n(and more)")
        return f"made by {rank}"

    try:
        return once_per_node(work, SimpleNamespace(local_rank=rank % 2))
    except DataError as error:
        return str(error)


def test_every_node_has_its_own_and_all_nodes_stop_for_one(pool: Pool):
    assert pool.run(on_two_nodes, 4, None) == ["made by 0", "made by 0", "made by 2", "made by 2"]
    short = "rank 2: no file x (rank 2 has the whole report)"
    whole = "no file x\n(and more)"
    assert pool.run(on_two_nodes, 4, 2) == [f"rank 2: {whole}", short, whole, short]
    assert pool.run(on_two_nodes, 4, 0)[1:] == ["no file x (rank 0 has the whole report)"] * 3


def die(rank: int, world_size: int, path: str, cache: str) -> None:
    from lightning_nd import NDStrategy

    def gone(*_):
        os._exit(7)

    data = ChatDataModule(path, tokenizer=tiny_tokenizer(), cache_dir=cache)
    if rank == 0:
        tokenise.encode_piece = gone
    tiny_trainer(rank, world_size, NDStrategy(), max_steps=1).fit(Nothing(), data)


def test_nobody_waits_for_a_rank_that_died(pool: Pool, tmp_path):
    with pytest.raises(WorkerError) as caught:
        pool.run(die, 2, str(chats(tmp_path / "a.jsonl")), str(tmp_path / "cache"))
    # Rank 1 has failed by itself: it was not found waiting.
    assert "onnection" in str(caught.value.failures.get(1, "")), caught.value
