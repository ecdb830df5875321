"""Where a meta model's weights come from: a safetensors folder and how its tensors map to parameters."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from lightning_nd.checkpoint import _transformers as hf

_SAMPLE = 1 << 20

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Piece:
    """Where a stored tensor lies in a parameter: first index and extent in each of the parameter's dims."""

    key: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    stacked: int | None
    """The parameter's dim along which pieces are stacked; the stored tensor lacks it."""


@dataclass(frozen=True)
class Conversion:
    """Parameters that must be converted from whole stored tensors."""

    converter: Any
    name: str
    stored: tuple[tuple[str, str], ...]
    """(key, pattern of the converter that matched it)"""


@dataclass(frozen=True)
class WeightSource:
    """A folder of safetensors, checked against the model that `load_pretrained` built.

    `pieces` says for each parameter or persistent buffer which stored tensors fill it; those not in it are
    made by one of `conversions`. `dtypes` are the dtypes in which they are stored.
    """

    path: str
    stored: dict[str, Stored]
    pieces: dict[str, tuple[Piece, ...]]
    conversions: tuple[Conversion, ...]
    dtypes: dict[str, torch.dtype]

    def fingerprint(self) -> str:
        """A digest of names, sizes, headers and ends of the files: other weights give another one."""
        digest = hashlib.sha256()
        for file in sorted({stored.file for stored in self.stored.values()}):
            with Path(self.path, file).open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                digest.update(f"{file} {size}".encode())
                for start in (0, max(0, size // 2), max(0, size - _SAMPLE)):
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLE))
        return digest.hexdigest()[:16]

    @contextmanager
    def open(self) -> Iterator[OpenSource]:
        """The files as memory maps: what is read from them is a view of the page cache, not a copy."""
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(Path(self.path, file), framework="pt"))
                for file in sorted({s.file for s in self.stored.values()})
            }
            yield OpenSource(self, files)


@dataclass(frozen=True)
class OpenSource:
    """A source whose files are open."""

    source: WeightSource
    files: dict[str, Any]

    def read(self, key: str, index: tuple[slice, ...]) -> Tensor:
        """The part of a stored tensor that `index` selects; `()` reads all of it."""
        file = self.files[self.source.stored[key].file]
        return file.get_slice(key)[index] if index else file.get_tensor(key)


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the model in `folder`.

    Raises:
        FileNotFoundError: no safetensors, or files missing that the index names.
        ValueError: the folder holds an adapter and not a model.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if absent := [f for f in files if not (folder / f).is_file()]:
            raise FileNotFoundError(
                f"{index} names {len(files)} files, of which these are missing: {', '.join(absent)}."
            )
        return files
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter (adapter_config.json), not a model. Merge it into its base model "
            "with peft's merge_and_unload() and save that, or give the path of the base model."
        )
    present = sorted(p.name for p in folder.iterdir())
    raise FileNotFoundError(
        f"No model.safetensors or model.safetensors.index.json in {folder}, which holds "
        f"{present or 'nothing'}. Only safetensors weights are read; convert others with transformers: "
        "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)."
    )


def read_source(folder: Path, model: PreTrainedModel) -> WeightSource:
    """Map what `folder` stores to the parameters of `model`, reading headers only.

    Args:
        folder: a model folder with safetensors files.
        model: unsharded, on meta.

    Raises:
        ValueError: parameters without weights, weights without parameters, shapes that differ; all named.
    """
    stored: dict[str, Stored] = {}
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(key)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(f"{folder / name}: {key} has the unsupported dtype {part.get_dtype()}.")
                stored[key] = Stored(name, tuple(part.get_shape()), DTYPES[part.get_dtype()])
    return _Mapping(folder, stored, model).source()


