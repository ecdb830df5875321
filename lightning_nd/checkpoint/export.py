"""From a sharded model to a plain Hugging Face folder, one parameter in memory at a time."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_nd.checkpoint import _transformers as hf
from lightning_nd.checkpoint.adapters import pairs_by_weight
from lightning_nd.checkpoint.shards import gather_full
from lightning_nd.checkpoint.source import DTYPES, WeightSource

T = TypeVar("T")

_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OURS = (".json", ".safetensors", ".jinja", ".model", ".txt", ".py", ".md")


def save_pretrained(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model, sharded or not, as the folder that plain transformers would write; low-rank pairs are merged.

    Collective: every rank calls it, and every rank raises if rank 0 cannot write. Parameters are gathered one at a
    time and streamed to disk by rank 0, which never holds more than one (a group of experts counts as one). The
    folder is written beside `directory` and renamed when it is complete and its headers have been read back.

    Args:
        model: transformers model with all weights in memory (nothing on meta).
        directory: where the folder goes; made if it does not exist.
        dtype: dtype of all floating weights. None: the dtype in which each was stored if `load_pretrained` read it
            (float32 master weights of a bfloat16 model come back as bfloat16), else the dtype in memory.
        max_shard_size: of a safetensors file: bytes, or such as "5GB".
        tokenizer: written beside the weights, with its chat template.
        overwrite: replace `directory` if it is not empty; only a folder that looks like a model is replaced.

    Raises:
        FileExistsError: `directory` is not empty and may not be replaced.
        RuntimeError: weights on meta, ties that have come undone, or rank 0 failed to write.
    """
    target = Path(directory).expanduser().absolute()
    _check_exportable(model)
    with patience() as group:
        _save(model, target, dtype, max_shard_size, tokenizer, overwrite, group)


def _save(
    model: PreTrainedModel,
    target: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    tokenizer: PreTrainedTokenizerBase | None,
    overwrite: bool,
    waiting: dist.ProcessGroup | None,
) -> None:
    on_rank_zero(lambda: check_target(target, overwrite), waiting)
    # state_dict() also makes FSDP2 put parameters that it still holds gathered back into shards.
    whole_state = {hf.clean_name(name): tensor for name, tensor in model.state_dict().items()}
    pairs = pairs_by_weight(model)
    beside = {name for pair in pairs.values() for name in (pair.first, pair.second)}
    state = {name: tensor for name, tensor in whole_state.items() if name not in beside}
    plan = _Plan(model, state, dtype, max_shard_size)

    def whole(name: str) -> Tensor:
        full = gather_full(state[name])
        return pairs[name].merge(full, whole_state) if name in pairs else full

    folder = on_rank_zero(lambda: staging(target), waiting)
    try:
        _stream(plan, whole, folder, waiting)
        on_rank_zero(lambda: _finish(plan, model, folder, target, tokenizer), waiting)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def patience() -> Iterator[dist.ProcessGroup | None]:
    """A group in which ranks wait for rank 0's disk, however short the timeout of the others is."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def on_rank_zero(action: Callable[[], T], waiting: dist.ProcessGroup | None = None) -> T | None:
    """Run `action` on rank 0 only; what it raises is raised on every rank. The others wait in the group given."""
    result, failure = None, None
    if _rank() == 0:
        try:
            result = action()
        except Exception as error:
            failure = error
    _agree(failure, waiting)
    return result


def _agree(failure: Exception | None, waiting: dist.ProcessGroup | None) -> None:
    """Raise rank 0's failure on every rank."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        message = [None if failure is None else (type(failure).__name__, str(failure))]
        dist.broadcast_object_list(message, src=0, group=waiting)
        if failure is None and message[0] is not None:
            name, text = message[0]
            kind = {"FileExistsError": FileExistsError}.get(name, RuntimeError)
            raise kind(text if kind is FileExistsError else f"save_pretrained: rank 0 failed with {name}: {text}")
    if failure is not None:
        raise failure


