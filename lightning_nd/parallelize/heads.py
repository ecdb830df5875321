"""Attention heads against tp: what divides, and key/value heads that are fewer than ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_nd.parallelize.adapters import inner_styles, is_adapter
from lightning_nd.parallelize.assignment import Assignment
from lightning_nd.parallelize.styles import STYLES, ReplicatedKeyValue


def check_heads(model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Refuse a size that does not divide the query heads which the plan splits.

    Raises:
        ValueError: with the sizes that do.
    """
    heads = _config_value(model, "num_attention_heads", "n_head")
    query = ("q_proj", "query_key_value", "qkv_proj", "c_attn", "q_b_proj")
    splits_heads = any(name.rpartition(".")[2] in query and style == "colwise" for name, style in plan.items())
    if heads is None or not splits_heads:
        return
    if heads % size:
        allowed = [d for d in range(1, heads + 1) if heads % d == 0]
        raise ValueError(
            f"NDStrategy: tp={size} does not divide num_attention_heads={heads} of {type(model).__name__}."
            f" Allowed values of tp for this model: {', '.join(map(str, allowed))}."
        )


def _config_value(model: nn.Module, *names: str) -> int | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), None)


def kv_projection_names(model: nn.Module, assignment: Assignment) -> list[tuple[str, nn.Module]]:
    """Attention modules whose separate k and v projections are split by heads."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "num_key_value_groups")
        and all(isinstance(projection(module, key), nn.Linear) for key in ("k_proj", "v_proj"))
        and assignment.modules.get(f"{name}.k_proj") is STYLES["colwise"]
        and assignment.modules.get(f"{name}.v_proj") is STYLES["colwise"]
    ]


def projection(module: nn.Module, key: str) -> Any:
    """A projection of an attention module, without the adapters around it; ``None`` if there is no such one."""
    layer = getattr(module, key, None)
    return getattr(layer, "base_layer", layer)


def is_kv_projection(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module is the key or value projection of an attention that groups query heads."""
    parent, _, leaf = name.rpartition(".")
    return leaf in ("k_proj", "v_proj") and hasattr(modules[parent], "num_key_value_groups")


def replicate_kv_heads(model: nn.Module, assignment: Assignment, size: int, rank: int) -> bool:
    """Where tp does not divide the key/value heads, keep them whole and let each rank compute those it reads."""
    replicated = False
    for name, module in kv_projection_names(model, assignment):
        head_dim = int(module.head_dim)  # type: ignore[arg-type]
        kv_heads = projection(module, "k_proj").out_features // head_dim
        if kv_heads % size == 0:
            continue
        groups = int(module.num_key_value_groups)  # type: ignore[arg-type]
        local = kv_heads * groups // size
        first = rank * local
        read = [head // groups for head in range(first, first + local)]
        distinct = sorted(set(read))
        repeats = local // len(distinct)
        if read != [head for head in distinct for _ in range(repeats)]:
            distinct, repeats = read, 1  # the groups do not end where the ranks do: one key head for each query head
        style = ReplicatedKeyValue(head_dim, tuple(distinct))
        for key in (f"{name}.k_proj", f"{name}.v_proj"):
            assignment.modules[key] = style
            if is_adapter(layer := model.get_submodule(key)):
                assignment.modules.update(inner_styles(key, layer, style))
        module.num_key_value_groups = repeats
        replicated = True
    return replicated
