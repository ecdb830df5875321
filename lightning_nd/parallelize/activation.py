"""Activation checkpointing of blocks: none, every block, every n-th block, or by operator; offload of what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_nd.attention.keep import Kept, is_computing
from lightning_nd.attention.sdpa import SDPARouter
from lightning_nd.parallelize.blocks import find_blocks
from lightning_nd.parallelize.offload import Offload
from lightning_nd.parallelize.sequence import SequenceShard

ActivationCheckpointing = Literal["none", "full", "selective"] | int
ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Runner = Callable[..., Any]


def check_activation_checkpointing(mode: ActivationCheckpointing, offload: bool = False) -> None:
    """Raise ValueError unless ``mode`` is ``"none"``, ``"full"``, ``"selective"`` or a positive integer.

    With ``offload``, ``"selective"`` is refused, too.
    """
    if isinstance(mode, bool) or (
        mode not in ("none", "full", "selective") and not (isinstance(mode, int) and mode > 0)
    ):
        raise ValueError(
            f"NDStrategy: activation_checkpointing must be 'none', 'full', 'selective' or a positive integer n"
            f" (every n-th block), got {mode!r}."
        )
    if offload and mode == "selective":
        raise ValueError(
            "NDStrategy: offload_activations=True does not go with activation_checkpointing='selective': torch keeps"
            " the chosen results itself, where they cannot be moved. Use 'none', 'full' or every n-th block."
        )


def apply_activation_checkpointing(
    model: nn.Module,
    mode: ActivationCheckpointing,
    sequence: SequenceShard | None = None,
    attention: SDPARouter | None = None,
    offload: bool = False,
    compiled: bool = False,
) -> None:
    """Recompute blocks in the backward pass instead of keeping their activations, in place.

    Args:
        model: transformers blocks are checkpointed by their own switch, others by torch's `checkpoint_wrapper`.
        mode: ``"full"`` recomputes every block, ``n`` every n-th one, ``"selective"`` keeps what is dear to recompute
            (attention, and every second matrix product, the rule of torchtitan) and recomputes the rest.
        sequence: the model's sequence shard, whose length a recomputation must see.
        attention: where the model's own calls of torch's attention go, for the recomputation too.
        offload: keep in host memory what blocks keep: their input where they are recomputed, else all that they save.
        compiled: the blocks will be compiled, and `apply_compile` does the offload. They are recomputed by their
            graph, in which the length of the sequence is a constant.
    """
    check_activation_checkpointing(mode, offload)
    _take_over(model)
    every = mode if isinstance(mode, int) else 1
    again: Runner = partial(checkpoint, use_reentrant=False)
    if compiled and mode == "selective":  # the compiler takes torch's two modes and nothing around them
        again = partial(again, context_fn=_selective)
    elif not compiled and (sequence is not None or attention is not None or mode == "selective"):
        again = partial(again, context_fn=partial(_contexts, sequence, attention, mode == "selective"))
    for index, (name, block) in enumerate(find_blocks(model)):
        run = None if mode == "none" or index % every else again
        if offload and not compiled:
            run = partial(Offload(block).run, *([] if run is None else [run]))
        if run is None:
            continue
        if hasattr(block, "gradient_checkpointing"):
            block.gradient_checkpointing = True  # type: ignore[assignment]
            block._gradient_checkpointing_func = run  # type: ignore[assignment]
        else:
            _wrap(model, name, block, run)


def _take_over(model: nn.Module) -> None:
    """Switch the model's own checkpointing off: it would not restore the sequence length."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]


def _wrap(model: nn.Module, name: str, block: nn.Module, run: Runner) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    parent, _, key = name.rpartition(".")
    wrapped = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, checkpoint_fn=run)
    model.get_submodule(parent).register_module(key, wrapped)


def _contexts(sequence: SequenceShard | None, attention: SDPARouter | None, selective: bool) -> ContextPair:
    pairs: list[ContextPair] = [x.checkpoint_contexts() for x in (sequence, attention) if x is not None]
    if selective:
        pairs.append(Kept().checkpoint_contexts())
        pairs.append(_selective())
    return _enter([p[0] for p in pairs]), _enter([p[1] for p in pairs])


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keep_policy())


@contextmanager
def _enter(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _keep_policy() -> Callable[..., CheckpointPolicy]:
    aten = torch.ops.aten
    attention = {
        getattr(aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        )
        if hasattr(aten, name)
    }
    products = {aten.mm.default, aten.addmm.default}
    seen = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_computing():
            return CheckpointPolicy.PREFER_RECOMPUTE  # context-parallel attention keeps its result itself
        if op in attention:
            return CheckpointPolicy.MUST_SAVE
        if op in products:
            seen[ctx.is_recompute] += 1
            if seen[ctx.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
