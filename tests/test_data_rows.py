"""Reading and checking rows: what is refused, and what the report says."""

import json
from pathlib import Path

import pytest
from tiny import tiny_tokenizer

from lightning_nd.data import ChatDataModule, DataError

CASES = Path(__file__).parent / "cases"


def module(train, **options):
    options.setdefault("tokenizer", tiny_tokenizer())
    return ChatDataModule(train=[str(t) for t in train] if isinstance(train, list) else str(train), **options)


def refused(train, **options) -> str:
    with pytest.raises(DataError) as caught:
        module(train, **options).setup("fit")
    return str(caught.value)


def write(path: Path, *rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def chat(*contents, **extra):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)], **extra}


def test_broken_rows_are_named_by_file_and_physical_line():
    text = refused(CASES / "A01.jsonl")
    assert f"{CASES}/A01.jsonl:4: not valid JSON" in text
    assert f"{CASES}/A01.jsonl:6: not an object but a list" in text
    assert "2 rows cannot be used" in text
    assert "on_bad_row: skip" in text


def test_skipped_rows_are_counted_and_listed():
    data = module(CASES / "A01.jsonl", on_bad_row="skip")
    data.setup("fit")
    report = data.describe()
    assert len(data.dataset("train")) == 3
    assert "2 bad rows skipped" in report
    assert "A01.jsonl:4:" in report
    assert "A01.jsonl:6:" in report


def test_role_errors_come_in_one_report_with_the_sequences():
    text = refused(CASES / "A03.jsonl")
    assert "4 rows cannot be used" in text
    for line, roles in {
        1: "user, assistant, user, user",
        2: "assistant, user",
        3: "user, narrator",
        4: "<missing>, assistant",
    }.items():
        found = next(row for row in text.splitlines() if f"A03.jsonl:{line}:" in row)
        assert f"[roles: {roles}]" in found


def test_bad_rows_of_train_and_val_are_in_the_same_report(tmp_path):
    val = write(tmp_path / "v.jsonl", "{", chat("a", "b"))
    text = refused(CASES / "A03.jsonl", val=str(val))
    assert "A03.jsonl:1:" in text
    assert f"{val}:1: not valid JSON" in text


