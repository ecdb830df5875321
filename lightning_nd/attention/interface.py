"""Context-parallel attention as a transformers attention implementation, and which models can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_nd.attention.context import AttentionContext, context_parallel_attention
from lightning_nd.attention.probe import hands_on_keywords

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAME = "nd_context_parallel"
CONTEXT_KEY = "cp_context"

_QUADRATIC_LAYERS = {"full_attention", "sliding_attention", "attention"}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cp_context: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer: q `[b, H, s, D]`, k and v not repeated → `[b, s, H, Dv]`.

    Raises:
        ValueError: for what a context-parallel layer cannot express: masks, dropout, bidirectional layers.
        RuntimeError: without the context of the micro-batch.
    """
    who = type(module).__name__
    if cp_context is None:
        raise RuntimeError(
            f"NDStrategy: {who} ran under cp without the layout of its tokens ({CONTEXT_KEY}). Either the model's"
            " forward does not hand keyword arguments to its attention, or it was called with tokens that the strategy"
            f" did not shard. Pass batch[{CONTEXT_KEY!r}] to the model, or use cp=1."
        )
    if dropout:
        raise ValueError(
            f"NDStrategy: {who} has attention dropout {dropout}, which cp > 1 cannot reproduce: set it to 0."
        )
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"NDStrategy: {who} attends in both directions; cp > 1 is for causal attention.")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"NDStrategy: {who} got a mask of shape {list(attention_mask.shape)}; under cp > 1 give padding as a 2-D"
            " attention_mask and documents as position_ids that restart, in the batch."
        )
    for name in ("position_bias", "alibi", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"NDStrategy: {who} adds {name} to its scores, which cp > 1 cannot express.")
    out = context_parallel_attention(
        query, key, value, cp_context, scale=scaling, window=sliding_window, sinks=s_aux, softcap=softcap
    )
    return out.transpose(1, 2).contiguous(), None


def no_mask(*args: Any, mask_function: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:
    """Stands where transformers would make a mask: documents and padding are in the context.

    Raises:
        ValueError: for a mask that is more than causal, windowed, packed and padded.
    """
    zero, one = torch.tensor(0), torch.tensor(1)
    if use_vmap or (mask_function is not None and bool(mask_function(zero, zero, zero, one))):
        raise ValueError(
            "NDStrategy: this model asks for a mask that lets tokens see later ones or adds rules of its own (prefix,"
            " image or bidirectional blocks); cp > 1 is for causal masks. Use cp=1."
        )


def register() -> None:
    """Make the implementation known to transformers under `nd_context_parallel`; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose attention cannot be split over the sequence, before it is loaded or trained.

    Raises:
        ValueError: naming the model and everything about it that stands in the way.
    """
    config = model.config.get_text_config()
    problems = [*_interface_problems(model), *_config_problems(config)]
    if problems:
        raise ValueError(
            f"NDStrategy: {type(model).__name__} cannot run with cp > 1 or document_attention: "
            + "; ".join(problems)
            + ". Use cp=1 without it."
        )


def _interface_problems(model: PreTrainedModel) -> list[str]:
    found = []
    if not getattr(model, "_supports_attention_backend", False):
        found.append("its attention does not go through transformers' attention interface")
    if model.config.is_encoder_decoder:
        found.append("it has an encoder and cross attention")
    if model.config.get_text_config() is not model.config:
        found.append("it takes more than text")
    if not found and not hands_on_keywords(model):
        found.append("its blocks do not hand keyword arguments on to their attention, which needs the tokens' layout")
    return found


def _config_problems(config: PretrainedConfig) -> list[str]:
    found = []
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if others := sorted(kinds - _QUADRATIC_LAYERS):
        found.append(f"it has layers of other kinds ({', '.join(others)}), which carry state along the sequence")
    if getattr(config, "attention_chunk_size", None):
        found.append(f"it attends in chunks of {config.attention_chunk_size} tokens")
    if getattr(config, "alibi", False):
        found.append("it adds ALiBi biases to its scores")
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        found.append("it attends in both directions")
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout"):
        rate = getattr(config, name, 0.0)
        if isinstance(rate, float | int) and rate > 0:
            found.append(f"{name}={rate}: dropout of attention weights cannot be reproduced, set it to 0")
    for kind in _rope_kinds(config):
        if kind in ("dynamic", "longrope"):
            found.append(
                f"its rotary embedding ({kind!r}) depends on the longest position, which ranks see differently"
            )
    return found


def _rope_kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of rotary embedding of a model: one, or one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in given or "type" in given:
        given = {"all": given}
    entries = [entry for entry in given.values() if isinstance(entry, dict)]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in entries}


def windows_of(config: PretrainedConfig) -> tuple[tuple[int | None, int], ...]:
    """`(window, layers)` of every kind of attention layer of a model, None for full causal ones."""
    config = config.get_text_config()
    window, layers = getattr(config, "sliding_window", None), int(config.num_hidden_layers)
    if getattr(config, "use_sliding_window", True) is False or not window:
        return ((None, layers),)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    return tuple((w, n) for w, n in ((None, layers - sliding), (int(window), sliding)) if n)
