"""Rows read while training: each once, in an order that neither ranks nor workers change, and nobody waits."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool, tiny_trainer
from tiny import Recorder, tiny_tokenizer

from lightning_nd.data import ChatDataModule, DataError
from lightning_nd.data.stream import StreamLoader

CASES = Path(__file__).parent / "cases"
small = st.integers(1, 5)


def texts(path: Path, count: int, first: int = 0) -> str:
    path.write_text("".join(json.dumps({"text": f"row {i:02}"}) + "\n" for i in range(first, first + count)))
    return str(path)


def module(train: Any, **options) -> ChatDataModule:
    options = {"seed": 3, "micro_batch_size": 1, "tokenizer": tiny_tokenizer(), "streaming": True, **options}
    return ChatDataModule(train, **options)


def loader(data: ChatDataModule, num_replicas: int = 1, rank: int = 0, num_workers: int = 0) -> StreamLoader:
    return StreamLoader(data._stream(num_replicas, rank), num_workers=num_workers)


def rows(batches: Any) -> list[list[str]]:
    """What each micro-batch holds, without the examples of a rank that has no row."""
    tokenizer = tiny_tokenizer()
    return [
        [
            tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
            for ids, mask, labels in zip(b["input_ids"], b["attention_mask"], b["labels"], strict=True)
            if (labels != -100).any()
        ]
        for b in batches
    ]


def test_two_ranks_with_two_workers_read_each_row_once():
    """A14."""
    data = module(str(CASES / "A14.jsonl"))
    data.setup("fit")
    seen = [row for rank in range(2) for batch in rows(loader(data, 2, rank, num_workers=2)) for row in batch]
    assert sorted(seen) == [f"row{i:02}ok" for i in range(1, 13)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("stream")
    return [texts(path / "a.jsonl", 17), texts(path / "b.jsonl", 6, 17)]


@settings(deadline=None, max_examples=40)
@given(size=small, ranks=small, shuffle=st.booleans(), buffer=st.integers(1, 30), epoch=st.integers(0, 2))
def test_the_ranks_together_read_what_one_process_reads(files, size, ranks, shuffle, buffer, epoch):
    options: dict[str, Any] = {"shuffle": shuffle, "shuffle_buffer": buffer}

    def read(size: int, ranks: int, rank: int) -> list[list[str]]:
        one = loader(module(files, micro_batch_size=size, **options), ranks, rank)
        one.dataset.epoch = epoch
        return rows(one)

    alone = read(size * ranks, 1, 0)
    each = [read(size, ranks, rank) for rank in range(ranks)]
    assert {len(r) for r in each} == {len(alone)}  # no rank waits for another
    for step, batch in enumerate(alone):
        assert sorted(row for r in each for row in r[step]) == sorted(batch)
    order = [row for batch in alone for row in batch]
    assert sorted(order) == [f"row {i:02}" for i in range(23)]
    assert shuffle or order == sorted(order)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(files, workers):
    data = module(files, micro_batch_size=2)
    assert rows(loader(data, 2, 1, num_workers=workers)) == rows(loader(data, 2, 1))


def test_every_epoch_and_seed_has_its_order(files):
    one = loader(module(files))
    first, second = rows(one), rows(one)
    assert first != second
    assert sorted(first) == sorted(second)
    assert rows(loader(module(files))) == first
    assert rows(loader(module(files, seed=4))) != first


@settings(deadline=None, max_examples=40)
@given(size=small, ranks=small, other_size=small, other_ranks=small, data=st.data())
def test_any_layout_continues_behind_the_rows_that_were_used(files, size, ranks, other_size, other_ranks, data):
    each = [loader(module(files, micro_batch_size=size), ranks, rank) for rank in range(ranks)]
    steps, used, states = (
        data.draw(st.integers(1, len(rows(loader(module(files, micro_batch_size=size * ranks)))))),
        [],
        [],
    )
    for one in each:
        batches = iter(one)
        read = [next(batches) for _ in range(steps)]
        next(batches, None)  # Lightning asks for one ahead
        used += [row for batch in rows(read) for row in batch]
        states.append(one.state_dict())
    assert all(state == states[0] for state in states)
    rest = []
    for rank in range(other_ranks):
        one = loader(module(files, micro_batch_size=other_size, seed=9), other_ranks, rank)
        one.load_state_dict(states[0])
        rest += [row for batch in rows(one) for row in batch]
    finished = states[0]["epoch"] == 1
    assert sorted(rest if finished else used + rest) == [f"row {i:02}" for i in range(23)]


def test_a_place_in_another_stream_is_refused(files):
    one = loader(module(files))
    batches = iter(one)
    next(batches), next(batches)
    with pytest.raises(ValueError, match="the checkpoint stands at row 1 of"):
        loader(module(files[:1])).load_state_dict(one.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_resumes_behind_the_last_batch(files, tmp_path, workers):
    def trainer(**options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return L.Trainer(**{**quiet, "accelerator": "cpu", "enable_checkpointing": False, **options})

    def data():
        return module(files, micro_batch_size=2, num_workers=workers)

    whole = Recorder()
    trainer(max_epochs=2).fit(whole, data())
    assert len(whole.seen) == 24
    for steps in (5, 12, 13):
        save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, f"{steps}", every_n_train_steps=steps)
        first, second = Recorder(), Recorder()
        trainer(max_steps=steps, callbacks=[save], enable_checkpointing=True).fit(first, data())
        trainer(max_epochs=2).fit(second, data(), ckpt_path=tmp_path / f"{steps}.ckpt", weights_only=False)
        assert first.seen + second.seen == whole.seen


def test_an_epoch_that_was_cut_short_is_not_begun_again(files):
    one = loader(module(files))
    first = [batch for batch, _ in zip(one, range(3), strict=False)]
    assert rows(one)[:3] != rows(first)
    assert one.dataset.epoch == 2


def fit(rank: int, world_size: int, files: list[str], degrees: dict[str, int]) -> list[list[int]]:
    from lightning_nd import NDStrategy

    module_of = Recorder()
    trainer = tiny_trainer(rank, world_size, NDStrategy(**degrees), max_epochs=1)
    trainer.fit(module_of, module(files, micro_batch_size=2))
    return [ids for _, batch in module_of.seen for ids in batch]


@pytest.mark.parametrize(("world", "degrees"), [(3, {"dp_shard": 3}), (2, {"tp": 2})], ids=str)
def test_ranks_that_share_rows_and_ranks_that_do_not(pool: Pool, files, world, degrees):
    """23 rows in micro-batches of 2: with three data ranks, one has none at the end."""
    decode = tiny_tokenizer().decode
    seen = [[decode(ids, skip_special_tokens=True) for ids in r] for r in pool.run(fit, world, files, degrees)]
    every = [f"row {i:02}" for i in range(23)]
    if "tp" in degrees:
        assert seen[0] == seen[1]
        assert sorted(seen[0]) == every
    else:
        assert sorted(row for r in seen for row in r if row) == every


# -- bad rows ---------------------------------------------------------------------------------------------------------


def test_the_first_rows_are_checked_before_training(tmp_path, capsys, caplog):
    text = ""
    with pytest.raises(
        DataError, match=r"2 rows cannot be used(.|\n)*A01\.jsonl:4: not valid JSON(.|\n)*A01\.jsonl:6: "
    ):
        module(str(CASES / "A01.jsonl")).setup("fit")
    with pytest.raises(DataError, match=r"data.chat_template"):
        module(str(CASES / "A05.jsonl"), tokenizer=tiny_tokenizer(None)).setup("fit")
    with caplog.at_level(logging.INFO):
        module(str(CASES / "A01.jsonl"), on_bad_row="skip").setup("fit")
    text = caplog.text + capsys.readouterr().err
    assert "of the first 5 rows 3 can be used, the longest of " in text
    assert "2 bad rows skipped" in text
    assert "sample, supervised tokens in ⟦⟧" in text


def test_a_stream_is_not_judged_by_its_first_rows_alone(tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    texts = ["x" * 60] * 100 + [f"good {i}" for i in range(5)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"max_length": 20, "on_too_long": "drop", "streaming": True, "micro_batch_size": 1}
    data = ChatDataModule(train=str(file), tokenizer=tiny_tokenizer(), **options)
    with caplog.at_level("INFO"):
        data.setup("fit")
    assert "of the first 101 rows 1 can be used" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_on_the_way_stops_with_its_place_or_is_counted(tmp_path, workers, caplog):
    path = Path(texts(tmp_path / "a.jsonl", 150))
    path.write_text(
        path.read_text() + "{\n" + json.dumps({"text": "x" * 90}) + "\n" + json.dumps({"text": "end"}) + "\n"
    )
    data = module(str(path), max_length=50, on_too_long="drop", shuffle=False)
    data.setup("fit")
    with pytest.raises(DataError, match=rf"{path}:151: not valid JSON"):
        list(loader(data, num_workers=workers))
    data = module(str(path), max_length=50, on_bad_row="skip", shuffle=False)
    with pytest.raises(DataError, match=rf"longer than data.max_length (.|\n)*{path}:152: 91 tokens"):
        list(loader(data, num_workers=workers))
    data = module(str(path), max_length=50, on_bad_row="skip", on_too_long="drop", shuffle=False)
    batches = rows(loader(data, num_workers=workers))
    assert batches[-2:] == [["row 149"], ["end"]]  # no micro-batch without a row
    if not workers:
        assert "1 bad row skipped; 1 row with 91 tokens dropped (too long)" in caplog.text


@pytest.mark.parametrize(("ranks", "workers", "size"), [(1, 0, 3), (2, 0, 2), (3, 2, 1)])
def test_rows_that_are_left_out_take_no_place(tmp_path, ranks, workers, size):
    """Steps have the rows that they would have without streaming, and go on at the next one on another layout."""
    path = tmp_path / "a.jsonl"
    good = [f"row {i:02}" for i in range(11)]
    kept = [json.dumps({"text": text}) for text in good]
    path.write_text("\n".join(line + "\n{\n" + json.dumps({"text": "x" * 90}) for line in kept))
    options = {"max_length": 50, "on_bad_row": "skip", "on_too_long": "drop", "shuffle": False}

    def read(size: int, ranks: int, rank: int, state: Any = None) -> tuple[list[list[str]], Any]:
        one = loader(module(str(path), micro_batch_size=size, **options), ranks, rank, num_workers=workers)
        if state is not None:
            one.load_state_dict(state)
        batches = iter(one)
        first = next(batches)
        rest = [next(batches)] if state is None else list(batches)
        return rows([first, *rest]), one.state_dict()

    states = []
    for rank in range(ranks):
        batches, state = read(size, ranks, rank)
        whole = size * ranks
        assert batches == [good[k * whole : (k + 1) * whole][rank::ranks] for k in range(2)]
        states.append(state)
    assert all(state["position"] == size * ranks for state in states)  # behind the first; the second is in use
    after, _ = read(2, 1, 0, states[0])
    assert [row for batch in after for row in batch] == good[size * ranks :]


@pytest.mark.parametrize("options", [{"packing": True, "max_length": 10}, {"train": {"path": "a.jsonl", "weight": 2}}])
def test_what_needs_all_rows_beforehand_is_refused(options):
    with pytest.raises(ValueError, match="set streaming: false"):
        ChatDataModule(**{"train": "a.jsonl", "streaming": True, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_of_the_hub_is_streamed(tmp_path, monkeypatch, workers):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "set").mkdir()
    for number in range(3):  # as many shards, which datasets would deal out to workers by itself
        texts(tmp_path / "set" / f"train-{number}.jsonl", 5, 5 * number)
    data = module({"hub": str(tmp_path / "set")})
    data.setup("fit")
    seen = [row for rank in range(2) for batch in rows(loader(data, 2, rank, num_workers=workers)) for row in batch]
    assert sorted(seen) == [f"row {i:02}" for i in range(15)]
    assert not any((tmp_path / "hf").rglob("*.arrow"))  # nothing was downloaded first