def turns(answer, question=()):
    """A chat of two turns with fields more."""
    row = chat("a", "b")
    row["messages"][0].update(question)
    row["messages"][1].update(answer)
    return row


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("null", "not an object but null"),
        ('"a"', "not an object but a string"),
        ("3", "not an object but a number"),
        ({"messages": []}, "not a non-empty list"),
        ({"messages": "hi"}, "not a non-empty list"),
        ({"messages": ["hi"]}, "not an object"),
        (chat("hi", ""), "turn 2 (assistant) has empty content"),
        (chat(" \n", "x"), "turn 1 (user) has empty content"),
        (chat("hi", None), "turn 2 (assistant) has empty content"),
        (chat("hi", 5), "content that is not text"),
        (chat("hi"), "ends with a user turn"),
        (chat("hi", [{"type": "image", "url": "x"}]), "content parts that are not text"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "system", "content": "s"}]},
            "turn 2 is system, expected assistant",
        ),
        (chat("half \ud800", "x"), "half of a surrogate pair"),
        (chat("a", "b", train="no"), "'train' must be true or false"),
        (chat("a", "b", tools=["x"]), "'tools' is not a list of objects"),
        (chat("a", "b", tools="{"), "'tools' is a string but not JSON"),
        ({"prompt": "a"}, "no known format"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": 3, "completion": "x"}, "'prompt' is not a string"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "x"}]}, "must both be"),
        ({"text": " "}, "'text' is empty"),
        ({"text": ["a"]}, "'text' is not a string"),
        ({"input_ids": []}, "'input_ids' is empty"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": [1, True]}, "not a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
        ({"input_ids": [1, 264]}, "outside the tokenizer's ids 0 to 263"),
        ({"input_ids": [1, 2], "labels": [-100, -1]}, "outside the tokenizer's ids"),
        ({"input_ids": [3]}, "no supervised token"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no supervised token"),
        ({"conversations": [], "id": 1}, "its keys are 'conversations', 'id'"),
        ({}, "its keys are none"),
        ({"text": None}, "'text' is null; a row has"),
        ({"messages": None, "id": 1}, "'messages' is null; a row has"),
        ({"prompt": "a", "completion": None}, "'completion' is null; a row has"),
        ({"prompt": None, "completion": None}, "'prompt' and 'completion' are null; a row has"),
        (turns({"train": 0.5}), "turn 2 (assistant) has 'train': 0.5; it must be true or false"),
        (turns({"train": 0}), "turn 2 (assistant) has 'train': 0; it must be true or false"),
        (turns({}, {"train": True}), "turn 1 (user) has 'train': true; only assistant turns"),
        (turns({"train": False}), "no supervised token: the turns that it could learn have 'train': false"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(tmp_path, row, reason):
    path = write(tmp_path / "rows.jsonl", chat("fine", "row"), row)
    text = refused(path)
    assert "1 row cannot be used" in text
    found = next(line for line in text.splitlines() if f"{path}:2:" in line)
    assert reason in found


def test_an_invalid_byte_is_named_and_never_replaced():
    path = CASES / "A18_badbyte.jsonl"
    assert f"{path}:2: byte 0x" in refused(path)
    data = module(path, on_bad_row="skip")
    data.setup("fit")
    assert len(data.dataset("train")) == 2
    assert "\ufffd" not in data.describe()


def test_an_invalid_byte_in_a_json_array_is_named_by_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"text": "a"},\n {"text": "\xff"}]')
    text = refused(path)
    assert f"{path}:2: byte 0xff at byte 12 of the line" in text


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.ndjson"])
def test_byte_order_marks_and_line_ends_change_nothing(tmp_path, mark, newline, name):
    rows = [chat("grüße", "ok"), chat("zwei", "ja")]
    path = tmp_path / name
    path.write_bytes(mark + newline.join(json.dumps(r, ensure_ascii=False) for r in rows).encode())
    data = module(path)
    data.setup("fit")
    assert len(data.dataset("train")) == 2
    assert "grüße" in data.describe()


def test_utf16_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}', "utf-16")
    assert "is UTF-16" in refused(path)


def test_a_json_array_keeps_lines_and_ends_at_the_broken_element(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n  {"text": "one"},\n  7,\n\n  {"text":\n   "two"},\n  {"text": }\n]\n')
    text = refused(path)
    assert f"{path}:3: not an object but a number" in text
    assert f"{path}:7: not valid JSON" in text
    data = module(path, on_bad_row="skip")
    data.setup("fit")
    assert len(data.dataset("train")) == 2


@pytest.mark.parametrize("text", ["[]", "[ ]\n", '[{"text": "a"}', '[{"text": "a"} {"text": "b"}]', "[]x", "", "\n"])
def test_odd_json_files_are_refused_with_their_path(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert "rows.json" in refused(path)


def test_other_fields_are_ignored_whatever_their_types(tmp_path):
    odd = [{"id": 1, "text": 4}, {"id": "x", "text": {"a": [1]}}, {"id": None, "meta": [[], {}], "text": None}]
    path = write(tmp_path / "rows.jsonl", *[chat("a", "b") | extra for extra in odd])
    data = module(path)
    data.setup("fit")
    assert len(data.dataset("train")) == 3


def test_parquet_rows_do_not_take_over_each_others_tool_keys(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (CASES / "A16.jsonl").read_text().splitlines()]
    template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + str(tiny_tokenizer().chat_template)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for path in (CASES / "A16.jsonl", tmp_path / "rows.parquet"):
        data = module(path, tokenizer=tiny_tokenizer(template))
        data.setup("fit")
        rendered = [data.tokenizer.decode(data.dataset("train")[i]["input_ids"]) for i in range(2)]
        for text, row in zip(rendered, rows, strict=True):
            assert json.loads(text[: text.index("<|user|>")]) == row["tools"][0]
            assert "null" not in text


def test_a_bad_parquet_row_is_named_by_number(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "fine"}, {"text": " "}]), path)
    assert f"{path}, row 2: 'text' is empty" in refused(path)
    path.write_bytes(b"nothing")
    assert f"{path} is not a readable Parquet file" in refused(path)


def test_a_template_without_tools_refuses_rows_with_tools():
    text = refused(CASES / "A16.jsonl")
    assert text.count("the chat template leaves out the tools") == 2


def test_too_long_rows_are_refused_by_default_dropped_or_truncated_with_counts():
    text = refused(CASES / "A10.jsonl", max_length=64)
    assert "3 rows longer than data.max_length" in text
    assert "A10.jsonl:3: 207 tokens\n" in text
    assert "max_length (64 tokens), the longest 207 tokens:" in text
    data = module(CASES / "A10.jsonl", max_length=64, on_too_long="drop")
    data.setup("fit")
    assert len(data.dataset("train")) == 7
    assert "3 rows with 621 tokens dropped (too long)" in data.describe()


def test_truncation_cuts_the_end_and_is_counted(tmp_path):
    path = write(tmp_path / "rows.jsonl", chat("q", "a" * 40), chat("q", "a"))
    data = module(path, max_length=16, on_too_long="truncate")
    data.setup("fit")
    row = data.dataset("train")[0]
    assert len(row["input_ids"]) == 16
    assert "1 row truncated, 29 tokens cut off" in data.describe()
    # The cut row ends inside the answer: no end-of-turn token is made up.
    assert row["labels"][-1] == row["input_ids"][-1] == row["input_ids"][-2]


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_a_dataset_with_nothing_left_to_learn_refuses(policy):
    text = refused(CASES / "A09.jsonl", max_length=24, on_too_long=policy)
    assert "nothing is left to learn" in text
    assert "8 rows" in text
    if policy == "truncate":
        assert "8 of them without a supervised token after truncation" in text


