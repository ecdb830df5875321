"""All use of transformers' private loading machinery: a release that moves it breaks in one place."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

P = ParamSpec("P")
T = TypeVar("T")

_WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_layer.")


def _private(fn: Callable[P, T]) -> Callable[P, T]:
    """Turn a moved import or a changed signature into an error that says what to do."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except (ImportError, AttributeError, TypeError) as error:
            raise RuntimeError(
                f"lightning_nd could not use transformers {transformers.__version__} to map stored weights "
                f"to parameters ({fn.__name__}: {type(error).__name__}: {error}). It is tested with "
                "transformers 5.17 and 5.24: install one of these, or update lightning-nd."
            ) from error

    return call


def clean_name(name: str) -> str:
    """A module or parameter name without what activation checkpointing, compile, FSDP1 or peft wrappers add."""
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's class as transformers knows it: `fully_shard` replaces it by a subclass."""
    for cls in type(model).__mro__:
        if issubclass(cls, PreTrainedModel) and not issubclass(cls, FSDPModule):
            return cls
    raise TypeError(f"{type(model).__name__} is not a transformers model.")


def meta_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """An unsharded model on meta of the same class and config: full shapes, plain names, ties made."""
    config = copy.deepcopy(model.config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            reference = plain_class(model)(config)
    finally:
        torch.set_default_dtype(default)
    if hasattr(model, "_weight_conversions"):
        reference._weight_conversions = model._weight_conversions
    return reference


@_private
def conversions_of(model: PreTrainedModel) -> list[Any]:
    """Renamings and converters from stored keys to `model`'s, in the order in which they apply."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


@_private
def target_of(
    key: str, conversions: list[Any], model: PreTrainedModel, expected: dict[str, Tensor]
) -> tuple[str, Any | None, str]:
    """Where a stored key goes: (first parameter name, converter or None, the pattern of it that matched)."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    prefix = model.base_model_prefix
    name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
    if name not in expected and key in expected:
        name, pattern = rename_source_key(key, [], [], prefix, expected)
    if pattern is None:
        return name, None, key
    return name, next(c for c in reversed(converters) if pattern in c.source_patterns), pattern


@_private
def natural_order(keys: Iterable[str]) -> list[str]:
    """Keys with the numbers in them in numeric order: experts are stacked in this order."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(keys, key=dot_natural_key)


def run_converter(
    converter: Any, name: str, stored: list[tuple[str, str, Tensor]], model: PreTrainedModel
) -> dict[str, Tensor]:
    """Parameters that a converter makes from whole stored tensors `(key, pattern, tensor)`."""
    converter = copy.deepcopy(converter)
    for key, pattern, tensor in stored:
        converter.add_tensor(name, key, pattern, tensor)
    made = converter.convert(name, model=model, config=model.config)
    return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}


def stack_and_concatenate(converter: Any) -> tuple[int | None, int | None] | None:
    """(stack dim, concatenation dim) if the converter only places stored tensors side by side, else None.

    Such a parameter can be read piece by piece; any other is converted as a whole.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    ops = converter.operations
    if len(converter.target_patterns) != 1:
        return None
    if [type(op) for op in ops] == [MergeModulelist] and len(converter.source_patterns) == 1:
        return ops[0].dim, None
    if [type(op) for op in ops] == [Concatenate]:
        return None, ops[0].dim
    if [type(op) for op in ops] == [MergeModulelist, Concatenate]:
        return ops[0].dim, ops[1].dim
    return None


@_private
def ignorable(model: PreTrainedModel, unexpected: set[str]) -> set[str]:
    """The stored keys among `unexpected` that the model's class is known not to use."""
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(cast(Any, info))
    return unexpected - info.unexpected_keys


@_private
def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Tied parameters: {name: name of the parameter that it shares}."""
    return dict(model.all_tied_weights_keys)


@_private
def fp32_names(model: PreTrainedModel, dtype: torch.dtype, names: Iterable[str]) -> set[str]:
    """Parameters that the class keeps in float32 whatever `dtype` is asked for."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return set()
    pattern = build_glob_alternation(list(plan))[0]
    return {name for name in names if pattern.search(name)}


@_private
def init_calls(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Pairs (owner, module) so that `owner._init_weights(module)` in this order initialises `model`."""

    def walk(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
        for child in module.children():
            yield from walk(child, child if isinstance(child, PreTrainedModel) else owner)
        yield owner, module

    return walk(model, model)


@_private
def export_groups(model: PreTrainedModel, names: Iterable[str]) -> list[list[str]]:
    """Parameters that must be converted together on the way back to the stored format."""
    from transformers.core_model_loading import WeightConverter

    if getattr(model, "_weight_conversions", None) is None:
        # What `revert_weight_conversion` does for each call, once: no source says which prefixes were there.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        default = get_model_conversion_mapping(model, add_legacy=False)
        cast(Any, model)._weight_conversions = [c for c in default if not isinstance(c, PrefixChange)]
    reverse = [c.reverse_transform() for c in cast(Any, model)._weight_conversions[::-1]]
    converters = [c for c in reverse if isinstance(c, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in natural_order(names):
        matches = (converter.rename_source_key(name) for converter in converters)
        shared = next((renamed for renamed, pattern in matches if pattern is not None), f"={name}")
        groups.setdefault(shared, []).append(name)
    return list(groups.values())


@_private
def to_stored_format(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys and tensors as transformers' own `save_pretrained` would write them."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def copy_custom_code(model: PreTrainedModel, directory: str, config: PretrainedConfig) -> None:
    """For models with remote code: the files that define them, beside the weights."""
    if plain_class(model).is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=cast(Any, config))
