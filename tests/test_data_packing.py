"""Packs: full, the same for any layout, each row once an epoch, and documents that know nothing of each other."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from families import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool, tiny_trainer
from tiny import Recorder, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_nd.data import ChatDataModule, DataError, GlobalOrderSampler, Group, PackOrder
from lightning_nd.data.dataset import NO_ROW
from lightning_nd.data.isolation import check_isolation, leak
from lightning_nd.data.order import best_fit_decreasing
from lightning_nd.recipes import CausalLM

ANSWERS = (1, 9, 3, 14, 2, 6, 30, 5, 22, 8, 4, 40, 11, 17, 2)
PACK = 64
lengths_of = st.lists(st.integers(1, 50), min_size=1, max_size=60)
small = st.integers(1, 5)


def packs(lengths: list[int], capacity: int = 50, weight: float = 1.0) -> PackOrder:
    return PackOrder([Group(np.arange(len(lengths)), weight)], np.asarray(lengths), capacity)


@settings(deadline=None, max_examples=200)
@given(lengths=lengths_of)
def test_every_item_is_in_one_pack_and_no_pack_is_too_long(lengths):
    made = best_fit_decreasing(lengths, 50)
    assert sorted(i for pack in made for i in pack) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in pack) for pack in made]
    assert max(sums) <= 50
    # No two packs could have been one, so all but one are more than half full.
    assert sum(s <= 25 for s in sums) <= 1


def test_best_fit_is_that_of_the_textbook():
    # 7 goes alone, 6 opens another, 3 fits best behind the 7, 2 and 2 behind the 6, the last 2 opens a third.
    assert best_fit_decreasing([2, 7, 3, 6, 2, 2], 10) == [[1, 2], [3, 0, 4], [5]]


@settings(deadline=None, max_examples=100)
@given(lengths=lengths_of, seed=st.integers(0, 3), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_an_epoch_reads_every_row_once_in_packs_that_seed_and_epoch_decide(lengths, seed, epoch, shuffle):
    order = packs(lengths)
    items = order.items(seed, epoch, shuffle=shuffle)
    assert items == packs(lengths).items(seed, epoch, shuffle=shuffle)
    assert len(items) == len(order)  # in every epoch
    assert sorted(row for pack in items for row in pack) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in pack) <= 50 for pack in items)


def test_epochs_pack_otherwise_and_not_only_in_another_order():
    order = packs([n % 17 + 1 for n in range(200)])
    first, second = (set(order.items(0, epoch, shuffle=True)) for epoch in (0, 1))
    assert len(first & second) < len(first) / 2
    assert order.items(0, 0, shuffle=False) == order.items(5, 9, shuffle=False)


@pytest.mark.parametrize("seed", range(3))
def test_packs_of_8k_are_nearly_full_of_conversations(seed):
    """Chat-like: most rows have some hundred tokens, a few have thousands."""
    drawn = np.random.default_rng(seed).lognormal(mean=np.log(450), sigma=1.1, size=20_000)
    lengths = drawn[drawn < 8192].astype(int).clip(16)
    order = PackOrder([Group(np.arange(len(lengths)))], lengths, 8192)
    assert order.efficiency >= 0.97
    tokens = [sum(lengths[list(pack)]) for pack in order.items(seed, 0, shuffle=True)]
    assert np.mean(tokens) / 8192 == pytest.approx(order.efficiency)


@settings(deadline=None, max_examples=100)
@given(lengths=lengths_of, size=small, ranks=small, other_size=small, other_ranks=small, data=st.data())
def test_any_layout_continues_with_the_next_pack(lengths, size, ranks, other_size, other_ranks, data):
    def samplers(size: int, ranks: int, seed: int) -> list[GlobalOrderSampler]:
        options: dict[str, Any] = {"micro_batch_size": size, "num_replicas": ranks, "seed": seed}
        return [GlobalOrderSampler(lengths, order=packs(lengths), rank=r, **options) for r in range(ranks)]

    def batches(sampler: GlobalOrderSampler) -> list[list[tuple[int, ...]]]:
        return list(torch.utils.data.BatchSampler(sampler, sampler.micro_batch_size, drop_last=False))

    first = samplers(size, ranks, 1)
    assert len({len(batches(s)) for s in first}) == 1  # all ranks do as many micro-batches
    steps = data.draw(st.integers(0, first[0].batches))
    read = [pack for s in first for batch in batches(s)[:steps] for pack in batch if pack != (NO_ROW,)]
    (state,) = {tuple(s.state_dict(steps).items()) for s in first}
    second = samplers(other_size, other_ranks, 9)
    for s in second:
        s.load_state_dict(dict(state))
    rest = [pack for s in second for batch in batches(s) for pack in batch if pack != (NO_ROW,)]
    expected = packs(lengths).items(1, 0, shuffle=True)
    assert sorted(read) == sorted(expected[: len(read)])
    if steps < first[0].batches:
        assert sorted(read + rest) == sorted(expected)


def test_a_place_among_other_packs_is_refused():
    lengths = [10] * 20
    state = GlobalOrderSampler(lengths, order=packs(lengths, 30), micro_batch_size=1).state_dict(3)
    with pytest.raises(ValueError, match=r"stands at pack 3 of an epoch .*pack=30; it now has .*pack=20"):
        GlobalOrderSampler(lengths, order=packs(lengths, 20), micro_batch_size=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"pack=30; it now has .*rows=20"):
        GlobalOrderSampler(lengths, micro_batch_size=1).load_state_dict(state)


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packing")
    tiny_model().save_pretrained(path / "model")
    tiny_tokenizer().save_pretrained(path / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "abcd"[n % 4] * n}]}
        for n in ANSWERS
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def module(folder: Path, **options) -> ChatDataModule:
    rows = str(folder / "rows.jsonl")
    defaults: dict[str, Any] = {"max_length": PACK, "packing": True, "seed": 3, "micro_batch_size": 1}
    return ChatDataModule(rows, rows, tokenizer=str(folder / "model"), **{**defaults, **options})


@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_holds_whole_rows_with_positions_of_their_own(folder, size):
    data = module(folder, micro_batch_size=size, pad_to_multiple_of=16)
    data.setup("fit")
    dataset, found = data.dataset("train"), []
    expected = sorted((r["input_ids"].tolist(), r["labels"].tolist()) for r in map(dataset.__getitem__, range(15)))
    for batch in data.train_dataloader():
        assert set(batch) == {"input_ids", "labels", "position_ids"}
        assert batch["input_ids"].shape[1] % 16 == 0
        for ids, labels, positions in zip(*(batch[n] for n in ("input_ids", "labels", "position_ids")), strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in pairwise(starts):
                assert positions[start:stop].tolist() == list(range(stop - start))
                assert labels[start] == -100  # what the document before it would have to predict
                found.append((ids[start:stop].tolist(), labels[start:stop].tolist()))
    rows = [(ids, labels) for ids, labels in found if any(label != -100 for label in labels)]
    assert sorted(rows) == expected
    assert all(set(ids) == {258} for ids, labels in found if (ids, labels) not in rows)  # the rest is padding


def test_the_report_says_how_full_the_packs_are(folder):
    data = module(folder)
    data.setup("fit")
    order = data._orders["train"]
    assert f"packed end to end into {len(order)} packs of 64 tokens, {order.efficiency:.1%} full" in data.describe()
    assert order.efficiency == data.dataset("train").lengths.sum() / (64 * len(data.train_dataloader()))


def test_packing_needs_a_length(folder):
    with pytest.raises(DataError, match=r"data.packing needs data.max_length"):
        module(folder, max_length=None).setup("fit")


def test_prediction_is_not_packed(folder):
    data = module(folder)
    data.sources["predict"] = data.sources["train"]
    data.setup("predict")
    assert [len(batch["input_ids"]) for batch in data.predict_dataloader()] == [1] * 15


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_resumes_with_the_next_pack(folder, tmp_path, workers):
    def trainer(**options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
        return L.Trainer(**{**quiet, "accelerator": "cpu", "enable_checkpointing": False, **options})

    whole = Recorder()
    trainer(max_epochs=2).fit(whole, module(folder, num_workers=workers))
    for steps in (3, len(whole.seen) // 2 + 1):
        save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, f"{steps}", every_n_train_steps=steps)
        first, second = Recorder(), Recorder()
        options = {"callbacks": [save], "enable_checkpointing": True}
        trainer(max_steps=steps, **options).fit(first, module(folder, num_workers=workers))
        resumed = trainer(max_epochs=2)
        resumed.fit(
            second, module(folder, num_workers=workers), ckpt_path=tmp_path / f"{steps}.ckpt", weights_only=False
        )
        assert first.seen + second.seen == whole.seen


# -- numbers ----------------------------------------------------------------------------------------------------------


def by_rows(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients over all rows, each run alone by plain transformers, without any of our code behind ids."""
    data = module(folder)
    data.setup("fit")
    dataset = data.dataset("train")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").double().train()
    nll, count = torch.zeros((), dtype=torch.float64), 0
    for row in map(dataset.__getitem__, range(len(dataset))):
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        nll = nll + torch.nn.functional.cross_entropy(logits, row["labels"][1:], reduction="sum")
        count += int((row["labels"][1:] != -100).sum())
    (nll / count).backward()
    return nll.item() / count, {name: p.grad for name, p in model.named_parameters()}