def _check_exportable(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained needs a transformers model, got {type(model).__name__}. Give the model itself, not the "
            "module that wraps it; merge adapters first."
        )
    named = {hf.clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    if meta := [n for n, p in named.items() if p.is_meta]:
        raise RuntimeError(
            f"save_pretrained: {meta[0]} and {len(meta) - 1} others are on meta: call materialize first."
        )
    for name, origin in hf.tied_names(model).items():
        if name in named and origin in named and named[name] is not named[origin]:
            raise RuntimeError(
                f"save_pretrained: the config ties {name} to {origin}, but they are two parameters: writing one would "
                "lose the other. Tie them (model.tie_weights()) before training, or set tie_word_embeddings=False."
            )


def check_target(target: Path, overwrite: bool, marker: str = "config.json") -> None:
    """Refuse to replace what is not a folder of ours, which is known by a file named `marker`.

    Raises:
        FileExistsError: with what is there.
    """
    if target.is_file():
        raise FileExistsError(f"{target} is a file; give a folder.")
    if not target.is_dir() or not (present := sorted(target.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(
            f"{target} is not empty. Give another folder, or overwrite=True (--overwrite) to replace it."
        )
    foreign = [p.name for p in present if p.is_dir() or p.suffix not in _OURS]
    if foreign or not (target / marker).is_file():
        raise FileExistsError(
            f"{target} is not replaced, because it is not a model folder only: it holds "
            f"{', '.join(foreign[:5] or [p.name for p in present[:5]])}. Give another folder."
        )


def staging(target: Path) -> Path:
    """An empty folder beside `target`, to be filled and then published."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.writing-", dir=target.parent))


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes go."""

    file: str
    offset: int
    tensor: Tensor
    """on meta: shape and dtype"""


class _Plan:
    """What will be written, worked out on meta: the same on every rank."""

    def __init__(
        self, model: PreTrainedModel, state: dict[str, Tensor], dtype: torch.dtype | None, max_shard_size: int | str
    ) -> None:
        self.reference = hf.meta_copy(model, dtype=torch.float32)
        self.dtypes = _dtypes(model, self.reference, state, dtype)
        skip = set(self.reference._keys_to_ignore_on_save or ()) | set(hf.tied_names(self.reference))
        names = [name for name in state if name not in skip]
        self.groups = hf.export_groups(self.reference, names)
        written: dict[str, Tensor] = {}
        for group in self.groups:
            empty = {n: torch.empty(state[n].shape, dtype=self.dtypes[n], device="meta") for n in group}
            made = hf.to_stored_format(self.reference, empty)
            if again := set(made) & set(written):
                raise RuntimeError(f"save_pretrained: {sorted(again)} would be written twice.")
            written |= made
        split = split_torch_state_dict_into_shards(written, max_shard_size=max_shard_size)
        self.headers: dict[str, bytes] = {}
        self.places: dict[str, _Place] = {}
        self.sizes: dict[str, int] = {}
        for file, keys in split.filename_to_tensors.items():
            self._lay_out(file, {key: written[key] for key in keys})
        if missing := set(written) - set(self.places):
            raise RuntimeError(f"save_pretrained: no file for {sorted(missing)}.")
        self.index = None
        if split.is_sharded:
            self.index = {
                "metadata": {"total_parameters": sum(t.numel() for t in written.values()), **split.metadata},
                "weight_map": {key: place.file for key, place in self.places.items()},
            }

    def _lay_out(self, file: str, tensors: dict[str, Tensor]) -> None:
        """The header of a safetensors file and the offsets in it, wide dtypes first to keep all aligned.

        Format: https://github.com/huggingface/safetensors#format
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        ends = {}
        for key in sorted(tensors, key=lambda k: (-tensors[k].element_size(), k)):
            tensor = tensors[key]
            ends[key] = (offset, offset + tensor.numel() * tensor.element_size())
            name = _DTYPE_NAMES[tensor.dtype]
            header[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": list(ends[key])}
            offset = ends[key][1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.headers[file] = len(text).to_bytes(8, "little") + text
        self.sizes[file] = len(self.headers[file]) + offset
        for key, (start, _) in ends.items():
            self.places[key] = _Place(file, len(self.headers[file]) + start, tensors[key])


def _dtypes(
    model: PreTrainedModel, reference: PreTrainedModel, state: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype in which each parameter is written."""
    source = getattr(model, "_nd_source", None)
    stored = source.dtypes if isinstance(source, WeightSource) else {}
    if dtype is None:
        return {
            name: stored.get(name, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
            for name, tensor in state.items()
        }
    wide = hf.fp32_names(reference, dtype, state)
    return {
        name: (torch.float32 if name in wide else dtype) if tensor.is_floating_point() else tensor.dtype
        for name, tensor in state.items()
    }


def _stream(
    plan: _Plan, whole_of: Callable[[str], Tensor], folder: Path | None, waiting: dist.ProcessGroup | None = None
) -> None:
    """Gather group after group; rank 0 writes each to its places in the files."""
    failure: Exception | None = None
    with ExitStack() as stack:
        files = on_rank_zero(lambda: _open(plan, folder, stack), waiting)
        for group in plan.groups:
            whole = {}
            for name in group:
                full = whole_of(name)
                if files is not None and failure is None:
                    whole[name] = full.to(device="cpu", dtype=plan.dtypes[name])
                del full
            if files is not None and failure is None:
                try:
                    _write(plan, hf.to_stored_format(plan.reference, whole), files)
                except Exception as error:
                    failure = error
            # Here, not in the next gathering, whose group may be impatient; and a full disk ends it for all.
            _agree(failure, waiting)
        on_rank_zero(stack.close, waiting)


def _open(plan: _Plan, folder: Path | None, stack: ExitStack) -> dict[str, BinaryIO]:
    assert folder is not None  # rank 0
    needed, free = sum(plan.sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"{needed / 1e9:.1f} GB are needed for the weights in {folder.parent}, {free / 1e9:.1f} GB are free."
        )
    files: dict[str, BinaryIO] = {}
    for file, header in plan.headers.items():
        files[file] = stack.enter_context((folder / file).open("wb"))
        files[file].write(header)
    return files


def _write(plan: _Plan, tensors: dict[str, Tensor], files: dict[str, BinaryIO]) -> None:
    for key, tensor in tensors.items():
        place = plan.places[key]
        if tensor.shape != place.tensor.shape or tensor.dtype != place.tensor.dtype:
            raise RuntimeError(f"{key} is {tensor.dtype} {list(tensor.shape)}, planned were {place.tensor}")
        files[place.file].seek(place.offset)
        files[place.file].write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _finish(
    plan: _Plan, model: PreTrainedModel, folder: Path | None, target: Path, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    assert folder is not None  # rank 0
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        (folder / _INDEX).write_text(text, encoding="utf-8")
    config = _config(plan, model)
    hf.copy_custom_code(model, os.fspath(folder), config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    _verify(plan, folder)
    publish(folder, target)


def publish(folder: Path, target: Path) -> None:
    """Give a finished folder its name, in the place of what had it."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)  # mkdtemp makes it private
    if target.is_dir():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
        target.rename(old / target.name)
        folder.rename(target)
        shutil.rmtree(old)
    else:
        folder.rename(target)


def _config(plan: _Plan, model: PreTrainedModel) -> PretrainedConfig:
    config = copy.deepcopy(model.config)
    sizes: dict[torch.dtype, int] = {}
    for place in plan.places.values():
        if place.tensor.is_floating_point():
            sizes[place.tensor.dtype] = sizes.get(place.tensor.dtype, 0) + place.tensor.numel()
    config.dtype = str(max(sizes, key=lambda d: sizes[d])).removeprefix("torch.")
    config.architectures = [hf.plain_class(model).__name__]
    return config


def _verify(plan: _Plan, folder: Path) -> None:
    """Read the headers back: what is on disk must be what was planned."""
    for file, header in plan.headers.items():
        wanted = {k: p.tensor for k, p in plan.places.items() if p.file == file}
        if (folder / file).stat().st_size != plan.sizes[file]:
            raise RuntimeError(f"{folder / file} has {(folder / file).stat().st_size} bytes, not {plan.sizes[file]}.")
        with safe_open(folder / file, framework="pt") as read:
            found = {k: (tuple(read.get_slice(k).get_shape()), read.get_slice(k).get_dtype()) for k in read.keys()}  # noqa: SIM118
        if found != {k: (tuple(t.shape), _DTYPE_NAMES[t.dtype]) for k, t in wanted.items()}:
            raise RuntimeError(f"{folder / file} does not read back as it was written ({len(header)} bytes of header).")
