"""From what a user names to what the search needs: a model's facts and what `fit` would refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize import check_tensor_parallel, roots
from lightning_nd.parallelize.context import check_context_parallel
from lightning_nd.planner.facts import facts_of, skeleton
from lightning_nd.planner.model import ModelFacts
from lightning_nd.planner.search import Refusal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_nd.recipes.lora import LoRA


def read_model_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The configuration behind a hub id, a model folder or a ``config.json``.

    Raises:
        ValueError: if there is none.
    """
    from lightning_nd.recipes.causal_lm import read_config, resolve_source

    if name.endswith(".json"):
        if not Path(name).expanduser().is_file():
            raise ValueError(f"model: there is no file {Path(name).expanduser().absolute()}.")
        return read_config(str(Path(name).expanduser()), **overrides)
    return read_config(resolve_source(name), **overrides)


def build(
    config: PretrainedConfig, precision: str, lora: LoRA | None = None, *, weights: bool = False
) -> PreTrainedModel:
    """The model on meta with pairs beside its layers if asked, in the dtype in which it computes.

    Args:
        config: of the model.
        precision: of the Trainer.
        lora: the pairs.
        weights: in the dtype in which the optimizer sees the weights instead.
    """
    wide = precision == "32-true" or (weights and precision == "bf16-mixed" and lora is None)
    model = skeleton(config, torch.float32 if wide else torch.bfloat16)
    if lora is not None:
        from lightning_nd.checkpoint.adapters import add_adapters

        add_adapters(model, lora.config(), layers=lora.layers)
        if not weights:  # pairs are float32, and computed with in the dtype of compute
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.float32 if wide else torch.bfloat16)
    return model


def ask(config: PretrainedConfig, name: str, precision: str, lora: LoRA | None = None) -> tuple[ModelFacts, Refusal]:
    """A model's facts, and the checks that `fit` makes of it before it starts.

    Raises:
        ValueError: if the model cannot be counted.
    """
    model = build(config, precision, lora)
    if precision == "32-true" and any(p.dim() == 3 for p in model.parameters()):
        # grouped products exist in bf16 only, on meta too: count so, and twice the bytes
        facts = facts_of(build(config, "bf16-true", lora), name)
        blocks = tuple(
            replace(
                b,
                saved=b.saved + b.saved,
                kept=b.kept + b.kept,
                traffic=b.traffic + b.traffic,
                working=b.working.doubled(),
            )
            for b in facts.blocks
        )
        return replace(facts, blocks=blocks, tail=facts.tail.doubled(), width=4), refusals(model)
    return facts_of(model, name), refusals(model)


def refusals(model: PreTrainedModel) -> Refusal:
    """Why `fit` would refuse a layout of this model: its own checks, each asked once a degree."""
    by_tp: dict[int, str | None] = {}
    by_cp: dict[bool, str | None] = {}
    by_data: dict[bool, str | None] = {}

    def refusal(dims: ParallelDims) -> str | None:
        many = dims.data * dims.cp > 1
        if dims.tp not in by_tp:
            by_tp[dims.tp] = _words(check_tensor_parallel, model, "auto", dims.tp)
        if (dims.cp > 1) not in by_cp:
            by_cp[dims.cp > 1] = _words(check_context_parallel, model) if dims.cp > 1 else None
        if many not in by_data:
            by_data[many] = _words(roots.check_objective, model, dims) if roots.is_causal_lm(model) else None
        return by_tp[dims.tp] or by_cp[dims.cp > 1] or by_data[many]

    return refusal


def _words(check: Any, *args: Any) -> str | None:
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return None