class _Mapping:
    """Builds a `WeightSource` and collects everything that does not fit."""

    def __init__(self, folder: Path, stored: dict[str, Stored], model: PreTrainedModel) -> None:
        self.folder, self.stored, self.model = folder, stored, model
        self.expected: dict[str, Tensor] = model.state_dict()
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        self.conversions: list[Conversion] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self.made: set[str] = set()
        self.unexpected: set[str] = set()
        self.mismatched: list[str] = []

    def source(self) -> WeightSource:
        rules = hf.conversions_of(self.model)
        groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for key in hf.natural_order(self.stored):
            name, converter, pattern = hf.target_of(key, rules, self.model, self.expected)
            if name not in self.expected:
                self.unexpected.add(name)
            elif converter is None:
                self._add(name, key)
            else:
                groups.setdefault(name, (converter, []))[1].append((key, pattern))
        for name, (converter, members) in groups.items():
            self._convert(name, converter, members)
        self._check()
        # As transformers does: what was used on the way in is reverted on the way out.
        cast(Any, self.model)._weight_conversions = [rule for rule in rules if rule.was_used()]
        return WeightSource(str(self.folder), self.stored, self.pieces, tuple(self.conversions), self.dtypes)

    def _add(self, name: str, key: str) -> None:
        shape = self.stored[key].shape
        if self._fits(name, shape, key):
            self.pieces[name] = (Piece(key, (0,) * len(shape), shape, None),)
        self._note(name, key)

    def _convert(self, name: str, converter: Any, members: list[tuple[str, str]]) -> None:
        key = members[0][0]
        empty = [(k, p, torch.empty(self.stored[k].shape, device="meta")) for k, p in members]
        try:
            made = hf.run_converter(converter, name, empty, self.model)
        except Exception as error:
            self.mismatched.append(f"{name}: cannot be made from {', '.join(k for k, _ in members)}: {error}")
            self.made.add(name)
            return
        fits = []
        for target, tensor in made.items():
            if target not in self.expected:
                self.unexpected.add(target)
                continue
            fits.append(self._fits(target, tuple(tensor.shape), key))
            self._note(target, key)
        if not all(fits):
            return
        pieces = self._side_by_side(converter, members)
        if pieces is None:
            self.conversions.append(Conversion(converter, name, tuple(members)))
        else:
            self.pieces[name] = pieces

    def _side_by_side(self, converter: Any, members: list[tuple[str, str]]) -> tuple[Piece, ...] | None:
        dims = hf.stack_and_concatenate(converter)
        if dims is None:
            return None
        stack, concatenate = dims
        pieces: list[Piece] = []
        along = 0
        for pattern in converter.source_patterns:
            for index, key in enumerate(k for k, p in members if p == pattern):
                extent = list(self.stored[key].shape)
                if stack is not None:
                    extent.insert(stack, 1)
                offset = [0] * len(extent)
                if concatenate is not None:
                    offset[concatenate] = along
                if stack is not None:
                    offset[stack] = index
                else:
                    along += extent[concatenate or 0]
                pieces.append(Piece(key, tuple(offset), tuple(extent), stack))
            if stack is not None and concatenate is not None:
                along += pieces[-1].extent[concatenate]
        return tuple(pieces)

    def _fits(self, name: str, shape: tuple[int, ...], key: str) -> bool:
        wanted = tuple(self.expected[name].shape)
        if shape != wanted:
            self.mismatched.append(f"{name}: {list(shape)} stored ({key}), {list(wanted)} in the model")
        return shape == wanted

    def _note(self, name: str, key: str) -> None:
        self.made.add(name)
        self.dtypes[name] = self.stored[key].dtype

    def _check(self) -> None:
        ties = hf.tied_names(self.model)
        for name, origin in ties.items():
            if name in self.made and origin in self.made:
                self._check_equal(name, origin)
        tied = {n for a, b in ties.items() if a in self.made or b in self.made for n in (a, b)}
        # A tie with several names is explained by any of them.
        tied |= {a for a, b in ties.items() if b in tied}
        for name, origin in ties.items():
            if dtype := self.dtypes.get(origin, self.dtypes.get(name)):
                self.dtypes |= {name: dtype, origin: dtype}
        missing = sorted(set(self.expected) - self.made - tied)
        unexpected = sorted(self.unexpected - hf.ignorable(self.model, self.unexpected))
        problems = []
        if missing:
            problems.append(f"the model has, the folder does not: {_listing(missing)}")
        if unexpected:
            problems.append(f"the folder has, the model does not: {_listing(unexpected)}")
        if self.mismatched:
            problems.append(f"shapes differ: {_listing(self.mismatched)}")
        if problems:
            raise ValueError(
                f"The weights in {self.folder} do not fit {type(self.model).__name__} as config.json (with "
                f"the overrides given) describes it: {'; '.join(problems)}. Nothing is initialised or dropped "
                "silently: correct config.json or the overrides, or re-save the folder with transformers."
            )

    def _check_equal(self, name: str, origin: str) -> None:
        if name not in self.pieces or origin not in self.pieces:
            return
        (first,), (second,) = self.pieces[name], self.pieces[origin]
        source = WeightSource(str(self.folder), self.stored, {}, (), {})
        with source.open() as files:
            equal = torch.equal(files.read(first.key, ()), files.read(second.key, ()))
        if not equal:
            raise ValueError(
                f"{self.folder}: config.json ties {name} to {origin}, but the folder stores different values "
                "for them. Pass tie_word_embeddings=False to load both, or delete one from the folder."
            )


def _listing(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
