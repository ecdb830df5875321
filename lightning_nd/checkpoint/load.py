"""From a Hugging Face folder to a sharded model, each rank reading only what it holds."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from lightning_nd.checkpoint import _transformers as hf
from lightning_nd.checkpoint.adapters import whole_pairs
from lightning_nd.checkpoint.init import Initializer, NoSource, RandomSource, build_on_meta, recompute_buffers
from lightning_nd.checkpoint.shards import Box, from_local_like, local_box
from lightning_nd.checkpoint.source import OpenSource, Piece, WeightSource, read_source, weight_files
from lightning_nd.quantized import PackedLinear, leave_blank, pack


def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Causal language model of a Hugging Face folder or hub id, on meta; `materialize` reads its weights.

    Files and their headers are checked here, so that what does not fit is known before anything is loaded.
    The model is in training mode and carries the folder's generation config.

    Args:
        name_or_path: a folder with config.json and safetensors files, or a hub id such as "Qwen/Qwen3-0.6B".
        dtype: dtype of the parameters in memory; stored weights are cast to it as they are read.
        attn_implementation: as in transformers; by default what the config says.
        trust_remote_code: run modelling code that comes with the folder.
        config_overrides: config fields to set, such as `rope_theta=1e6`.

    Raises:
        FileNotFoundError: no such folder or hub id, or a folder without config.json or safetensors.
        ValueError: unknown config field, quantized weights, or weights that do not fit the model (named).
    """
    folder = _folder(name_or_path, trust_remote_code)
    weight_files(folder)
    config = _config(folder, trust_remote_code, config_overrides)
    kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    model = build_on_meta(config, dtype, **kwargs)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    cast(Any, model)._nd_source = read_source(folder, model)
    return model


def _folder(name_or_path: str | os.PathLike[str], trust_remote_code: bool) -> Path:
    name = os.fspath(name_or_path)
    path = Path(name).expanduser().absolute()
    allowed = "Give a folder with config.json and *.safetensors, or a hub id such as Qwen/Qwen3-0.6B."
    if path.is_dir():
        if not (path / "config.json").is_file():
            present = sorted(p.name for p in path.iterdir())
            raise FileNotFoundError(f"No config.json in {path}, which holds {present or 'nothing'}. {allowed}")
        return path
    if path.is_file():
        raise FileNotFoundError(f"{path} is a file. {allowed}")
    if isinstance(name_or_path, os.PathLike) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"There is no folder {path}. {allowed}")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        # Files in subfolders and `consolidated` ones are the same weights in other formats.
        downloaded = snapshot_download(
            name,
            allow_patterns=[*patterns, "*.py"] if trust_remote_code else patterns,
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:
        raise FileNotFoundError(
            f"There is no folder {path}, and {name!r} could not be had from the Hugging Face hub "
            f"({type(error).__name__}: {error}). {allowed}"
        ) from error
    return Path(downloaded)


def _config(folder: Path, trust_remote_code: bool, overrides: dict[str, Any]) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    fields = set(config.to_dict()) | set(type(config).attribute_map)
    for name in overrides:
        if name not in fields and not hasattr(config, name):
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)
            raise ValueError(
                f"{type(config).__name__} of {folder} has no field {name!r}; the nearest is {near[0]!r}. "
                f"Fields: {', '.join(sorted(f for f in fields if not f.startswith('_')))}."
            )
    if overrides:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **overrides)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{folder} holds quantized weights ({_quantizer(config)}), which cannot be trained sharded. Save "
            "it dequantized first, or use the original in bfloat16."
        )
    return config


