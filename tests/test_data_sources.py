"""CSV files, data sets of the hub, and several sources with weights."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from lightning_nd.data import ChatDataModule, DataError, Group, PackOrder, RowOrder


def module(train, **options):
    options.setdefault("tokenizer", tiny_tokenizer())
    data = ChatDataModule(train=train, **options)
    data.setup("fit")
    return data


def refused(train, **options) -> str:
    with pytest.raises(DataError) as caught:
        module(train, **options)
    return str(caught.value)


def decoded(data: ChatDataModule) -> list[str]:
    rows = data.dataset("train")
    return [data.tokenizer.decode(rows[i]["input_ids"]) for i in range(len(rows))]


def texts(path: Path, *values: str) -> str:
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return str(path)


class TestCsv:
    def write(self, path: Path, *rows: list[str]) -> str:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows(rows)
        return str(path)

    def test_every_format_of_rows(self, tmp_path):
        messages = json.dumps([{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": 'say "c", d'}])
        columns = ["id", "messages", "prompt", "completion", "text", "input_ids", "labels", "train"]
        path = self.write(
            tmp_path / "rows.csv",
            columns,
            ["1", messages, "", "", "", "", "", ""],
            ["2", "", "two, and\n", "lines", "", "", "", ""],
            ["3", "", "", "", "grüße", "", "", ""],
            ["4", "", "", "", "", "[10, 11, 12]", "[-100, -100, 12]", ""],
            ["5", "", "", "", "context", "", "", "False"],
        )
        data = module(path)
        assert decoded(data)[:3] == [
            '<|user|>a\nb<|end|><|assistant|>say "c", d<|end|>',
            "two, and\nlines<|end|>",
            "grüße<|end|>",
        ]
        rows = data.dataset("train")
        assert (rows[3]["input_ids"].tolist(), rows[3]["labels"].tolist()) == ([10, 11, 12], [-100, -100, 12])
        assert "1 row with 'train': false" in data.describe()

    def test_bad_rows_are_named_by_the_physical_line_that_they_begin_in(self, tmp_path):
        path = tmp_path / "rows.csv"
        path.write_bytes(
            b'text,messages\n"two\nlines",\n\nfine,,extra\n,\n,"[{""role"""\n"bad \xff byte",\nlast,\n'
            b'"never closed,\nx,\n'
        )
        text = refused(str(path))
        for line, reason in {
            5: "3 fields, but the header names 2",
            6: "no known format",
            7: "column 'messages' is not valid JSON",
            8: "column 'text' holds a byte that is not valid UTF-8",
            10: "not valid CSV (unexpected end of data)",
        }.items():
            assert f"{path}:{line}: {reason}" in text
        assert "5 rows cannot be used" in text
        assert decoded(module(str(path), on_bad_row="skip")) == ["two\nlines<|end|>", "last<|end|>"]

    def test_a_column_that_is_named_twice_is_refused(self, tmp_path):
        path = self.write(tmp_path / "a.csv", ["text", "text"], ["a", "b"])
        assert "a.csv:1: the header names 'text' more than once" in refused(path)

    def test_a_field_may_be_long_and_a_file_without_rows_is_named(self, tmp_path):
        limit = csv.field_size_limit()
        path = self.write(tmp_path / "rows.csv", ["text"], ["a" * 200_000])
        assert module(path).dataset("train").lengths.tolist() == [200_001]
        assert csv.field_size_limit() == limit
        path = self.write(tmp_path / "none.csv", ["text"])
        assert f"there is no row in {path}" in refused(path)


class TestHub:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")

    def repository(self, tmp_path: Path) -> str:
        """What the hub has, as a folder: `load_dataset` takes either."""
        (tmp_path / "set").mkdir()
        texts(tmp_path / "set" / "train.jsonl", *(f"row {i}" if i != 7 else "" for i in range(20)))
        texts(tmp_path / "set" / "test.jsonl", "held out")
        return str(tmp_path / "set")

    def test_a_split_is_read_and_its_rows_are_named(self, tmp_path):
        name = self.repository(tmp_path)
        assert f"{name}:train, row 8: 'text' is empty" in refused({"hub": name})
        data = module({"hub": name}, val={"hub": name, "split": "test"}, on_bad_row="skip")
        assert decoded(data) == [f"row {i}<|end|>" for i in range(20) if i != 7]
        assert len(data.dataset("val")) == 1
        assert decoded(module({"hub": name, "split": "train[:3]"})) == [f"row {i}<|end|>" for i in range(3)]

    def test_what_cannot_be_loaded_is_named_with_the_reason(self, tmp_path):
        name = self.repository(tmp_path)
        text = refused({"hub": name, "split": "dev"})
        assert text.startswith(f"data.train: cannot load {{hub: {name}, split: dev}}: ")
        assert "Unknown split" in text
        assert "cannot load {hub: no/such-set}" in refused({"hub": "no/such-set"})


groups_of = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.25, 0.5, 1, 1.5, 2, 3])), min_size=1, max_size=3)


def grouped(groups: list[tuple[int, float]]) -> list[Group]:
    starts = np.cumsum([0] + [n for n, _ in groups])
    return [Group(np.arange(a, a + n), w) for a, (n, w) in zip(starts, groups, strict=False)]