def test_rows_that_are_context_only_are_kept_and_counted(tmp_path):
    data = module(CASES / "B08.jsonl")
    data.setup("fit")
    rows = data.dataset("train")
    assert [bool((rows[i]["labels"] != -100).any()) for i in range(4)] == [True, False, True, False]
    assert "2 rows with 'train': false" in data.describe()
    path = write(tmp_path / "rows.jsonl", chat("a", "b", train=False))
    assert "nothing is left to learn" in refused(path)


def test_a_missing_template_is_said_once_with_the_setting():
    text = refused(CASES / "A05.jsonl", tokenizer=tiny_tokenizer(None))
    assert len(text.splitlines()) == 1
    assert "data.chat_template" in text
    assert "A05.jsonl:1" in text


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "nothing.jsonl").write_text("\n\n")
    text = refused(tmp_path / "nothing.jsonl")
    assert f"nothing is left to learn from (there is no row in {tmp_path}/nothing.jsonl)" in text


def test_a_max_length_that_is_too_small_gives_a_summary_and_not_a_line_a_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", *(chat("q", "a" * n) for n in range(1, 301)))
    text = refused(path, max_length=8)
    assert len(text.splitlines()) == 8
    assert text.startswith("297 rows longer than data.max_length (8 tokens), the longest 305 tokens:")
    assert f"{path}:4: 9 tokens\n" in text
    assert "  … and 292 more\n" in text


def test_hundreds_of_bad_rows_are_counted_by_reason_behind_the_first_hundred(tmp_path):
    path = write(tmp_path / "rows.jsonl", *(["{"] * 150 + [{"text": ""}] * 20))
    text = refused(path)
    assert f"{path}:100: not valid JSON" in text
    assert f"{path}:101:" not in text
    assert "… and 70 more:" in text
    assert "20 × 'text' is empty" in text


class TestPaths:
    def test_a_relative_path_starts_at_the_current_directory(self, tmp_path, monkeypatch):
        (tmp_path / "sub").mkdir()
        write(tmp_path / "sub" / "data.jsonl", chat("here", "found"))
        monkeypatch.chdir(tmp_path / "sub")
        module("data.jsonl").setup("fit")
        monkeypatch.chdir(tmp_path)
        module("sub/data.jsonl").setup("fit")
        text = refused("data.jsonl")
        assert str(tmp_path / "data.jsonl") in text
        assert "'data.jsonl'" in text

    def test_the_home_directory_and_spaces(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "my data").mkdir()
        write(tmp_path / "my data" / "[1].jsonl", chat("a", "b"))
        module("~/my data/[1].jsonl").setup("fit")
        assert str(tmp_path / "my data" / "2.jsonl") in refused("~/my data/2.jsonl")

    def test_globs_are_sorted_and_files_are_read_once(self, tmp_path):
        for name in ("b", "a"):
            write(tmp_path / f"{name}.jsonl", {"text": name * 3})
        data = module([tmp_path / "*.jsonl", tmp_path / "a.jsonl"])
        data.setup("fit")
        rows = data.dataset("train")
        assert [data.tokenizer.decode(rows[i]["input_ids"]) for i in range(2)] == ["aaa<|end|>", "bbb<|end|>"]

    def test_what_is_no_data_file_is_refused(self, tmp_path):
        assert f"{tmp_path} is a folder" in refused(tmp_path)
        write(tmp_path / "rows.txt", "a")
        assert "unknown format '.txt'; allowed are .jsonl" in refused(tmp_path / "rows.txt")
        assert str(tmp_path / "no*.jsonl") in refused(tmp_path / "no*.jsonl")

    def test_packaged_files(self):
        from lightning_nd.assets import resolve

        assert resolve("some/path") == "some/path"
        assert Path(resolve("lightning_nd://quickstart/train.jsonl")).is_file()
        with pytest.raises(FileNotFoundError, match="It ships: lightning_nd://quickstart"):
            resolve("lightning_nd://nothing")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("train_on", "user"),
        ("system", "drop"),
        ("on_bad_row", "ignore"),
        ("on_too_long", "cut"),
        ("micro_batch_size", 0),
        ("max_length", 1),
        ("num_workers", -1),
        ("pad_to_multiple_of", 0),
    ],
)
def test_options_are_checked_at_once(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value!r}"):
        ChatDataModule(train="x.jsonl", **{option: value})


def test_a_missing_source_or_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"fit needs data\.train"):
        ChatDataModule(tokenizer=tiny_tokenizer()).setup("fit")
    path = write(tmp_path / "rows.jsonl", chat("a", "b"))
    assert "set data.tokenizer" in refused(path, tokenizer=None)
    assert str(tmp_path / "none") in refused(path, tokenizer=str(tmp_path / "none"))
    assert str(tmp_path / "none.jinja") in refused(path, chat_template=str(tmp_path / "none.jinja"))
