"""What can be seen of a hand-written tensor-parallel plan before it runs: layers it would cut in the wrong place."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from lightning_nd.parallelize.blocks import find_blocks
from lightning_nd.parallelize.styles import STYLES, Rowwise, Style

_FUSED = re.compile(r"w?qkv(_proj)?|query_key_value|c_attn|in_proj|attn_proj|kv(_proj)?", re.IGNORECASE)


def check_own_plan(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuse a user's plan that would train on other numbers than one process, or stop in the first step.

    Args:
        model: not from transformers, so that nothing is known of it but its modules.
        styles: the style of each planned module, by name.

    Raises:
        ValueError: for a layer of several matrices that is cut as one, a slice that nothing puts together again, and
            a layer that takes slices where none are made.
    """
    modules = dict(model.named_modules())
    for name, style in styles.items():
        leaf, layer = name.rpartition(".")[2], modules[name]
        if style is STYLES["colwise"] and isinstance(layer, nn.Linear) and _FUSED.fullmatch(leaf):
            raise ValueError(
                f"NDStrategy: tp_plan has 'colwise' for {name!r}, which by its name holds queries, keys and values"
                f" ({layer.in_features} → {layer.out_features}). 'colwise' gives each rank one contiguous part of all"
                " of it. Use 'qkv_colwise' where q, k and v lie one after the other in equal widths, or"
                " 'qkv_interleaved_colwise' where those of each head lie together (GPT-NeoX); else give each its own"
                " layer."
            )
    regions = _regions(model, modules)
    for name, style in styles.items():
        region = next((r for r in regions if name.startswith(f"{r}.")), "")
        peers = [s for n, s in styles.items() if n.startswith(f"{region}.") or (not region and not _inside(n, regions))]
        where = f"within {region!r}" if region else "beside it"
        if style.splits_output and not any(isinstance(s, Rowwise) for s in peers):
            raise ValueError(
                f"NDStrategy: tp_plan leaves the output of {name!r} in slices, and no layer {where} is 'rowwise' to add"
                " them up. Plan both, or use 'colwise_gather_output'."
            )
        if isinstance(style, Rowwise) and style.fits_pure_region and not any(s.splits_output for s in peers):
            raise ValueError(
                f"NDStrategy: tp_plan has 'rowwise' for {name!r}, which takes slices, and no layer {where} makes any."
                " Plan the layer before it as 'colwise', or use 'rowwise_split_input'."
            )


def _regions(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """The parts of each block that hold layers (attention, MLP), then the blocks, for layers that lie in them bare."""
    blocks = [name for name, _ in find_blocks(model)]
    parts = [f"{block}.{key}" for block in blocks for key, child in modules[block].named_children() if _holds(child)]
    return parts + blocks


def _holds(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _inside(name: str, regions: list[str]) -> bool:
    return any(name.startswith(f"{region}.") for region in regions)
