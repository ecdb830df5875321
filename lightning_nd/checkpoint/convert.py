"""From a checkpoint of a fit to a Hugging Face folder, in one process and one tensor at a time."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from lightning_nd.assets import resolve
from lightning_nd.checkpoint import _transformers as hf
from lightning_nd.checkpoint import export
from lightning_nd.checkpoint.adapters import CONFIG, add_adapters, pairs_by_weight, save_adapter
from lightning_nd.checkpoint.init import build_on_meta
from lightning_nd.checkpoint.inspect import Contents
from lightning_nd.checkpoint.load import load_pretrained
from lightning_nd.checkpoint.manifest import CheckpointError, damage
from lightning_nd.checkpoint.merge import merged_weights

M = TypeVar("M", bound=LightningModule)


def export_checkpoint(
    path: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    adapter: bool | None = None,
    base: str | None = None,
    tokenizer: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> str:
    """Write the model of a checkpoint as a folder that plain transformers (or peft) loads.

    Every byte of the checkpoint is compared with its checksum before it is used, and the folder is read back. Memory:
    one tensor (a group of experts counts as one), and the adapter of a LoRA run.

    Args:
        path: of the checkpoint, sharded or one file.
        output: where the folder goes.
        dtype: of all floating weights; None: that in which the base model was stored.
        adapter: of a LoRA run: the adapter alone (the default there), or the merged model.
        base: of a LoRA run: folder or hub id of the model it started from, if it is not where it was.
        tokenizer: folder or hub id; None: that of the run.
        max_shard_size: of a safetensors file.
        overwrite: replace a model that is there.

    Returns:
        What was written, in words.

    Raises:
        CheckpointError: damaged, or it does not hold what is to be written.
        FileExistsError: `output` is not empty and may not be replaced.
    """
    target = output.expanduser().absolute()
    contents = Contents.of(path)
    if wrong := damage(path, contents.manifest):
        raise CheckpointError(f"{path} is damaged: {wrong[0]}. Nothing was written.")
    rest = contents.rest()
    settings = rest.get("hyper_parameters") or {}
    lora = settings.get("lora")
    if lora is None and adapter:
        raise CheckpointError(f"{path} is not of a LoRA run, so there is no adapter in it. Leave --adapter out.")
    as_adapter = lora is not None and adapter is not False
    export.check_target(target, overwrite, CONFIG if as_adapter else "config.json")
    prefix, described = _only_model(contents)
    words = _tokenizer(contents, settings, tokenizer)
    if lora is None:
        model = _empty_model(described)
        plan = _full(contents, model, prefix, described, target, dtype, max_shard_size, words)
        return f"{target}: {plan} tensors, step {contents.manifest.step} of {path}"
    source = base or settings.get("model")
    if not source:
        raise CheckpointError(
            "A LoRA checkpoint holds what was trained only: give the model it started from with --base."
        )
    model = _adapted(contents, prefix, settings, resolve(str(source)))
    if as_adapter:
        name = str(Path(resolve(str(source))).absolute()) if Path(resolve(str(source))).is_dir() else str(source)
        save_adapter(model, target, base=name, tokenizer=words, overwrite=overwrite)
        return f"{target}: adapter of {name}, step {contents.manifest.step} of {path}"
    with merged_weights(model) as (state, whole):
        _write(export._Plan(model, state, dtype, max_shard_size), model, whole, target, words)
    return f"{target}: {source} with the adapter merged, step {contents.manifest.step} of {path}"


def load_from_checkpoint(kind: type[M], path: str | Path, **arguments: Any) -> M:
    """``kind.load_from_checkpoint(path, **arguments)`` for sharded checkpoints too; the whole model comes into memory.

    Args:
        kind: the class of the LightningModule.
        path: of a checkpoint, sharded or one file.
        arguments: as `LightningModule.load_from_checkpoint` takes them.
    """
    path = Path(path)
    if path.is_file():
        return kind.load_from_checkpoint(path, **arguments)
    contents = Contents.of(path)
    if wrong := damage(path, contents.manifest):
        raise CheckpointError(f"{path} is damaged: {wrong[0]}.")
    content = {**contents.rest(), "state_dict": {name: contents.weight(name) for name in contents.weights()}}
    stream = io.BytesIO()
    torch.save(content, stream)
    del content
    stream.seek(0)
    return kind.load_from_checkpoint(stream, **arguments)


class FromEitherFormat(LightningModule):
    """A LightningModule whose own `load_from_checkpoint` takes sharded checkpoints too."""

    @override
    @_restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; of a folder, as `lightning_nd.load_from_checkpoint`."""
        if not args and isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            return load_from_checkpoint(cls, checkpoint_path, **kwargs)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)


