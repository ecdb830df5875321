"""Steps of one rank, counted by phase; and which blocks of a deep model need to be played."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

PHASES = ("forward", "backward", "optimizer")
T = TypeVar("T")


@dataclass(frozen=True)
class Simulation:
    """What one rank held and sent in its second step, when optimizer state exists.

    Attributes:
        peaks: live bytes by phase.
        traffic: by ``"axis collective"``: calls and bytes of their whole messages.
        seconds: that it took.
        layers: blocks that were played; fewer than ``depth`` were extrapolated.
        depth: blocks of the model.
        sizes: numbers of parameters: of the whole model, ``trained`` and ``local`` ones.
        tokens: of a micro-batch that the rank computes with (under cp its part of each row).
    """

    peaks: dict[str, float]
    traffic: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    layers: int = 0
    depth: int = 0
    sizes: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def peak(self) -> float:
        """The largest of all phases."""
        return max(self.peaks.values())


def count(
    fake: Any, meshes: Any, held: Iterable[Any], step: Callable[[Callable[..., None]], None], steps: int = 2
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Peaks by phase and traffic of the last of ``steps``.

    Args:
        fake: mode of the tensors; None for real ones, which nobody watches: autograd adds up gradients in place then.
        meshes: whose groups name the traffic.
        held: tensors that are there before.
        step: plays one; it is given a function that is to be told each phase, and how many times the phase would
            come in a whole step.
    """
    from lightning_nd.planner.tracker import LiveStorages, Traffic

    if fake is None:
        for _ in range(steps):
            step(lambda name, times=1: None)
        return dict.fromkeys(PHASES, 0.0), {}
    live, traffic = LiveStorages(fake), Traffic(axes_of(meshes))

    def phase(name: str, times: int = 1) -> None:
        live.phase, traffic.times = name, times

    with fake:
        live.add(held)
        for _ in range(steps):
            live.peaks.clear()
            traffic.found.clear()
            with live, traffic:
                step(phase)
    found = {" ".join(key): [float(v) for v in value] for key, value in traffic.found.items()}
    return {phase: float(live.peaks[phase]) for phase in PHASES}, found


def axes_of(meshes: Any) -> dict[str, str]:
    """The axis of every group by its name."""
    named = {"cp": meshes.cp, "tp": meshes.tp, "loss": meshes.loss, "data": meshes.data}
    axes = {mesh.get_group().group_name: name for name, mesh in named.items()}
    groups = meshes.fsdp.get_all_groups()
    names = ["dp_shard"] if len(groups) == 1 else ["dp_replicate", "dp_shard"]
    axes.update({group.group_name: name for group, name in zip(groups, names, strict=True)})
    return axes


# -- depth ------------------------------------------------------------------------------------------------------------


def depths(kinds: Sequence[Any]) -> tuple[int, int] | None:
    """At which two depths a model is played in place of its own; None if it is not deeper.

    Blocks repeat with some period from some block on (the first blocks of a mixture of experts may be dense). Every
    further period adds the same to every phase, so a model with two periods and one with four tell of all.

    Args:
        kinds: what tells blocks apart, block by block.
    """
    found: tuple[int, int] | None = None
    for lead in range(min(len(kinds), 4)):
        for period in range(1, (len(kinds) - lead) // 4 + 1):
            if all(kinds[i] == kinds[i + period] for i in range(lead, len(kinds) - period)):
                few = lead + (len(kinds) - lead) % period + 2 * period
                if few + 2 * period < len(kinds) and (found is None or few + 2 * period < found[1]):
                    found = few, few + 2 * period
                break
    return found


def extrapolate(few: Simulation, more: Simulation) -> Simulation:
    """The whole model's numbers from those of two depths."""
    share = (more.depth - more.layers) / (more.layers - few.layers)

    def whole(low: float, high: float) -> float:
        return high + share * (high - low)

    traffic = {
        key: [whole(low, high) for low, high in zip(few.traffic.get(key, [0.0, 0.0]), values, strict=True)]
        for key, values in more.traffic.items()
    }
    return replace(
        more,
        peaks={phase: whole(few.peaks[phase], peak) for phase, peak in more.peaks.items()},
        traffic=traffic,
        sizes={key: whole(few.sizes[key], value) for key, value in more.sizes.items()},
        seconds=max(few.seconds, more.seconds),
    )


def kinds_of(model: nn.Module) -> list[Any]:
    """What tells the blocks of a transformers model apart; empty where blocks cannot be left out."""
    from transformers import PreTrainedModel

    from lightning_nd.parallelize.blocks import block_list, find_blocks

    if not isinstance(model, PreTrainedModel):
        return []
    config: Any = model.config.get_text_config()
    blocks = block_list(model)
    if blocks is None or getattr(config, "num_hidden_layers", 0) != len(find_blocks(model)):
        return []
    types = getattr(config, "layer_types", None) or [""] * len(blocks)
    return [
        (kind, type(block).__name__, *((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters()))
        for kind, block in zip(types, blocks, strict=True)
    ]


def cut(model: Any, layers: int) -> None:
    """Leave out all but the first blocks of a transformers model, in place."""
    from lightning_nd.parallelize.blocks import find_blocks

    name = find_blocks(model)[0][0].rpartition(".")[0]
    held = model.get_submodule(name)
    model.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], held[:layers])
    config = model.config.get_text_config()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
