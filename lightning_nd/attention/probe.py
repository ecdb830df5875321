"""Whether a transformers model hands keyword arguments on to its attention, tried on meta."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME, _KEY = "nd_probe", "nd_probe_mark"


class _Answer(Exception):
    """Carries what the first attention call was given."""

    def __init__(self, arrived: bool) -> None:
        super().__init__()
        self.arrived = arrived


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any) -> Any:
    raise _Answer(_KEY in kwargs)


def hands_on_keywords(model: PreTrainedModel) -> bool:
    """Whether a keyword argument of the model's forward reaches its attention function.

    A copy of the model's first block is run on meta up to its attention. A model that cannot be tried so is taken to
    hand them on: it is told at its first step otherwise.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)  # without a mask function of that name no mask is made
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    try:
        with torch.device("meta"):
            small: Any = type(model)._from_config(config, attn_implementation=_NAME)
            small(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False, **{_KEY: True})
    except _Answer as answer:
        return answer.arrived
    except Exception:
        return True
    return True