def _quantizer(config: PretrainedConfig) -> str:
    quantization = config.quantization_config
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "unknown method"))
    return str(getattr(quantization, "quant_method", "unknown method"))


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give a meta model its weights, in place: loaded or drawn, buffers recomputed, ties made.

    Call it after tensor parallelism and `fully_shard`, on every rank; it does not communicate. Each rank reads the
    slices that it holds from the safetensors that `load_pretrained` found, or draws what `from_config` promised, one
    parameter at a time. A model without anything on meta is left as it is. Parameters become new objects with the
    attributes of the old ones: make optimizers and register parameter hooks afterwards.

    Args:
        model: transformers model; parameters are plain or DTensors with Shard, _StridedShard or Replicate.
        device: where parameters and buffers go.

    Raises:
        RuntimeError: the model is on meta and was not made by `load_pretrained` or `from_config`, or
            something is still on meta afterwards (named).
        ValueError: parameters that the source does not have.
    """
    if not _on_meta(model):
        return
    source = getattr(model, "_nd_source", None)
    if source is None:
        raise RuntimeError(
            f"materialize: {type(model).__name__} is on meta and nothing says where its weights are. Build "
            "it with lightning_nd.load_pretrained(path) or lightning_nd.from_config(config)."
        )
    model = cast(PreTrainedModel, model)  # only such models have a source
    reference = hf.meta_copy(model, dtype=torch.float32)
    targets = _Targets(model, hf.tied_names(reference), torch.device(device))
    if isinstance(source, NoSource):
        _leave(model, targets)
        return
    if (adapters := getattr(model, "_nd_adapters", None)) is not None:
        for name, value in whole_pairs(model, adapters):
            targets.fill_from(name, value)
    if isinstance(source, RandomSource):
        _draw(targets, reference, source.seed)
    else:
        _read(targets, reference, source)
    targets.finish()
    recompute_buffers(model, device)
    if left := _on_meta(model):
        raise RuntimeError(f"materialize: still on meta: {', '.join(left)}.")


def _on_meta(model: nn.Module) -> list[str]:
    left = [n for n, t in itertools.chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    for prefix, module in model.named_modules():
        left += [f"{prefix}.{k}" for k, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta]
    return left


class _Targets:
    """The meta parameters and persistent buffers of a model by plain name, to be replaced one by one."""

    def __init__(self, model: nn.Module, ties: dict[str, str], device: torch.device) -> None:
        self.device = device
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self._pending: dict[str, Tensor] = {}
        for prefix, module in model.named_modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    persistent = name not in module._non_persistent_buffers_set
                    if tensor is not None and tensor.is_meta and persistent:
                        full = hf.clean_name(f"{prefix}.{name}" if prefix else name)
                        self._homes[full] = (table, name)
                        self._pending[full] = tensor
        self._aliases = self._group(ties)
        self.quantized = {
            hf.clean_name(f"{name}.weight"): layer
            for name, layer in model.named_modules()
            if isinstance(layer, PackedLinear)
        }

    def _group(self, ties: dict[str, str]) -> dict[str, list[str]]:
        """For each name that is filled, all names that share its tensor: tied now, or to be tied again."""
        aliases: dict[str, list[str]] = {}
        by_object: dict[int, str] = {}
        for name, tensor in self._pending.items():
            origin = ties.get(name, name)
            if origin in self._pending and origin != name:
                other = self._pending[origin]
                if _layout(tensor) != _layout(other):
                    raise RuntimeError(
                        f"materialize: {name} and {origin} are tied but laid out differently: {_layout(tensor)} and "
                        f"{_layout(other)}. Tie them after tensor parallelism and before fully_shard."
                    )
            first = by_object.setdefault(id(self._pending.get(origin, tensor)), origin)
            aliases.setdefault(first, []).append(name)
        return aliases

    def names(self) -> list[str]:
        """One name for each tensor to fill."""
        return list(self._aliases)

    def aliases(self, name: str) -> list[str]:
        """All names of the tensor that is filled under `name`."""
        return self._aliases[name]

    def tensor(self, name: str) -> Tensor:
        """The meta tensor to fill."""
        return self._pending[self._aliases[name][0]]

    def allocate(self, name: str) -> tuple[Tensor, Box]:
        """Uninitialised memory for this rank's part, and which part that is."""
        tensor = self.tensor(name)
        box = local_box(tensor)
        shape = [sum(stop - start for start, stop in intervals) for intervals in box]
        return torch.empty(shape, dtype=tensor.dtype, device=self.device), box

    def fill(self, name: str, local: Tensor) -> None:
        """Put this rank's part in the model, under all its names."""
        old = self.tensor(name)
        new = from_local_like(local, old)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
        for alias in self._aliases.pop(name):
            table, attribute = self._homes[alias]
            table[attribute] = new

    def fill_from(self, name: str, whole: Tensor) -> None:
        """Put this rank's part of a whole value in the model; a layer that is quantized packs it first."""
        if name in self.quantized:
            layer = self.quantized[name]
            whole = pack(layer, whole.to(layer.unpacked[1]), self.device)
        local, box = self.allocate(name)
        _copy(local, box, whole, (0,) * len(box))
        self.fill(name, local)

    def finish(self) -> None:
        """Raise if tensors have not been filled."""
        if self._aliases:
            raise ValueError(
                f"materialize: no weights for {', '.join(sorted(self._aliases))}: the model has changed "
                "since load_pretrained or from_config built it."
            )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)


