"""Who reads which row: every row once, batches that do not depend on the layout, a place to resume from."""

from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from lightning_nd.data import ChatDataModule, GlobalOrderSampler, global_order
from lightning_nd.data.dataset import NO_ROW

CASES = Path(__file__).parent / "cases"
sizes = st.integers(1, 40)
small = st.integers(1, 6)


def batches(sampler: GlobalOrderSampler) -> list[list[int]]:
    """What a DataLoader makes of a sampler."""
    return list(torch.utils.data.BatchSampler(sampler, sampler.micro_batch_size, drop_last=False))


def of_ranks(rows, size, ranks, **options) -> list[list[list[int]]]:
    return [
        batches(GlobalOrderSampler(range(rows), micro_batch_size=size, num_replicas=ranks, rank=r, **options))
        for r in range(ranks)
    ]


@settings(deadline=None, max_examples=200)
@given(rows=sizes, size=small, ranks=small, seed=st.integers(0, 3), shuffle=st.booleans())
def test_the_ranks_together_read_what_one_process_reads(rows, size, ranks, seed, shuffle):
    (alone,) = of_ranks(rows, size * ranks, 1, seed=seed, shuffle=shuffle)
    each = of_ranks(rows, size, ranks, seed=seed, shuffle=shuffle)
    # No rank hangs: all do the same number of steps, and say so beforehand.
    assert {len(r) for r in each} == {len(alone)}
    for step, batch in enumerate(alone):
        read = [row for rank in each for row in rank[step] if row != NO_ROW]
        assert sorted(read) == sorted(batch)
        assert all(len(rank[step]) <= size for rank in each)
        # A rank without a row reads nothing but one empty example.
        assert all(rank[step] == [NO_ROW] or NO_ROW not in rank[step] for rank in each)
    assert sorted(row for batch in alone for row in batch) == list(range(rows))


@settings(deadline=None, max_examples=100)
@given(rows=sizes, size=small, ranks=small)
def test_lengths_are_known_beforehand(rows, size, ranks):
    for rank in range(ranks):
        sampler = GlobalOrderSampler(range(rows), micro_batch_size=size, num_replicas=ranks, rank=rank)
        assert len(sampler) == len(list(sampler))
        assert sampler.batches == len(batches(sampler))


@settings(deadline=None, max_examples=100)
@given(rows=sizes, size=small, ranks=small, other_size=small, other_ranks=small, data=st.data())
def test_any_layout_continues_behind_the_rows_that_were_read(rows, size, ranks, other_size, other_ranks, data):
    first = [
        GlobalOrderSampler(range(rows), micro_batch_size=size, num_replicas=ranks, rank=r, seed=1) for r in range(ranks)
    ]
    steps = data.draw(st.integers(0, first[0].batches))
    for sampler in first:
        sampler.set_epoch(2)
    read = [row for s in first for batch in batches(s)[:steps] for row in batch if row != NO_ROW]
    (state,) = {tuple(s.state_dict(steps).items()) for s in first}  # the same on every rank
    rest = []
    for rank in range(other_ranks):
        sampler = GlobalOrderSampler(
            range(rows), micro_batch_size=other_size, num_replicas=other_ranks, rank=rank, seed=9
        )
        sampler.load_state_dict(dict(state))
        rest += [row for batch in batches(sampler) for row in batch if row != NO_ROW]
    finished = steps == first[0].batches
    assert sorted(rest if finished else read + rest) == list(range(rows))
    assert dict(state)["epoch"] == (3 if finished else 2)


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {(s, e): tuple(global_order(50, s, e, shuffle=True)) for s in range(4) for e in range(4)}
    assert len(set(orders.values())) == 16
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert orders[1, 2] == tuple(global_order(50, 1, 2, shuffle=True))
    assert global_order(5, 1, 2, shuffle=False) == [0, 1, 2, 3, 4]


def test_a_place_in_other_data_is_refused():
    state = GlobalOrderSampler(range(10), micro_batch_size=2).state_dict(2)
    with pytest.raises(ValueError, match=r"stands at row 4 of an epoch with .*rows=10; it now has .*rows=11\."):
        GlobalOrderSampler(range(11), micro_batch_size=2).load_state_dict(state)
    # At the end of an epoch the data may have grown.
    state = GlobalOrderSampler(range(10), micro_batch_size=2).state_dict(5)
    GlobalOrderSampler(range(11), micro_batch_size=2).load_state_dict(state)


def module(case: str, layout: dict[str, int] | None = None, stage: str = "fit", **options) -> ChatDataModule:
    """A data module as the strategy of a rank makes it read."""
    data = ChatDataModule(train=str(CASES / case), val=str(CASES / case), tokenizer=tiny_tokenizer(), seed=7, **options)
    data.setup(stage)
    if layout is not None:
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
        trainer.strategy.distributed_sampler_kwargs = layout
        data.trainer = trainer
    return data


