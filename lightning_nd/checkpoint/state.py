"""The tensors of a run by name: model and optimizers, on any layout.

Names are those of the unwrapped module. Optimizer state is kept under the names of the parameters, as
``optimizer_<i>.state.<parameter>.<key>``; values that are no tensors over a parameter's shape (step counts), and the
hyperparameters of the groups, are small and go beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_nd.checkpoint.manifest import CheckpointError
from lightning_nd.checkpoint.pieces import Pieces
from lightning_nd.checkpoint.shards import gather_full

Named = dict[str, Tensor]
#: State of one optimizer: ``groups`` (hyperparameters and parameter names), ``sharded`` and ``small`` state.
OptimizerState = dict[str, Any]


def plain_name(name: str) -> str:
    """A name without what activation checkpointing and compiling add to it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def module_tensors(module: nn.Module) -> Named:
    """Parameters and persistent buffers by their plain names; shared ones under every name."""
    # state_dict() also makes FSDP2 put parameters that it still holds gathered back into shards.
    return {plain_name(name): t for name, t in module.state_dict().items() if isinstance(t, Tensor)}


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The plain name of each parameter, by its id; the first of several."""
    return {id(p): plain_name(name) for name, p in module.named_parameters()}


def without_aliases(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each shared tensor once, under its first name."""
    seen: set[Any] = set()
    kept = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (local.data_ptr(), tuple(local.shape)) if isinstance(local, Tensor) and local.numel() else id(tensor)
        if key not in seen:
            kept[name] = tensor
        seen.add(key)
    return kept


def pieces_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank writes of each: `Pieces` of sharded tensors; plain tensors are the same on all ranks."""
    return {name: Pieces.of(t) if isinstance(t, DTensor) else t for name, t in tensors.items()}


def gathered(tensors: Iterable[tuple[Any, Any]], keep: bool) -> dict[Any, Tensor]:
    """Whole tensors on the host, one after the other; collective. Empty where ``keep`` is False."""
    found = {}
    for name, tensor in tensors:
        whole = gather_full(tensor)
        if keep:
            found[name] = whole.detach().to("cpu", copy=not isinstance(tensor, DTensor))
        del whole
    return found


# -- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
    """The state of an optimizer by the names of its parameters; tensors are those in use, not copies."""
    sharded: dict[str, dict[str, Tensor]] = {}
    small: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        own = [names[id(p)] for p in group["params"]]
        groups.append({**{key: v for key, v in group.items() if key not in ("params", "param_names")}, "params": own})
        for name, parameter in zip(own, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                over = isinstance(value, Tensor) and (isinstance(value, DTensor) or value.numel() > 1)
                (sharded if over else small).setdefault(name, {})[key] = value
    return {"class": type(optimizer).__name__, "groups": groups, "sharded": sharded, "small": small}


def flat_optimizer(index: int, sharded: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Keys as they are in a checkpoint."""
    return {f"optimizer_{index}.state.{n}.{key}": t for n, state in sharded.items() for key, t in state.items()}


