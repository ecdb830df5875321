"""A model is called as a whole: the hooks that gather its parameters and reduce their gradients start there."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_nd.parallelize.blocks import find_blocks


def guard_entry(model: nn.Module) -> None:
    """Refuse calls of embeddings, norms and heads by themselves: their gradients would be left unreduced.

    Blocks are not guarded: activation checkpointing calls them again in backward, and FSDP2 refuses other such calls.

    Raises:
        RuntimeError: from the part's forward, when the model's own is not running.
    """
    inside = {"calls": 0}

    def enter(*_: Any) -> None:
        inside["calls"] += 1

    def leave(*_: Any) -> None:
        inside["calls"] -= 1

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)
    blocks = dict(find_blocks(model))
    for name, module in model.named_modules():
        in_block = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if module is not model and not in_block and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_guard(inside, name, type(model).__name__), prepend=True)


def _guard(inside: dict[str, int], name: str, model: str) -> Any:
    def check(*_: Any) -> None:
        if inside["calls"] == 0:
            raise RuntimeError(
                f"NDStrategy: {name} was called by itself. Its parameters are gathered, and their gradients reduced, by"
                f" hooks on the whole {model}: call that, and reach its parts through forward hooks (embeddings) or"
                " outputs.hidden_states and outputs.logits; or parallelize the parts one by one in configure_model."
            )

    return check