class Caught(CausalLM):
    """Keeps what it logs, and the gradients of its first step."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        self.grads = {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}


def fit_packed(
    rank: int, world_size: int, folder: Path, size: int, degrees: dict[str, int]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    from lightning_nd import NDStrategy

    caught = Caught(str(folder / "model"), export=False)
    strategy = NDStrategy(**degrees)
    # The whole epoch is one step, so that the order of packs does not matter.
    trainer = tiny_trainer(rank, world_size, strategy, max_epochs=1, accumulate_grad_batches=100, log_every_n_steps=1)
    trainer.fit(caught, datamodule=module(folder, micro_batch_size=size))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, caught.grads


@pytest.mark.parametrize(
    ("world", "size", "degrees"),
    [
        (1, 1, {}),
        (1, 2, {}),
        (2, 1, {"dp_shard": 2}),
        (2, 2, {"dp_shard": 2}),
        (2, 1, {"cp": 2}),
        (2, 2, {"cp": 2}),
        (2, 1, {"tp": 2}),
        (4, 1, {"dp_shard": 2, "cp": 2}),
    ],
    ids=str,
)
def test_packed_loss_and_gradients_are_those_of_rows_alone(pool: Pool, folder, world, size, degrees):
    loss, grads = by_rows(folder)
    for metrics, got in pool.run(fit_packed, world, folder, size, degrees):
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["train/supervised_tokens"] == sum(ANSWERS) + len(ANSWERS)
        assert got.keys() == grads.keys()
        for name, expected in grads.items():
            assert (got[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def validate(rank: int, world_size: int, folder: Path, options: dict[str, Any], degrees: dict[str, int]) -> float:
    from lightning_nd import NDStrategy

    caught = CausalLM(str(folder / "model"), export=False)
    trainer = tiny_trainer(rank, world_size, NDStrategy(**degrees))
    (metrics,) = trainer.validate(caught, datamodule=module(folder, **options), verbose=False)
    return metrics["val/loss"]


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"cp": 2}], ids=str)
def test_packed_validation_is_that_of_rows_alone(pool: Pool, folder, degrees):
    """G03: the ranks have unequal numbers of packs, and one of them reads an empty one."""
    loss, _ = by_rows(folder)
    for options in ({}, {"micro_batch_size": 3}, {"packing": False}):
        assert pool.run(validate, 2, folder, options, degrees) == [pytest.approx(loss, rel=1e-6)] * 2


# -- documents that see each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mixtral", "gpt_neox"])
def test_no_logit_of_a_document_moves_with_the_one_before_it(family, attention):
    """A20: one changed token of document 1 moves no logit of document 2."""
    model = make_model(family, attention=attention).eval()
    ids, positions = torch.arange(20, 40)[None], torch.cat([torch.arange(8), torch.arange(12)])[None]
    other = ids.clone()
    other[0, 3] += 1
    with torch.no_grad():
        a, b = (model(input_ids=i, position_ids=positions, use_cache=False).logits[0, 8:] for i in (ids, other))
    assert int(((a - b).abs().amax(-1) > 0).sum()) == 0
    check_isolation(model, 2, torch.device("cpu"))


def leaky_model(name: str) -> Any:
    if name == "gpt_oss":
        return make_model(name)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, word_embed_proj_dim=32, **sizes))


@pytest.mark.parametrize("name", ["gpt_oss", "opt", "mamba"])
def test_a_model_that_mixes_documents_is_refused(name):
    """gpt_oss and opt hand no positions to their masks; a state space model has no masks at all."""
    model = leaky_model(name).train()
    assert leak(model, 1, torch.device("cpu")) > 0.1
    with pytest.raises(
        ValueError, match=r"data\.packing: \w+ForCausalLM .* see each other: .* Set data.packing: false"
    ):
        check_isolation(model, 1, torch.device("cpu"))
    assert model.training  # as it was


def fit_leaky(rank: int, world_size: int, folder: Path) -> str:
    from lightning_nd import NDStrategy

    trainer = tiny_trainer(rank, world_size, NDStrategy(), max_epochs=1)
    try:
        trainer.fit(CausalLM(str(folder / "leaky"), export=False, tokenizer=str(folder / "model")), module(folder))
    except ValueError as error:
        return str(error)
    return ""


def test_the_recipe_refuses_it_on_every_rank(pool: Pool, folder):
    make_model("gpt_oss", vocab_size=264).save_pretrained(folder / "leaky")
    for text in pool.run(fit_leaky, 2, folder):
        assert "lets the documents of a pack see each other" in text