def flat(tensors: Mapping[str, Any], optimizers: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """What this rank writes of a model and the sharded states of its optimizers, as it goes into a checkpoint."""
    found: dict[str, Any] = {"state_dict": pieces_of(without_aliases(tensors))}
    for i, sharded in enumerate(optimizers):
        found |= flat_optimizer(i, {name: pieces_of(state) for name, state in sharded.items()})
    return found


def numbered(state: OptimizerState, sharded: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """As ``Optimizer.state_dict()`` has it: parameters are numbered through the groups."""
    number = {name: i for i, name in enumerate(n for group in state["groups"] for n in group["params"])}
    merged = {
        number[name]: {**sharded.get(name, {}), **state["small"].get(name, {})}
        for name in number
        if name in sharded or name in state["small"]
    }
    groups = [{**group, "params": [number[n] for n in group["params"]]} for group in state["groups"]]
    return {"state": merged, "param_groups": groups}


def named_optimizer(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> OptimizerState:
    """The way back from ``Optimizer.state_dict()``, with the names that the parameters have here, in their order."""
    here = [n for group in groups for n in group["params"]]
    there = [n for group in saved["param_groups"] for n in group["params"]]
    if len(here) != len(there):
        raise CheckpointError(
            f"The checkpoint's optimizer has {len(there)} parameters, the one of configure_optimizers {len(here)}."
        )
    name_of = dict(zip(there, here, strict=True))
    sharded: dict[str, dict[str, Any]] = {}
    small: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        for key, value in state.items():
            over = isinstance(value, Tensor) and value.numel() > 1
            (sharded if over else small).setdefault(name_of[number], {})[key] = value
    return {
        "class": None,
        "groups": [{**group, "params": [name_of[n] for n in group["params"]]} for group in saved["param_groups"]],
        "sharded": sharded,
        "small": small,
    }


def check_groups(
    index: int, saved: OptimizerState, optimizer: Optimizer, names: Mapping[int, str], more: str = ""
) -> None:
    """Refuse a state that another optimizer, or one over other parameters, has left.

    Args:
        index: of the optimizer.
        saved: its state in the checkpoint.
        optimizer: that of this run.
        names: of its parameters.
        more: what else is known to differ, for the message.

    Raises:
        CheckpointError: saying what differs.
    """
    instead = (
        " Resume with the optimizer of the saved run; or start a new run from its weights: lightning-nd export"
        " --checkpoint ..., then fit from that folder."
    )
    mine = type(optimizer).__name__
    if saved["class"] not in (None, mine):
        raise CheckpointError(
            f"The checkpoint holds the state of {saved['class']}, and configure_optimizers now makes {mine}: it cannot"
            f" go on from there.{instead}"
        )
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in saved["groups"]]
    if list(map(sorted, here)) != list(map(sorted, there)):
        a, b = {n for g in here for n in g}, {n for g in there for n in g}
        new, gone = sorted(a - b), sorted(b - a)
        words = "" if new or gone else f" they are in {len(here)} groups now and were in {len(there)}, or in others;"
        words += f" {len(new)} are new ({', '.join(new[:3])});" if new else ""
        words += f" {len(gone)} are gone ({', '.join(gone[:3])});" if gone else ""
        raise CheckpointError(
            f"optimizer {index} ({mine}) holds other parameters than the saved one:{words[:-1]}.{more} strict_loading"
            f"=False is for names that no optimizer holds.{instead}"
        )


def restore_optimizer(
    saved: OptimizerState,
    optimizer: Optimizer,
    names: Mapping[int, str],
    empty: Callable[[nn.Parameter, str, str], Any],
) -> dict[str, dict[str, Any]]:
    """Set groups and small state of an optimizer, and make room for the rest.

    Args:
        saved: ``sharded`` says which keys each parameter has.
        empty: given a parameter, its name and a key, the tensor to be filled.

    Returns:
        The new tensors, by the names of the parameters.
    """
    made: dict[str, dict[str, Any]] = {}
    of_name = {tuple(sorted(group["params"])): group for group in saved["groups"]}
    for group in optimizer.param_groups:
        own = [names[id(p)] for p in group["params"]]
        source = of_name[tuple(sorted(own))]
        group.update({key: value for key, value in source.items() if key not in ("params", "param_names")})
        for name, parameter in zip(own, group["params"], strict=True):
            state = {key: empty(parameter, name, key) for key in saved["sharded"].get(name, {})}
            made[name] = dict(state)
            for key, value in saved["small"].get(name, {}).items():
                state[key] = value.clone() if isinstance(value, Tensor) else value
            optimizer.state.pop(parameter, None)  # what it has gathered since
            if state:
                optimizer.state[parameter] = state
    return made


def like_parameter(parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor of a stored shape and dtype: laid out as the parameter, or whole on every rank."""
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        local = torch.empty(shape, dtype=dtype, device=parameter.device)
        mesh = parameter.device_mesh
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def stored_optimizer(index: int, stored: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The keys of an optimizer's sharded state in a checkpoint's metadata, by parameter."""
    prefix = f"optimizer_{index}.state."
    wanted = set(names)
    found: dict[str, dict[str, Any]] = {}
    for full, entry in stored.items():
        if full.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            name, _, key = full[len(prefix) :].rpartition(".")
            if name in wanted:
                found.setdefault(name, {})[key] = entry
    return found


# -- does it fit ------------------------------------------------------------------------------------------------------


def check_names(
    where: object, wanted: Named, stored: Mapping[str, torch.Size], strict: bool, more: str = ""
) -> dict[str, Tensor]:
    """The tensors of the module that the checkpoint has.

    A shared tensor is there if one of its names is.

    Args:
        where: the checkpoint, for the message.
        wanted: of the module.
        stored: shapes in the checkpoint.
        strict: refuse missing and unexpected names.
        more: what else is known to differ, for the message.

    Raises:
        CheckpointError: shapes that differ, and with ``strict`` names that are missing or have no place.
    """
    owners: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        owners.setdefault(local.data_ptr() if local.numel() else id(tensor), []).append(name)
    take: dict[str, Tensor] = {}
    missing: list[str] = []
    for shared in owners.values():
        present = [name for name in shared if name in stored]
        if present:
            take[present[0]] = wanted[present[0]]
        elif any(wanted[name].numel() for name in shared):
            missing.append(shared[0])
    shapes = [
        f"{n} is {list(stored[n])} there and {list(t.shape)} here" for n, t in take.items() if stored[n] != t.shape
    ]
    unexpected = sorted(set(stored) - set(wanted))
    problems = []
    if shapes:
        problems.append(f"shapes differ: {_some(shapes)}")
    if strict and missing:
        problems.append(f"the module has and the checkpoint lacks {_some(missing)}")
    if strict and unexpected:
        problems.append(f"the checkpoint has and the module lacks {_some(unexpected)}")
    if problems:
        hint = (
            " For missing or superfluous names that are not trained, set strict_loading=False on the module."
            if not shapes
            else ""
        )
        raise CheckpointError(f"{where} does not fit the module: {'; '.join(problems)}.{more}{hint}")
    return take


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
