"""Values of a configuration that a recipe replaces: each takes effect, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_nd.names import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_ELSEWHERE = {
    "dtype": "the weights' dtype is model.dtype",
    "torch_dtype": "the weights' dtype is model.dtype",
    "quantization_config": "frozen layers are quantized by model.lora.quantization",
    **dict.fromkeys(("architectures", "model_type", "transformers_version", "auto_map"), "it says what the model is"),
}
_ROPE_KEYS = (
    *("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "truncate"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
)


def apply_overrides(config: PretrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values of a model's configuration, in place.

    ``rope_theta`` and ``rope_scaling`` are the old names of parts of ``rope_parameters``: what is given is laid over
    the model's own, so that a scaling keeps the base frequency. With a scaling by a factor and no
    ``max_position_embeddings``, the latter grows by that factor.

    Returns:
        The values that were set, by the names that the configuration has for them.

    Raises:
        ValueError: for a name that the configuration does not have, and for a rotary embedding that transformers
            cannot compute.
    """
    known = config.to_dict()
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ROPE:
            continue
        if name in _ELSEWHERE:
            raise ValueError(f"config_overrides: {name!r} has no effect here; {_ELSEWHERE[name]}.")
        if name not in known:
            raise ValueError(f"config_overrides: {type(config).__name__} has no {name!r}: {nearest(name, known)}")
        changed[name] = value
        setattr(config, name, value)
    asked = {name: given[name] for name in _ROPE if name in given}
    if asked:
        changed |= _override_rope(config, asked, length_given="max_position_embeddings" in given)
    return changed


def _override_rope(config: PretrainedConfig, asked: dict[str, Any], *, length_given: bool) -> dict[str, Any]:
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict):
        raise ValueError(
            f"config_overrides: {type(config).__name__} has no rotary embedding, so no {next(iter(asked))}."
        )
    if any(isinstance(value, dict) for value in own.values()):
        if set(asked) != {"rope_parameters"}:
            raise ValueError(
                f"config_overrides: {type(config).__name__} has rotary embeddings by kind of layer ({', '.join(own)});"
                " give rope_parameters with all of them."
            )
        config.rope_parameters = asked["rope_parameters"]
        return {"rope_parameters": config.rope_parameters}
    merged = dict(own)
    for name in ("rope_parameters", "rope_scaling"):
        part = asked.get(name)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ValueError(f"config_overrides: {name} is {part!r}; it must be a mapping such as rope_type: yarn.")
        part = {("rope_type" if key == "type" else key): value for key, value in part.items()}
        allowed = {*_ROPE_KEYS, *own}
        if unknown := next((key for key in part if key not in allowed), None):
            raise ValueError(f"config_overrides: {name} has no {unknown!r}: {nearest(unknown, allowed)}")
        if part.get("rope_type", merged.get("rope_type")) != merged.get("rope_type"):
            merged = {key: merged[key] for key in ("rope_theta", "partial_rotary_factor") if key in merged}
        merged |= part
    if "rope_theta" in asked:
        merged["rope_theta"] = asked["rope_theta"]
    for key in ("factor", "rope_theta"):
        value = 1.0 if merged.get(key) is None else merged[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
            raise ValueError(f"config_overrides: {key} of the rotary embedding is {value!r}; it is a number from 1 on.")
    length = getattr(config, "max_position_embeddings", None)
    kind, factor = merged.get("rope_type", "default"), merged.get("factor")
    changed: dict[str, Any] = {}
    if length and kind in ("yarn", "llama3", "longrope"):
        merged.setdefault("original_max_position_embeddings", own.get("original_max_position_embeddings", length))
    if length and factor and not length_given and kind in ("linear", "yarn", "llama3"):
        was = own.get("original_max_position_embeddings", length)
        changed["max_position_embeddings"] = config.max_position_embeddings = round(was * factor)
    changed["rope_parameters"] = config.rope_parameters = merged
    _check_rope(config, kind)
    return changed


def _check_rope(config: PretrainedConfig, kind: str) -> None:
    """Compute the frequencies once: what fails here fails after minutes of loading otherwise."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind == "default":
        return
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ["default", *ROPE_INIT_FUNCTIONS]
        raise ValueError(f"config_overrides: there is no rope_type {kind!r}: {nearest(kind, known)}")
    try:
        ROPE_INIT_FUNCTIONS[kind](config, None)
    except Exception as error:
        raise ValueError(
            f"config_overrides: rope_type {kind!r} cannot be computed from {config.rope_parameters}:"
            f" {type(error).__name__}: {error}"
        ) from error


def check_length(config: PretrainedConfig, max_length: int | None) -> None:
    """Refuse rows that are longer than the model's positions reach.

    Raises:
        ValueError: with both lengths and the override that would fit.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if max_length and isinstance(limit, int) and max_length > limit > 0:
        # A model whose embedding is scaled already: factors are of the length before that.
        own = getattr(text, "rope_parameters", None)
        before = own.get("original_max_position_embeddings") if isinstance(own, dict) else None
        factor = -(-max_length // (before or limit))
        raise ValueError(
            f"data.max_length={max_length} is beyond the {limit} positions (max_position_embeddings) that"
            f" {type(config).__name__} is made for. Shorten the rows, or scale its rotary embedding:"
            f" config_overrides: {{rope_parameters: {{rope_type: yarn, factor: {factor}.0}}}}, which the export keeps."
        )
