"""Low-rank pairs of peft beside the layers of a model: built on meta, filled, merged and written.

``y = W x + s · B A x`` (Hu et al. 2021, section 4.1), with ``s = alpha / r`` (``alpha / √r`` under rsLoRA).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_nd.checkpoint import _transformers as hf
from lightning_nd.checkpoint.shards import gather_full

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "default"
"""What peft calls an adapter that nobody has named."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterSource:
    """Where the pairs' values come from.

    Attributes:
        config: what peft was given.
        seed: of the random start; the values are those of ``torch.manual_seed(seed); get_peft_model(model, config)``.
        file: of an adapter to start from instead.
    """

    config: LoraConfig
    seed: int = 0
    file: str | None = None


def add_adapters(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    start: Path | None = None,
) -> None:
    """Put a low-rank pair beside the layers that `config` names and freeze all else; `materialize` fills the pairs.

    Pairs beside bfloat16 or float16 layers are float32, as peft makes them.

    Args:
        model: on meta.
        config: LoRA of linear layers, with peft's own start (``init_lora_weights=True``).
        layers: numbers of the blocks that get pairs; None: all.
        seed: of the random start.
        start: a peft adapter folder to start from instead.

    Raises:
        ValueError: for targets that match nothing, that are no linear layers or that are tied, and for an adapter
            folder that does not fit; named.
    """
    from peft import inject_adapter_in_model

    _check_targets(model, config.target_modules)
    config = _in_blocks(model, config, layers)
    tied = {name for pair in hf.tied_names(model).items() for name in pair}
    try:
        inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        raise ValueError(f"lora.target_modules: {error}") from error
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and not isinstance(base, nn.Linear):
            raise ValueError(
                f"lora.target_modules: {hf.clean_name(name)} is a {type(base).__name__}; a low-rank pair goes beside"
                " linear layers."
            )
    for name, wrapper in adapted_layers(model):
        if f"{name}.weight" in tied:
            raise ValueError(
                f"lora.target_modules: {name} shares its weight with another layer (tie_word_embeddings), and a pair"
                " beside one of them would undo that. Take it out of target_modules."
            )
        for parameter in _pair(wrapper).values():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
    if start is not None:
        _check_folder(model, start)
    file = None if start is None else str(start / WEIGHTS)
    cast(Any, model)._nd_adapters = AdapterSource(config, seed, file)


def adapted_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of `model` that have a low-rank pair, by plain name, in the order in which peft made them."""
    return [
        (hf.clean_name(name), module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module) and len(getattr(module, "lora_A", ()))
    ]


def whole_pairs(model: nn.Module, source: AdapterSource) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every tensor of the pairs, whole, one at a time; the same on every rank."""
    if source.file is not None:
        with safe_open(source.file, framework="pt") as file:
            for name, wrapper in adapted_layers(model):
                for key in _pair(wrapper):
                    yield f"{name}.{key}.{NAME}.weight", file.get_tensor(f"{_PREFIX}{name}.{key}.weight")
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        for name, wrapper in adapted_layers(model):
            base: Any = wrapper.get_submodule("base_layer")
            shapes = {key: tuple(p.shape) for key, p in _pair(wrapper).items()}
            first, second = (torch.empty(shapes[key], device="cpu") for key in ("lora_A", "lora_B"))
            # pairs beside packed weights are not rounded
            dtype = base.weight.dtype if base.weight.is_floating_point() else torch.float32
            # Both layers are made, then A is drawn again and B is zero: what peft takes from the generator.
            for value in (first, second, first):
                nn.init.kaiming_uniform_(value, a=math.sqrt(5))
            yield f"{name}.lora_A.{NAME}.weight", first.to(dtype)
            yield f"{name}.lora_B.{NAME}.weight", second.zero_()


