"""torch.compile, block by block: repeated blocks share one compilation."""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_nd.parallelize.blocks import find_blocks
from lightning_nd.parallelize.offload import Offload


def apply_compile(model: nn.Module, offload: bool = False) -> None:
    """Compile every block in place; names and parameters stay as they are.

    Args:
        model: with activation checkpointing applied.
        offload: keep in host memory what blocks save for the backward pass.
    """
    for _, block in find_blocks(model):
        block.compile()
        if offload:  # around what is compiled, which saves a graph's inputs and results
            compiled = block._compiled_call_impl
            assert compiled is not None
            block._compiled_call_impl = partial(Offload(block).run, compiled)
