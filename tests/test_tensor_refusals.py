"""Models that tensor parallelism would give other numbers than one process: refused by name, before weights load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
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