@settings(deadline=None, max_examples=150)
@given(groups=groups_of, seed=st.integers(0, 3), pack=st.booleans())
def test_a_weight_is_how_many_times_an_epoch_reads_a_row(groups, seed, pack):
    made = grouped(groups)
    lengths = np.arange(sum(n for n, _ in groups)) % 7 + 1
    try:
        order = PackOrder(made, lengths, 12) if pack else RowOrder(made)
    except ValueError:  # of some group nothing would ever be read
        reject()
    total: Counter[int] = Counter()
    for epoch in range(4):  # in four epochs, quarters and halves come out whole
        items = order.items(seed, epoch, shuffle=True)
        assert len(items) == len(order)
        assert items == order.items(seed, epoch, shuffle=True)
        rows = [row for item in items for row in (item if isinstance(item, tuple) else (item,))]
        read = Counter(rows)
        for group in made:
            times = {read[row] for row in group.rows.tolist()}
            assert times <= {int(group.weight), int(group.weight) + (group.weight % 1 > 0)}
        total += read
    for group in made:
        times = {total[row] for row in group.rows.tolist()}
        # Rows that do not divide leave a row one reading ahead.
        assert max(times) - min(times) <= 1
        if not pack and (4 * group.weight) % 1 == 0 and (len(group.rows) * group.weight) % 1 == 0:
            assert times == {4 * group.weight}


def test_a_source_that_would_never_be_read_is_refused(tmp_path):
    file = texts(tmp_path / "few.jsonl", *(f"row {i}" for i in range(9)))
    text = refused({"path": file, "weight": 0.04})
    assert "a weight of 0.04 on 9 rows is less than half a row an epoch" in text
    assert "at least 0.056" in text
    packed = {"packing": True, "max_length": 512}
    text = refused({"path": file, "weight": 0.4}, **packed)
    assert "a weight of 0.4 on 1 pack is less than half a pack" in text
    loader = module({"path": file, "weight": 0.5}, **packed).train_dataloader()
    assert len(loader) == 1  # not nothing, and not all rows one by one


def test_half_a_weight_takes_turns():
    order = RowOrder([Group(np.arange(10), 0.5)])
    first, second = (set(order.items(3, epoch, shuffle=True)) for epoch in (0, 1))
    assert first.isdisjoint(second)
    assert first | second == set(range(10))
    assert first != set(range(5))  # drawn, not the first ones


def test_weights_of_files(tmp_path):
    a, b, c = (texts(tmp_path / f"{n}.jsonl", f"{n}1", f"{n}2") for n in "abc")
    data = module([{"path": a, "weight": 2}, b, {"path": c, "weight": 0.5}], micro_batch_size=1, seed=1)
    read = Counter(data.tokenizer.decode(batch["input_ids"][0]) for batch in data.train_dataloader())
    assert {name: n for name, n in read.items() if name[0] != "c"} == {
        "a1<|end|>": 2,
        "a2<|end|>": 2,
        "b1<|end|>": 1,
        "b2<|end|>": 1,
    }
    assert sum(n for name, n in read.items() if name[0] == "c") == 1
    report = data.describe()
    assert "weight 2: 2 rows with 6 tokens, read 2 times an epoch" in report
    assert "weight 0.5: 2 rows with 6 tokens, read 0.5 times an epoch" in report


def test_packs_are_made_within_a_weight(tmp_path):
    a, b = (texts(tmp_path / f"{n}.jsonl", *(f"{n}{i}" for i in range(8))) for n in "ab")
    data = module([{"path": a, "weight": 2}, b], packing=True, max_length=9, seed=1)
    packs = data._orders["train"].items(1, 0, shuffle=True)
    assert Counter(row for pack in packs for row in pack) == Counter({**dict.fromkeys(range(8), 2)}) + Counter(
        range(8, 16)
    )
    assert all(max(pack) < 8 or min(pack) >= 8 for pack in packs)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            {"path": "a.jsonl", "weight": 0},
            "the weight of a source is a positive number, got {path: a.jsonl, weight: 0}",
        ),
        ({"path": "a.jsonl", "weight": -1}, "positive number"),
        ({"path": "a.jsonl", "weight": "much"}, "positive number"),
        ({"weight": 2}, "either 'path' or 'hub'"),
        ({"path": "a", "hub": "b"}, "either 'path' or 'hub'"),
        ({"path": "a", "wait": 2}, "unknown key 'wait' of a source: did you mean 'weight'"),
    ],
)
def test_what_is_no_source_is_refused_at_once(source, text):
    with pytest.raises(ValueError, match=r"data\.train: ") as caught:
        ChatDataModule(train=source)
    assert text in str(caught.value)


def test_weights_elsewhere_and_two_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.val: weights are for data\.train"):
        ChatDataModule(val={"path": "a.jsonl", "weight": 2})
    path = texts(tmp_path / "a.jsonl", "a")
    text = refused([{"path": path, "weight": 2}, str(tmp_path / "*.jsonl")])
    assert f"{path} is named with the weights 2 and 1" in text


def test_a_file_without_rows_among_others_is_warned_of(tmp_path):
    path = texts(tmp_path / "a.jsonl", "a")
    empty = texts(tmp_path / "empty.jsonl")
    assert f"warning: no row of {empty} is used" in module([path, empty]).describe()
