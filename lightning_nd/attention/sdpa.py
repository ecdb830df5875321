"""Models that call torch's own attention: a mode that turns their causal calls into context-parallel ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_nd.attention.context import AttentionContext, context_parallel_attention


class ContextParallelSDPA(TorchFunctionMode):
    """Within it, ``F.scaled_dot_product_attention(q, k, v, is_causal=True)`` attends over all ranks' tokens.

    A mode, and no replacement of torch's function: nothing outside the ``with`` is touched. Use it in the forward of a
    hand-written model under ``cp``, or let ``NDStrategy(cp_sdpa=True)`` do so. A part that is recomputed in backward
    must be inside again: `NDStrategy`'s activation checkpointing sees to that.

    Args:
        context: the micro-batch's, ``batch["cp_context"]``.

    Raises:
        ValueError: when a call asks for what cannot be split: a mask, dropout, attention in both directions,
            `torch.nn.MultiheadAttention`.
    """

    def __init__(self, context: AttentionContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every one of its functions."""
        if func is F.scaled_dot_product_attention:
            return _attend(self.context, *args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise ValueError(
                "NDStrategy: torch.nn.MultiheadAttention (and torch's Transformer layers) cannot run with cp > 1: call"
                " F.scaled_dot_product_attention or lightning_nd.context_parallel_attention, or use cp=1."
            )
        return func(*args, **(kwargs or {}))


def _attend(
    context: AttentionContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of torch's function; its GQA is what context-parallel attention does anyway."""
    problems = []
    if attn_mask is not None:
        problems.append(
            f"attn_mask of shape {list(attn_mask.shape)} (leave it out: documents and padding are taken from the"
            " batch's position_ids and attention_mask)"
        )
    if dropout_p:
        problems.append(f"dropout_p={dropout_p} (dropout of attention weights cannot be reproduced: set it to 0)")
    if not is_causal and attn_mask is None:
        problems.append("is_causal=False (tokens would see later ones)")
    if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
        problems.append(f"{query.shape[1]} query and {key.shape[1]} key heads without enable_gqa=True")
    if problems:
        raise ValueError(
            "NDStrategy: with cp > 1, F.scaled_dot_product_attention was called with " + " and ".join(problems) + "."
        )
    return context_parallel_attention(query, key, value, context, scale=scale)


class SDPARouter:
    """Puts a model's forward, and what activation checkpointing recomputes of it, into `ContextParallelSDPA`."""

    def __init__(self) -> None:
        self._entered: list[ContextParallelSDPA] = []

    def enter(self, context: AttentionContext) -> None:
        """The model's forward begins."""
        mode = ContextParallelSDPA(context)
        mode.__enter__()
        self._entered.append(mode)

    def leave(self) -> None:
        """The forward has ended, or failed; harmless if it had not begun."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For `torch.utils.checkpoint`: nothing in forward; the forward's own context again when recomputed."""
        mode = self._entered[-1] if self._entered else None
        return nullcontext(), nullcontext() if mode is None else ContextParallelSDPA(mode.context)