@dataclass(frozen=True)
class Pair:
    """A low-rank pair beside a weight: ``W + scaling · B A`` is the merged one."""

    first: str
    second: str
    scaling: float

    def merge(self, weight: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The whole merged weight, at least float32; collective over the pair's meshes."""
        first, second = gather_full(state[self.first]), gather_full(state[self.second])
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return weight.to(dtype) + (second.to(dtype) @ first.to(dtype)) * self.scaling


def pairs_by_weight(model: nn.Module) -> dict[str, Pair]:
    """The pair beside each adapted weight, by the plain name of the weight."""
    found = {}
    for name, wrapper in adapted_layers(model):
        scaling = float(cast(Any, wrapper).scaling[NAME])
        found[f"{name}.weight"] = Pair(f"{name}.lora_A.{NAME}.weight", f"{name}.lora_B.{NAME}.weight", scaling)
    return found


def save_adapter(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    base: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> None:
    """Write the pairs of a model, sharded or not, as the folder that ``PeftModel.from_pretrained`` loads.

    Collective, like `save_pretrained`.

    Args:
        model: made by `add_adapters`, with its values in memory.
        directory: where the folder goes; made if it does not exist.
        base: folder or hub id of the model that the adapter belongs to.
        tokenizer: written beside the adapter, with its chat template.
        overwrite: replace `directory` if it is not empty; only a folder that looks like an adapter is replaced.

    Raises:
        FileExistsError: `directory` is not empty and may not be replaced.
        RuntimeError: rank 0 failed to write.
    """
    from lightning_nd.checkpoint.export import check_target, on_rank_zero, patience, publish, staging

    source: AdapterSource | None = getattr(model, "_nd_adapters", None)
    if source is None:
        raise TypeError(f"save_adapter: {type(model).__name__} has no adapters that add_adapters made.")
    target = Path(directory).expanduser().absolute()
    on_rank_zero(lambda: check_target(target, overwrite, CONFIG))
    state = {hf.clean_name(name): tensor for name, tensor in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}  # of rank 0
    first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for pair in pairs_by_weight(model).values():
        for name in (pair.first, pair.second):
            whole = gather_full(state[name])
            if first_rank:
                tensors[_PREFIX + name.replace(f".{NAME}.", ".")] = whole.cpu().contiguous()

    def write() -> None:
        folder = staging(target)
        try:
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            config = source.config
            config.base_model_name_or_path, was = base, (config.base_model_name_or_path, config.inference_mode)
            config.inference_mode = True
            config.save_pretrained(os.fspath(folder))
            config.base_model_name_or_path, config.inference_mode = was
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            publish(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    with patience() as waiting:
        on_rank_zero(write, waiting)


def _pair(wrapper: nn.Module) -> dict[str, nn.Parameter]:
    return {key: cast(Any, wrapper.get_submodule(f"{key}.{NAME}")).weight for key in ("lora_A", "lora_B")}


def _check_targets(model: PreTrainedModel, targets: Any) -> None:
    """Every name of a list is found.

    Raises:
        ValueError: naming what is not found.
    """
    from lightning_nd.names import nearest

    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(f"lora.target_modules: {targets!r} is no regular expression: {error}.") from error
        return
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    for target in targets or ():
        hit = [module for name, module in leaves.items() if name == target or name.endswith(f".{target}")]
        for module in hit:
            weight = getattr(module, "weight", None)
            if weight is None or weight.dim() < 2:
                raise ValueError(
                    f"lora.target_modules: {target!r} is a {type(module).__name__}; pairs go beside linear layers."
                )
        if not hit:
            linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
            raise ValueError(
                f"lora.target_modules: {type(model).__name__} has no layer {target!r}: {nearest(target, linear)}"
            )


def _in_blocks(model: PreTrainedModel, config: LoraConfig, layers: Sequence[int] | None) -> LoraConfig:
    """A configuration for some blocks only, by the names of its layers: peft limits lists of last parts alone.

    Raises:
        ValueError: for a block that the model has not, and for targets that are in none of them.
    """
    from lightning_nd.parallelize.blocks import find_blocks

    if layers is None:
        return config
    blocks = [f"{name}." for name, _ in find_blocks(model)]
    if lost := [number for number in layers if not 0 <= number < len(blocks)]:
        raise ValueError(f"lora.layers: {type(model).__name__} has blocks 0 to {len(blocks) - 1}, and no {lost[0]}.")
    targets: Any = config.target_modules
    inside = tuple(blocks[number] for number in layers)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(inside)]
    if isinstance(targets, str) and targets != "all-linear":
        names = [name for name in names if re.fullmatch(targets, name)]
    elif targets != "all-linear":
        names = [name for name in names if any(name == one or name.endswith(f".{one}") for one in targets)]
    if not names:
        raise ValueError(
            f"lora.target_modules: {targets} is no linear layer of the blocks {list(layers)} (lora.layers)."
        )
    return replace(config, target_modules=names)


def _check_folder(model: nn.Module, folder: Path) -> None:
    """The adapter in `folder` has exactly the pairs of `model`, in its shapes and with its scaling.

    Raises:
        ValueError: naming what differs.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"lora.adapter: {folder.absolute()} has no {name}, so it is no peft adapter.")
    wanted = {
        f"{_PREFIX}{name}.{key}.weight": tuple(parameter.shape)
        for name, wrapper in adapted_layers(model)
        for key, parameter in _pair(wrapper).items()
    }
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    problems = []
    if missing := sorted(set(wanted) - set(found)):
        problems.append(f"it lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
    if extra := sorted(set(found) - set(wanted)):
        problems.append(f"it has also {extra[0]}" + (f" and {len(extra) - 1} more" if len(extra) > 1 else ""))
    if differ := [key for key in wanted if key in found and found[key] != wanted[key]]:
        problems.append(f"{differ[0]} is {list(found[differ[0]])} in it, and {list(wanted[differ[0]])} here")
    stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    scaling = stored["lora_alpha"] / (math.sqrt(stored["r"]) if stored.get("use_rslora") else stored["r"])
    ours = {pair.scaling for pair in pairs_by_weight(model).values()}
    if not problems and ours != {scaling}:
        problems.append(f"its scaling (alpha / r) is {scaling:g}, and {min(ours):g} here")
    if problems:
        raise ValueError(
            f"lora.adapter: {folder.absolute()} is another adapter: {'; '.join(problems)}. Give lora the r, alpha and"
            " target_modules of its adapter_config.json."
        )
