"""Layers that peft has wrapped: a low-rank pair beside a layer that tensor parallelism splits.

``y = W x + s · B A x`` (Hu et al. 2021, section 4.1). The pair is split as its layer is: where the outputs of ``W`` are
split, so are those of ``B``, and ``A`` is whole; where its inputs are split, so are those of ``A``, and ``B`` is whole.
The whole factor sees a part of what it would see in one process, so its gradient is a partial sum. What the layer
exchanges is exchanged once, at the border of the wrapper, for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement, Replicate
from typing_extensions import override

from lightning_nd.parallelize.styles import Colwise, ReplicatedKeyValue, Rowwise, Site, Style


@dataclass(frozen=True)
class Inner(Style):
    """A layer inside a wrapper: its parameters lie as the outer style says; it exchanges nothing itself.

    Attributes:
        outer: the style of the wrapped layer.
        whole: the parameters are whole on every rank, and their gradients partial sums.
    """

    outer: Style
    whole: bool = False

    fits_pure_region = True

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        return Replicate() if self.whole else self.outer.placement(parameter, ndim)

    @override
    def is_partial(self, parameter: str, site: Site) -> bool:
        return self.whole or self.outer.is_partial(parameter, site)


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is a layer that peft has wrapped."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def inner_styles(name: str, wrapper: nn.Module, style: Style) -> dict[str, Style]:
    """The style of every layer inside a wrapper, by name.

    Args:
        name: of the wrapper.
        wrapper: a LoRA layer of peft.
        style: of the layer that is wrapped, by the model's plan.

    Raises:
        ValueError: for other kinds of adapters, and for layers whose split does not go through a low-rank pair.
    """
    pairs = [getattr(wrapper, part, None) for part in ("lora_A", "lora_B")]
    other = [part for part in ("lora_magnitude_vector", "lora_embedding_A") if len(getattr(wrapper, part, None) or ())]
    if not all(isinstance(pair, nn.ModuleDict) and len(pair) for pair in pairs) or other:
        kind = other[0] if other else type(wrapper).__name__
        raise ValueError(
            f"NDStrategy: {name} is a layer with an adapter ({kind}) that tensor parallelism cannot split. LoRA of"
            " linear layers without DoRA can be; use that, take this layer out of the adapter, or use tp=1 (dp_shard"
            " works)."
        )
    if not isinstance(style, Colwise | Rowwise | ReplicatedKeyValue):
        raise ValueError(
            f"NDStrategy: {name} has an adapter and is split as {type(style).__name__}, which does not go through a"
            " low-rank pair. Take this layer out of the adapter, or use tp=1 (dp_shard works)."
        )
    rows = isinstance(style, Rowwise)
    replicated = isinstance(style, ReplicatedKeyValue)
    styles: dict[str, Style] = {f"{name}.base_layer": Inner(style, whole=replicated)}
    lora_a, lora_b = pairs
    assert isinstance(lora_a, nn.ModuleDict)
    assert isinstance(lora_b, nn.ModuleDict)
    for key in lora_a:
        styles[f"{name}.lora_A.{key}"] = Inner(style, whole=not rows)
        styles[f"{name}.lora_B.{key}"] = Inner(style, whole=rows or replicated)
    return styles


def low_rank_layers(unit: nn.Module) -> list[nn.Module]:
    """The layers that peft has put beside others, in a part of a model. They compute in their own dtype: it casts."""
    found: list[nn.Module] = []
    for wrapper in filter(is_adapter, unit.modules()):
        inside = {id(m) for m in wrapper.get_submodule("base_layer").modules()}
        beside = [m for m in wrapper.modules() if id(m) not in inside]
        found += [m for m in beside if any(True for _ in m.parameters(recurse=False))]
    return found
