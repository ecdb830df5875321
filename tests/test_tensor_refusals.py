"""Models that tensor parallelism would give other numbers than one process: refused by name, before weights load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import make_model
from reference import make_batches
from transformers import AutoModelForCausalLM

from lightning_nd.parallelize import check_tensor_parallel

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def on_meta(config: str, **settings: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES | settings))


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ("SeedOssConfig", {}, "residual_dropout=0.1"),
        ("SeedOssConfig", {"attention_dropout": 0.0, "residual_dropout": 0.3}, "residual_dropout=0.3"),
        ("Starcoder2Config", {"embedding_dropout": 0.2}, "embedding_dropout=0.2"),
        ("MixtralConfig", MOE | {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("PhimoeConfig", MOE, "router_jitter_noise=0.01"),
    ],
)
def test_random_numbers_in_the_forward(config: str, settings: dict[str, Any], said: str) -> None:
    model = on_meta(config, **settings)
    with pytest.raises(ValueError, match=rf"tp=2 with dropout is not supported.*{said}"):
        check_tensor_parallel(model, "auto", 2)
    check_tensor_parallel(model, "auto", 1)


def test_dropout_of_heads_that_a_causal_lm_has_not() -> None:
    check_tensor_parallel(on_meta("GPTNeoXConfig", classifier_dropout=0.1), "auto", 2)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        # A norm over all heads; each rank has its own.
        ("CohereConfig", {"use_qk_norm": True}, r"CohereForCausalLM: .*layers\.0\.self_attn\.q_norm"),
        ("DogeConfig", {}, r"DogeForCausalLM: .*layers\.0\.self_attn"),
    ],
)
def test_whole_layers_beside_split_ones(config: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_tensor_parallel(on_meta(config, **settings), "auto", 2)


def test_an_mlp_that_two_layers_share() -> None:
    model = on_meta("LlamaConfig")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.gate_proj and model\.layers\.0\.mlp\.gate_proj .* one module"
    ):
        check_tensor_parallel(model, "auto", 2)


def test_a_model_is_unchanged_by_its_rehearsal() -> None:
    model = make_model("qwen3")
    batch = make_batches(1)[0]
    before, hooks = model(**batch).loss.item(), [len(m._forward_hooks) for m in model.modules()]
    implementation = model.config._attn_implementation
    check_tensor_parallel(model, "auto", 8)
    assert model(**batch).loss.item() == before
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert model.config._attn_implementation == implementation
    assert model.model.layers[0].self_attn.num_key_value_groups == 2