def texts(data: ChatDataModule, loader) -> list[list[str]]:
    seen = []
    for batch in loader:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        supervised = (batch["labels"] != -100).any(1)
        rows = [
            data.tokenizer.decode(ids[mask.bool()])
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        seen.append([text for text, learns in zip(rows, supervised, strict=True) if learns])
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_read_disjoint_rows(workers):
    """A14: 12 numbered rows on 2 ranks, with and without workers."""
    seen = []
    for rank in range(2):
        data = module("A14.jsonl", {"num_replicas": 2, "rank": rank}, num_workers=workers, shuffle=False)
        seen += [text for batch in texts(data, data.train_dataloader()) for text in batch]
    assert sorted(seen) == [f"<|user|>row{i:02}<|end|><|assistant|>ok<|end|>" for i in range(1, 13)]


@pytest.mark.parametrize(("case", "size", "ranks"), [("A13.jsonl", 2, 2), ("A13.jsonl", 1, 3), ("A14.jsonl", 2, 5)])
@pytest.mark.parametrize("name", ["train", "val"])
def test_an_uneven_tail_repeats_nothing_and_keeps_ranks_in_step(case, size, ranks, name):
    """A13, G03, G05: 5 rows with micro-batches of 2 on 2 ranks, and the like."""
    each = []
    for rank in range(ranks):
        data = module(case, {"num_replicas": ranks, "rank": rank}, micro_batch_size=size)
        loader = data.train_dataloader() if name == "train" else data.val_dataloader()
        each.append(texts(data, loader))
        assert len(loader) == len(each[-1])
    data = module(case, micro_batch_size=size * ranks)
    alone = texts(data, data.train_dataloader() if name == "train" else data.val_dataloader())
    assert {len(e) for e in each} == {len(alone)}
    for step, batch in enumerate(alone):
        assert sorted(t for e in each for t in e[step]) == sorted(batch)


@pytest.mark.parametrize(("ranks", "said"), [(2, ""), (3, "none is repeated, and 1 rank takes part in it without")])
def test_the_uneven_tail_is_said(ranks, said, capsys, caplog):
    """A13: 5 rows; with two ranks both have one to read at the end, with three one has none."""
    with caplog.at_level("INFO"):
        module("A13.jsonl", {"num_replicas": ranks, "rank": 0}, micro_batch_size=1).train_dataloader()
    text = caplog.text + capsys.readouterr().err
    assert "the last micro-batch of an epoch has" in text
    assert "0 ranks" not in text
    assert said in text


def test_a_rank_without_a_row_adds_an_exact_zero():
    data = module("A13.jsonl", {"num_replicas": 3, "rank": 2}, micro_batch_size=1)
    *_, last = data.train_dataloader()
    assert (last["labels"] == -100).all()
    model = tiny_model()
    nll = torch.nn.functional.cross_entropy(
        model(**{k: last[k] for k in ("input_ids", "attention_mask")}).logits[:, :-1].flatten(0, 1),
        last["labels"][:, 1:].flatten(),
        reduction="sum",
    )
    nll.backward()
    assert nll.item() == 0.0
    assert all((p.grad == 0).all() for p in model.parameters())


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_model()
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append((self.current_epoch, batch["input_ids"].tolist()))
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.log("val", self.model(**batch).loss)

    def predict_step(self, batch, index):
        return batch["input_ids"].shape

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


def trainer(**options):
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{**defaults, "enable_checkpointing": False, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_resumes_behind_the_last_batch(tmp_path, workers):
    def data():
        return ChatDataModule(
            train=str(CASES / "A14.jsonl"), tokenizer=tiny_tokenizer(), micro_batch_size=2, num_workers=workers, seed=3
        )

    whole = Recorder()
    trainer(max_epochs=3).fit(whole, data())
    assert len({str(batch) for epoch, batch in whole.seen}) > 6  # another order every epoch
    for steps in (6, 9):
        save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, f"{steps}", every_n_train_steps=steps)
        first, second = Recorder(), Recorder()
        trainer(max_steps=steps, callbacks=[save], enable_checkpointing=True).fit(first, data())
        trainer(max_epochs=3).fit(second, data(), ckpt_path=tmp_path / f"{steps}.ckpt", weights_only=False)
        assert first.seen + second.seen == whole.seen


def test_lightning_keeps_the_sampler():
    """Lightning injects a DistributedSampler of its own into loaders that are not distributed."""
    data = ChatDataModule(
        train=str(CASES / "A13.jsonl"),
        val=str(CASES / "A13.jsonl"),
        predict=str(CASES / "A13.jsonl"),
        tokenizer=tiny_tokenizer(),
    )
    run = trainer(max_epochs=1)
    # What a strategy of several processes makes of the loaders.
    connector = run._accelerator_connector
    assert connector.use_distributed_sampler
    type_of = type(connector)
    original = type_of.is_distributed
    try:
        type_of.is_distributed = property(lambda self: True)
        run.fit(Recorder(), data)
    finally:
        type_of.is_distributed = original
    assert isinstance(run.train_dataloader.sampler, GlobalOrderSampler)
    assert isinstance(run.val_dataloaders.sampler, GlobalOrderSampler)


def test_predicting_and_overfitting_read_every_row_in_order():
    data = ChatDataModule(train=str(CASES / "A13.jsonl"), predict=str(CASES / "A13.jsonl"), tokenizer=tiny_tokenizer())
    assert trainer().predict(Recorder(), data) == [(1, 9 + i) for i in range(5)]
    recorder = Recorder()
    trainer(max_epochs=2, overfit_batches=2).fit(recorder, data)
    assert [len(batch[0]) for _, batch in recorder.seen] == [9, 10, 9, 10]


def test_prompts_may_end_with_a_user_turn(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "yo"}\n')
    data = ChatDataModule(predict=str(path), tokenizer=tiny_tokenizer())
    data.setup("predict")
    rows = [data.tokenizer.decode(data.dataset("predict")[i]["input_ids"]) for i in range(2)]
    assert rows == ["<|user|>hi<|end|><|assistant|>", "<|user|>yo<|end|><|assistant|>"]
