"""Which style every module and bare parameter of a model gets by a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_nd.parallelize.adapters import inner_styles, is_adapter
from lightning_nd.parallelize.styles import STYLES, Style


@dataclass
class Assignment:
    """The style of every planned module and bare parameter, by full name."""

    modules: dict[str, Style] = field(default_factory=dict)
    parameters: dict[str, Style] = field(default_factory=dict)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(r"[^.]+".join(re.escape(part) for part in name.split("*")))


def assign(model: nn.Module, plan: Mapping[str, str]) -> Assignment:
    """Find what each name of the plan stands for.

    Raises:
        ValueError: if a name of a user's plan matches nothing. (Families list names that only some sizes have.)
    """
    assignment = Assignment()
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        match = _pattern(pattern).fullmatch
        hit_modules = [name for name in names if match(name)]
        hit_parameters = [name for name in parameters if match(name)]
        assignment.modules.update(dict.fromkeys(hit_modules, STYLES[style]))
        assignment.parameters.update(dict.fromkeys(hit_parameters, STYLES[style]))
        if not hit_modules and not hit_parameters and getattr(model, "tp_plan", None) is None:
            raise ValueError(
                f"NDStrategy: {pattern!r} of tp_plan matches no module or parameter of {type(model).__name__}."
                " Names are relative to the model, '*' stands for one part between dots."
            )
    _split_vocabulary(model, assignment)
    _split_adapters(model, assignment)
    return assignment


def _split_adapters(model: nn.Module, assignment: Assignment) -> None:
    modules = dict(model.named_modules())
    for name, style in list(assignment.modules.items()):
        if is_adapter(modules[name]):
            assignment.modules.update(inner_styles(name, modules[name], style))


def _split_vocabulary(model: nn.Module, assignment: Assignment) -> None:
    """Split the input embedding by rows where the head is split by rows: they may be tied, and it is as large."""
    get_input, get_output = (getattr(model, f"get_{kind}_embeddings", None) for kind in ("input", "output"))
    if get_input is None or get_output is None:
        return
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = names.get(id(get_input())), names.get(id(get_output()))
    if embedding is None or embedding in assignment.modules or head not in assignment.modules:
        return
    if isinstance(get_input(), nn.Embedding):
        assignment.modules[embedding] = STYLES["embedding_rowwise"]