def _only_model(contents: Contents) -> tuple[str, dict[str, Any]]:
    models = {name: entry for name, entry in contents.manifest.models.items() if "config" in entry}
    if len(models) != 1:
        raise CheckpointError(
            f"{contents.path} holds {len(models)} transformers models ({', '.join(models) or 'none'}); export writes"
            " one. Load the checkpoint in Python and call lightning_nd.save_pretrained."
        )
    ((name, described),) = models.items()
    return (f"{name}." if name else ""), described


def _empty_model(described: dict[str, Any]) -> PreTrainedModel:
    values = copy.deepcopy(described["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = [described["class"]]
    model = build_on_meta(config, torch.float32)
    if hf.plain_class(model).__name__ != described["class"]:
        raise CheckpointError(
            f"The checkpoint's model is a {described['class']}, and export knows how to build causal language models"
            f" ({hf.plain_class(model).__name__} for this configuration)."
        )
    if described.get("generation"):
        model.generation_config = GenerationConfig.from_dict(described["generation"])
    return model


def _full(
    contents: Contents,
    model: PreTrainedModel,
    prefix: str,
    described: dict[str, Any],
    target: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    tokenizer: PreTrainedTokenizerBase | None,
) -> int:
    stored = described.get("dtypes") or {}
    present = {hf.clean_name(name): name for name in contents.weights(prefix)}
    present = {name[len(prefix) :]: full for name, full in present.items()}
    wanted = model.state_dict()
    ties = hf.tied_names(model)
    state, missing = {}, []
    for name, like in wanted.items():
        source = name if name in present else ties.get(name) if ties.get(name) in present else None
        source = source or next((a for a, b in ties.items() if b == name and a in present), None)
        if source is None:
            missing.append(name)
            continue
        shape, kind = contents.shapes[f"state_dict.{present[source]}"]
        if shape != like.shape:
            raise CheckpointError(
                f"{contents.path}: {name} is {list(shape)}, its configuration says {list(like.shape)}."
            )
        kind = getattr(torch, stored.get(name, stored.get("", "")), kind) if stored else kind
        state[name] = torch.empty(shape, dtype=kind if like.is_floating_point() else like.dtype, device="meta")
        present[name] = present[source]
    if missing:
        raise CheckpointError(f"{contents.path} lacks {missing[0]} and {len(missing) - 1} other tensors of the model.")
    plan = export._Plan(model, state, dtype, max_shard_size)
    _write(plan, model, lambda name: contents.weight(present[name]), target, tokenizer)
    return len(plan.places)


def _write(
    plan: export._Plan,
    model: PreTrainedModel,
    whole: Callable[[str], Tensor],
    target: Path,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    folder = export.staging(target)
    try:
        export._stream(plan, whole, folder)
        export._finish(plan, model, folder, target, tokenizer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _adapted(contents: Contents, prefix: str, settings: dict[str, Any], source: str) -> PreTrainedModel:
    """The base model on meta, with the trained pairs of a checkpoint in memory."""
    from lightning_nd.recipes.lora import LoRA

    lora = LoRA.of(settings["lora"])
    model = load_pretrained(source, **(settings.get("config_overrides") or {}))
    add_adapters(model, lora.config(), layers=lora.layers)
    trained = {hf.clean_name(name)[len(prefix) :]: name for name in contents.weights(prefix)}
    pairs = {name for pair in pairs_by_weight(model).values() for name in (pair.first, pair.second)}
    if odd := sorted(pairs ^ set(trained)):
        raise CheckpointError(f"{contents.path} does not fit its own LoRA settings: {odd[0]} is on one side only.")
    for name, full in trained.items():
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, nn.Parameter(contents.weight(full), requires_grad=False))
    return model


def _tokenizer(contents: Contents, settings: dict[str, Any], given: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the run, with the chat template that it trained with."""
    name = given or settings.get("tokenizer") or settings.get("model")
    if not name:
        return None
    place = resolve(str(Path(name).expanduser()) if str(name).startswith("~") else str(name))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place)
    if template := contents.manifest.recipe.get("chat_template"):
        tokenizer.chat_template = template
    return tokenizer
