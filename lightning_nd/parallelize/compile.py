"""torch.compile, block by block: repeated blocks share one compilation."""

from __future__ import annotations

from torch import nn

from lightning_nd.parallelize.blocks import find_blocks


def apply_compile(model: nn.Module) -> None:
    """Compile every block in place; names and parameters stay as they are."""
    for _, block in find_blocks(model):
        block.compile()
