"""Random weights and recomputed buffers, the same for every layout.

Each parameter is drawn whole from (seed, name) with its model's own `_init_weights`, then sliced: no two
layouts can differ, and no rank ever holds more than one whole parameter.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_nd.checkpoint import _transformers as hf


@dataclass(frozen=True)
class RandomSource:
    """Weights are drawn from `seed` and each parameter's name."""

    seed: int


@dataclass(frozen=True)
class NoSource:
    """Weights of any value: memory is taken and not filled (for fake tensors)."""


def from_config(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0, **kwargs: Any
) -> PreTrainedModel:
    """Causal language model with random weights, built on meta, in training mode.

    `materialize` draws the weights in float32 from (seed, parameter name) by the model's own `_init_weights`
    and casts them: they are the same on every layout and, up to rounding, in every dtype.

    Args:
        config: a transformers config of a causal language model; it is copied.
        dtype: dtype of the parameters.
        seed: any integer.
        kwargs: passed on to `AutoModelForCausalLM.from_config`, such as `attn_implementation`.
    """
    model = build_on_meta(config, dtype, **kwargs)
    cast(Any, model)._nd_source = RandomSource(seed)
    return model


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype, **kwargs: Any) -> PreTrainedModel:
    """The model that `config` describes, on meta, in training mode; what the class keeps in float32 is."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **kwargs)
    tensors = model.state_dict(keep_vars=True)
    for name in hf.fp32_names(model, dtype, tensors):
        tensors[name].data = tensors[name].data.float()
    return model.train()


class Initializer:
    """Runs `_init_weights` of an unsharded meta model for one tensor at a time.

    `_init_weights` of a module may write to tensors of its children (GPT-2 rescales its projections so): a
    first run on meta records which calls write to which tensor, and a draw repeats exactly those with only
    that tensor in real memory.
    """

    def __init__(self, reference: PreTrainedModel) -> None:
        self._calls = list(hf.init_calls(reference))
        sizes = [t.numel() * t.element_size() for t in reference.state_dict().values()]
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._largest = max(sizes, default=0)
        self._homes: dict[str, tuple[nn.Module, str]] = {}
        for prefix, module in reference.named_modules():
            for name in (*module._parameters, *module._buffers):
                self._homes[f"{prefix}.{name}" if prefix else name] = (module, name)
        self._writers: dict[int, list[int]] = {}
        for number, (owner, module) in enumerate(self._calls):
            with torch.no_grad(), _Writes() as writes:
                owner._init_weights(module)
            for storage in writes.storages:
                self._writers.setdefault(storage, []).append(number)

    def draw(self, name: str, seed: int = 0) -> Tensor:
        """The whole tensor `name` as initialised from (seed, name): on the CPU, in the reference's dtype.

        It is valid until the next draw, which uses the same memory.

        Raises:
            ValueError: the model's class leaves (a part of) it uninitialised.
        """
        module, attribute = self._homes[name]
        table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
        empty = table[attribute]
        if empty is None:
            raise KeyError(name)
        value = self._blank(empty)
        writers = self._writers.get(_storage(empty), [])
        table[attribute] = nn.Parameter(value, requires_grad=False) if isinstance(empty, nn.Parameter) else value
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed(seed, name))
                for number in writers:
                    owner, target = self._calls[number]
                    owner._init_weights(target)
        finally:
            table[attribute] = empty
        # A sum is NaN if any element is, and needs no memory.
        if value.numel() and (not writers or (value.is_floating_point() and bool(value.sum().isnan()))):
            raise ValueError(
                f"{name} cannot be initialised: {type(module).__name__} is not (wholly) covered by the "
                "`_init_weights` of its model class. Load weights for it, or extend `_init_weights`."
            )
        return value

    def _blank(self, like: Tensor) -> Tensor:
        """NaN (zero if not floating) in the shape of `like`; one block serves all draws, to leave the heap whole."""
        needed = like.numel() * like.element_size()
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(max(needed, self._largest), dtype=torch.uint8, device="cpu")
        value = self._scratch[:needed].view(like.dtype).view(like.shape)
        return value.fill_(torch.nan if value.is_floating_point() else 0)


class _Writes(TorchDispatchMode):
    """Collects the storages of meta tensors that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                if isinstance(value, Tensor) and value.is_meta:
                    self.storages[_storage(value)] = None
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def recompute_buffers(model: PreTrainedModel, device: torch.device | str, names: Iterable[str] | None = None) -> None:
    """Set non-persistent buffers (RoPE frequencies, embedding scales) to what a normal load computes.

    They are computed on the CPU from the config, in the dtype in which the model class makes them (float32
    for RoPE whatever the model's dtype), then moved. Use it after anything that cast or spoilt them.

    Args:
        model: a transformers model, sharded or not.
        device: where the buffers go.
        names: buffers to recompute; by default all non-persistent ones.

    Raises:
        ValueError: a buffer that the model class does not initialise.
    """
    homes = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = hf.clean_name(f"{prefix}.{name}" if prefix else name)
                homes[full] = (module, name)
    if names is None:
        names = [full for full, (module, name) in homes.items() if name in module._non_persistent_buffers_set]
    names = list(names)
    if not names:
        return
    initializer = Initializer(hf.meta_copy(model, dtype=model.dtype))
    for full in names:
        module, name = homes[full]
        module._buffers[name] = initializer.draw(full).to(device, copy=True)