def _leave(model: PreTrainedModel, targets: _Targets) -> None:
    for name in targets.names():
        targets.fill(name, targets.allocate(name)[0])
    for layer in targets.quantized.values():
        leave_blank(layer, targets.device)
    targets.finish()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=targets.device)


def _draw(targets: _Targets, reference: PreTrainedModel, seed: int) -> None:
    initializer = Initializer(reference)
    for name in targets.names():
        targets.fill_from(name, initializer.draw(name, seed))


def _read(targets: _Targets, reference: PreTrainedModel, source: WeightSource) -> None:
    with source.open() as files:
        for name in targets.names():
            pieces = next((source.pieces[n] for n in (name, *targets.aliases(name)) if n in source.pieces), None)
            if pieces is not None and name in targets.quantized:
                # packed in blocks over the whole weight, so every rank reads it whole
                shape, dtype = targets.quantized[name].unpacked
                whole = torch.empty(shape, dtype=dtype)
                for piece in pieces:
                    _read_piece(whole, [[(0, size)] for size in shape], piece, files)
                targets.fill_from(name, whole)
            elif pieces is not None:
                local, box = targets.allocate(name)
                for piece in pieces:
                    _read_piece(local, box, piece, files)
                targets.fill(name, local)
        for conversion in source.conversions:
            stored = [(key, pattern, files.read(key, ())) for key, pattern in conversion.stored]
            made = hf.run_converter(conversion.converter, conversion.name, stored, reference)
            del stored
            for name in targets.names():
                value = next((made[n] for n in (name, *targets.aliases(name)) if n in made), None)
                if value is not None:
                    targets.fill_from(name, value)


def _overlaps(
    box: Box, offset: Iterable[int], extent: Iterable[int]
) -> Iterable[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Slices (of the shard, of the block) for each rectangle that a shard and a block at `offset` share."""
    by_dim = []
    for intervals, low, size in zip(box, offset, extent, strict=True):
        common, seen = [], 0
        for start, stop in intervals:
            a, b = max(start, low), min(stop, low + size)
            if a < b:
                common.append((slice(seen + a - start, seen + b - start), slice(a - low, b - low)))
            seen += stop - start
        by_dim.append(common)
    for pairs in itertools.product(*by_dim):
        yield tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


def _copy(local: Tensor, box: Box, block: Tensor, offset: tuple[int, ...]) -> None:
    for there, here in _overlaps(box, offset, block.shape):
        local[there].copy_(block[here])


def _read_piece(local: Tensor, box: Box, piece: Piece, files: OpenSource) -> None:
    for there, here in _overlaps(box, piece.offset, piece.extent):
        target = local[there]
        if piece.stacked is not None:
            here = here[: piece.stacked] + here[piece.stacked + 1 :]
            target = target.squeeze(piece.stacked)
        target.copy_(files.read(piece.key, here))
