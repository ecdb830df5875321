"""Tiny models of the transformers families that the tests train, each with what sets it apart switched on.

Weights are large enough that every part matters: initial standard deviation 0.1 in place of 0.02, and norms
and biases moved away from ones and zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Sequences in the tests have 24 tokens: a window of 8 hides keys in most rows.
_WINDOW = 8
_THREE = ["sliding_attention", "full_attention", "sliding_attention"]

# family: (configuration class, what differs from _COMMON; None removes a key)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),  # bias on q, k, v
    "qwen3": ("Qwen3Config", {"head_dim": 16}),  # norms on q and k
    "mistral": ("MistralConfig", {"sliding_window": _WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "layer_types": _THREE,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "layer_types": _THREE,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3Config", {}),  # packed q, k, v and gate, up
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),  # parallel residual, partial rotary
    "olmo2": ("Olmo2Config", {}),  # norms on whole q and k, post-norm
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "layer_types": _THREE,
        },
    ),
    "deepseek_v3": (  # multi-head latent attention, one dense layer, then experts
        "DeepseekV3Config",
        {
            "num_key_value_heads": 8,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
}

# Families for tensor parallelism alone: what transformers' plan does not say, or a shape of its own.
SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", {"num_hidden_layers": 2}),  # parameters in the activation, over split features
    "glm4_moe": (  # norms over local heads that the plan does not name
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": (  # experts that return [batch · sequence, hidden]
        "Llama4TextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "qwen3_next": (  # a convolution whose weight another module uses
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "gemma4": (  # a second input of each block that is not split along the sequence
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
        },
    ),
}


def make_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The tiny configuration of family `name`, with `overrides` on top."""
    class_name, differences = (FAMILIES | SPECIAL)[name]
    values = _COMMON | differences | overrides
    return getattr(transformers, class_name)(**{k: v for k, v in values.items() if v is not None})


def make_model(
    name: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A model of family `name` in training mode, drawn in fp32 from `seed`; other random state is untouched.

    `attention` is transformers' `attn_implementation`; by default what transformers picks for the family.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = make_config(name, **overrides)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).train()
