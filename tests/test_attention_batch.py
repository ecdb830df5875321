"""Batches under context parallelism: documents, shifting, padding, sharding and putting together again."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_nd.attention.interface import CONTEXT_KEY, attention_forward, check_model, no_mask, windows_of
from lightning_nd.parallelize.context import ContextParallel, documents_of, gather_sequence, shard_batch


def ids(rows: int, length: int) -> Tensor:
    return torch.arange(1, rows * length + 1).view(rows, length)


@pytest.mark.parametrize(
    ("fields", "documents"),
    [
        ({}, ((0, 6), (6, 12))),
        ({"attention_mask": [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]}, ((0, 4), (8, 12))),
        (
            {"position_ids": [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 0, 1]]},
            ((0, 3), (3, 6), (6, 7), (7, 8), (8, 10), (10, 12)),
        ),
        ({"position_ids": [[0, 1, 2, 3, 0, 1]]}, ((0, 4), (4, 6), (6, 10), (10, 12))),
        # Positions of a left-padded row as `generate` makes them; padding inside a row ends a document.
        (
            {"position_ids": [[1, 1, 0, 1, 2, 3]] * 2, "attention_mask": [[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]]},
            ((2, 6), (6, 7), (7, 8), (10, 12)),
        ),
        ({"attention_mask": [[0] * 6, [1, 0, 1, 0, 0, 1]]}, ((6, 7), (8, 9), (11, 12))),
        (
            {"cu_seq_lens_q": [0, 2, 6, 11, 12], "position_ids": [[0, 1, 0, 1, 2, 3]] * 2},
            ((0, 2), (2, 6), (6, 11), (11, 12)),
        ),
        ({"cu_seq_lens": [0, 6, 6, 12]}, ((0, 6), (6, 12))),
    ],
)
def test_documents(fields, documents):
    batch = {"input_ids": ids(2, 6)} | {name: torch.tensor(value) for name, value in fields.items()}
    assert documents_of(batch, 2, 6) == documents


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"attention_mask": torch.ones(2, 1, 6, 6)},
            r"attention_mask is \[batch, sequence\] = \[2, 6\].*got \[2, 1, 6, 6\]",
        ),
        ({"position_ids": torch.zeros(3, 2, 6)}, r"position_ids are .* got \[3, 2, 6\]"),
        ({"cu_seq_lens": torch.tensor([0, 5])}, "must ascend from 0 to the 12 tokens"),
    ],
)
def test_what_cannot_be_sharded_is_refused(fields, text):
    with pytest.raises(ValueError, match=text):
        documents_of({"input_ids": ids(2, 6)} | fields, 2, 6)


class Pair(NamedTuple):
    chosen: Any
    rejected: Any


def _round_trip(rank: int, world_size: int) -> None:
    for layout in ("zigzag", "chunks", "contiguous", "auto"):
        cp = ContextParallel(dist.group.WORLD, layout=layout)
        for rows, length in ((1, 1), (3, 2 * world_size - 1), (2, 50)):
            batch = {
                "input_ids": ids(rows, length),
                "labels": ids(rows, length) + 1000,
                "attention_mask": torch.ones(rows, length, dtype=torch.int64),
                "weights": torch.rand(rows, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
                "row_weights": torch.ones(rows),
                "name": "kept",
            }
            before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
            local = shard_batch(batch, cp)
            assert batch.keys() == before.keys()
            for key, value in batch.items():
                assert torch.equal(value, before[key]) if isinstance(value, Tensor) else value is before[key]
            assert local["row_weights"] is batch["row_weights"]
            assert local["name"] == "kept"
            context = local[CONTEXT_KEY]
            share = context.layout.length // world_size
            for key in ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "weights"):
                assert local[key].shape[:2] == (rows, share), key
            for key in ("input_ids", "labels", "attention_mask", "weights"):
                assert torch.equal(gather_sequence(local[key], local), batch[key]), (layout, key)
            assert torch.equal(gather_sequence(local["position_ids"], context), torch.arange(length).expand(rows, -1))
            shifted = gather_sequence(local["shift_labels"], local)
            assert torch.equal(shifted[:, :-1], batch["labels"][:, 1:])
            assert (shifted[:, -1] == -100).all()
            # What the layout adds is masked everywhere.
            real = local["attention_mask"].sum()
            dist.all_reduce(real)
            assert int(real) == rows * length
            assert (local["shift_labels"][local["attention_mask"] == 0] == -100).all()


def test_shard_and_gather(pool):
    for world_size in (1, 2, 4):
        pool.run(_round_trip, world_size)


def _nested(rank: int, world_size: int) -> list[str]:
    cp = ContextParallel(dist.group.WORLD)
    one = {"input_ids": ids(2, 8)}
    for batch in ([one, 7], (one, one), Pair(one, one), {"chosen": one, "k": 1}):
        local = cp.shard(batch)
        assert type(local) is type(batch)
        first = local["chosen"] if isinstance(local, dict) else local[0]
        assert first["input_ids"].shape == (2, 4)
        cp.remember(local)
        assert cp.context_of(first["input_ids"]) is first[CONTEXT_KEY]
    assert cp.context_of(ids(2, 8)) is None
    assert gather_sequence(one["input_ids"], one) is one["input_ids"]  # cp=1: nothing was sharded
    messages = []
    for batch in (ids(2, 8), {"x": ids(2, 8)}, [ids(2, 8)]):
        with pytest.raises(ValueError, match="input_ids") as error:
            cp.shard(batch)
        messages.append(str(error.value))
    return messages


def test_nested_batches_and_batches_without_tokens(pool):
    assert "got a dict with x" in pool.run(_nested, 2)[0][1]


def _models() -> dict[str, tuple[Any, str]]:
    import transformers as t

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    yarn = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    mlp = {"intermediate_size": 64, "num_key_value_heads": 2}
    return {
        "bloom": (t.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "attention interface"),
        "falcon": (t.FalconConfig(**small, alibi=True), "ALiBi"),
        "mpt": (t.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4), "attention interface"),
        "gpt_neo": (
            t.GPTNeoConfig(vocab_size=64, hidden_size=32, num_layers=2, attention_types=[[["global"], 2]], num_heads=4),
            "attention interface",
        ),
        "mamba": (t.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "attention interface"),
        "qwen3_next": (
            t.Qwen3NextConfig(**small, **mlp, num_experts=2, num_experts_per_tok=1, head_dim=8),
            "linear_attention",
        ),
        "llama4": (
            t.Llama4TextConfig(**small, **mlp, head_dim=8, num_local_experts=2, attention_chunk_size=16),
            "chunked_attention",
        ),
        "gpt2 dropout": (t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4), "attn_pdrop=0.1"),
        "llama dropout": (t.LlamaConfig(**small, **mlp, attention_dropout=0.1), "attention_dropout=0.1"),
        "gemma3 both ways": (
            t.Gemma3TextConfig(**small, **mlp, head_dim=8, use_bidirectional_attention=True),
            "both directions",
        ),
        "nemotron": (t.NemotronConfig(**small, **mlp), "do not hand keyword arguments on"),
        "phi3 longrope": (t.Phi3Config(**small, **mlp, rope_scaling=yarn, pad_token_id=0), "'longrope'"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        "falcon",
        "mpt",
        "gpt_neo",
        "mamba",
        "qwen3_next",
        "llama4",
        "gpt2 dropout",
        "llama dropout",
        "gemma3 both ways",
        "nemotron",
        "phi3 longrope",
    ],
)
def test_models_that_cannot_are_refused_by_name(name):
    from transformers import AutoModelForCausalLM

    config, reason = _models()[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot run with cp > 1 or document") as error:
        check_model(model)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "ran under cp without the layout"),
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"is_causal": False}, "attends in both directions"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, r"mask of shape \[1, 1, 4, 4\]"),
        ({"alibi": torch.zeros(2)}, "adds alibi to its scores"),
        ({"position_bias": torch.zeros(2)}, "adds position_bias to its scores"),
    ],
)
def test_layers_that_ask_for_more_than_causal_are_refused(options, text):
    q = torch.zeros(1, 2, 4, 8)
    context = object() if options else None  # refused before it is looked at
    with pytest.raises((ValueError, RuntimeError), match=f"NDStrategy: Linear .*{text}"):
        attention_forward(nn.Linear(1, 1), q, q, q, options.pop("attention_mask", None), cp_context=context, **options)


def test_mask_rules_that_show_later_tokens_are_refused():
    from transformers.masking_utils import causal_mask_function, or_masks, sliding_window_causal_mask_function

    def prefix(batch, head, query, key):
        return key < 3

    for allowed in (causal_mask_function, sliding_window_causal_mask_function(4)):
        assert no_mask(mask_function=allowed) is None
    with pytest.raises(ValueError, match="lets tokens see later ones"):
        no_mask(mask_function=or_masks(causal_mask_function, prefix))


def test_windows_of_models():
    from families import make_config

    assert windows_of(make_config("llama")) == ((None, 3),)
    assert windows_of(make_config("qwen3")) == ((None, 3),)
    assert windows_of(make_config("mistral")) == ((8, 3),)
    assert windows_of(make_config("gemma3")) == ((None, 1), (8, 2))
    assert windows_of(make_config("gpt_oss")) == ((None, 1), (8, 2))
