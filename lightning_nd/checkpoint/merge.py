"""The stored weights of a model one at a time, with their low-rank pairs added: merging without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_nd.checkpoint import _transformers as hf
from lightning_nd.checkpoint.adapters import pairs_by_weight
from lightning_nd.checkpoint.source import Conversion, OpenSource, Piece, WeightSource


@contextmanager
def stored_weights(model: PreTrainedModel) -> Iterator[Callable[[str], Tensor]]:
    """A function from a parameter's plain name to its stored value, whole, read when it is asked for.

    Args:
        model: made by `load_pretrained`; what it has on meta stays there.
    """
    source = cast(WeightSource, cast(Any, model)._nd_source)
    ties = hf.tied_names(model)
    # what is converted together is asked for together: the results of the last conversion are kept
    made: dict[str, Tensor] = {}
    makes = {name: conversion for conversion in source.conversions for name in _made_by(conversion, source, model)}

    def read(name: str, files: OpenSource) -> Tensor:
        aliases = [name, *(a for a in ties if ties[a] == ties.get(name, name)), ties.get(name, name)]
        for alias in aliases:
            if alias in source.pieces:
                return _assemble(source.pieces[alias], files)
            if alias in makes:
                if alias not in made:
                    made.clear()
                    stored = [(key, pattern, files.read(key, ())) for key, pattern in makes[alias].stored]
                    made.update(hf.run_converter(makes[alias].converter, makes[alias].name, stored, model))
                return made[alias]
        raise KeyError(f"{source.path} has no weights for {name}")

    with source.open() as files:
        yield lambda name: read(name, files)


@contextmanager
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[dict[str, Tensor], Callable[[str], Tensor]]]:
    """The parameters of a model without its pairs (on meta), and a function that gives the merged value of each.

    Args:
        model: made by `load_pretrained` and `add_adapters`, with the pairs in memory and the rest on meta.
    """
    everything = {hf.clean_name(name): tensor for name, tensor in model.state_dict().items()}
    pairs = pairs_by_weight(model)
    beside = {name for pair in pairs.values() for name in (pair.first, pair.second)}
    with stored_weights(model) as stored:

        def merged(name: str) -> Tensor:
            value = stored(name)
            return pairs[name].merge(value, everything) if name in pairs else value

        yield {name: tensor for name, tensor in everything.items() if name not in beside}, merged


def _made_by(conversion: Conversion, source: WeightSource, model: PreTrainedModel) -> list[str]:
    empty = [(key, word, torch.empty(source.stored[key].shape, device="meta")) for key, word in conversion.stored]
    return list(hf.run_converter(conversion.converter, conversion.name, empty, model))


def _assemble(pieces: tuple[Piece, ...], files: OpenSource) -> Tensor:
    if len(pieces) == 1 and pieces[0].stacked is None:
        return files.read(pieces[0].key, ())
    shape = [max(p.offset[dim] + p.extent[dim] for p in pieces) for dim in range(len(pieces[0].offset))]
    whole = torch.empty(shape, dtype=files.source.stored[pieces[0].key].dtype)
    for piece in pieces:
        view = whole
        for dim, (start, length) in enumerate(zip(piece.offset, piece.extent, strict=True)):
            view = view.narrow(dim, start, length)
        view = view if piece.stacked is None else view.squeeze(piece.stacked)
        view.copy_(files.read(piece.key, ()))
    return whole
