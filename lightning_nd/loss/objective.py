"""What a transformers class means by its loss: how labels lie on the tokens, and what it adds to the cross entropy."""

from __future__ import annotations

from typing import Any

from lightning_nd.names import class_name
from lightning_nd.settings import switched_on


def labels_are_shifted(model: Any) -> bool | None:
    """Whether the label of a token is the target of the one before it, as in a decoder that predicts the next token.

    The decoder of an encoder-decoder model may read its labels moved by one already (``loss_type="ForMaskedLM"``):
    there every label is the target of its own place. None for a loss of transformers that is no mean over tokens
    (speech, detection).

    Raises:
        ValueError: for a model whose ``loss_function`` somebody has set.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    loss = model.loss_function
    if loss is LOSS_MAPPING["ForCausalLM"]:
        return True
    if loss is LOSS_MAPPING["ForMaskedLM"]:
        return False
    if getattr(loss, "__module__", "").startswith("transformers."):
        return None
    raise ValueError(
        f"NDStrategy: {class_name(model)} was given a loss_function of its own"
        f" ({getattr(loss, '__qualname__', loss)}), which would be replaced: a loss of one rank's tokens"
        " cannot be made a token mean over all ranks. Take it away (del model._loss_function), or leave `labels`"
        " out of the call and compute it from outputs.logits in training_step."
    )


def own_loss(model: Any) -> str:
    """What to say of a class that has computed a loss in its own code."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        instead = (
            "pass decoder_input_ids in their place and compute the loss from outputs.logits: the labels of an"
            " encoder-decoder model are not shifted"
        )
    else:
        instead = "use lightning_nd.loss.causal_lm_loss(outputs.logits, labels, self.trainer.strategy)"
    return (
        f"NDStrategy: {class_name(model)} computes its loss by its own code, which cannot be made a token"
        f" mean over all ranks. Leave `labels` out of the call and {instead}."
    )


def check_router_loss(model: Any, ranks: int, asked: bool | None = None) -> None:
    """Refuse a load-balancing loss: it is no sum over tokens, and each layout would give another number.

    Args:
        model: a transformers model.
        ranks: how many read different tokens.
        asked: ``output_router_logits`` of a call; None leaves it to the config.

    Raises:
        ValueError: for several ranks.
    """
    if ranks == 1 or asked is False:
        return
    setting = None if asked else switched_on(getattr(model, "config", None), "output_router_logits")
    if not asked and setting is None:
        return
    place = "in the call of the model" if asked else f"as {setting} in the model's config"
    raise ValueError(
        f"NDStrategy: {class_name(model)} adds a load-balancing loss (output_router_logits=True {place}). It is a"
        f" product of averages over the micro-batch, so {ranks} data ranks would not give one"
        " process's loss. Set output_router_logits=False there, or use one data rank."
    )
