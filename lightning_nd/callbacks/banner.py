"""The start of a fit in a few lines: which rank is where, and what it is going to hold."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_nd.mesh import ParallelDims

_LINES = 8  # of a layout that is larger the middle is left out


class StartBanner(Callback):
    """Logs the layout of the ranks over the nodes and the planned memory of a rank, once, when a fit starts.

    The memory is the planner's closed form for rows as long as ``max_length``; it knows `CausalLM` with
    `ChatDataModule`, and for others the line is left out.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        dims = getattr(trainer.strategy, "dims", None)
        if not trainer.is_global_zero or dims is None:
            return
        words = draw_layout(dims, trainer.num_devices)
        if (plan := _memory(pl_module)) is not None:
            words += f"\nPlanned memory of a rank: {plan}"
        rank_zero_info(words)


def _memory(module: LightningModule) -> str | None:
    from lightning_nd.planner.of_run import describe_memory, facts_of_run

    try:
        facts = facts_of_run(module)
        if facts is None:
            return None
        cuda = module.device.type == "cuda"
        total = torch.cuda.get_device_properties(module.device).total_memory if cuda else None
        return describe_memory(facts, total)
    except Exception:  # a picture is no reason to stop a run
        return None


def draw_layout(dims: ParallelDims, per_node: int) -> str:
    """Which ranks share what: a line a data rank (without ``cp`` and ``tp`` a replica), ``tp`` ranks side by side.

    Args:
        dims: the degrees.
        per_node: ranks of a node.
    """
    nodes = -(-dims.world_size // per_node)
    where = f"{nodes} nodes of {per_node}" if nodes > 1 else "one node"
    degrees = " × ".join(f"{axis}={degree}" for axis, degree in dims.as_dict().items() if degree > 1)
    title = f"Layout: {degrees}, {dims.world_size} ranks on {where}"
    if dims.world_size == 1:
        return "Layout: one process"
    if dims.cp * dims.tp == 1 and dims.dp_replicate == 1:
        return f"{title}; every rank has a part of the parameters and reads rows of its own"
    if dims.cp * dims.tp == 1:  # a line a replica
        rows = [_row(dims, replica, dims.dp_shard, per_node, nodes > 1) for replica in range(dims.dp_replicate)]
    else:
        rows = [_row(dims, data, 1, per_node, nodes > 1) for data in range(dims.data)]
    if len(rows) > _LINES:
        left = len(rows) - _LINES + 1
        rows = [*rows[: _LINES - 2], [f"… {left} more"], rows[-1]]
    head = ["", *([f"cp {c}" for c in range(dims.cp)] if dims.cp > 1 else ["ranks"]), *(["node"] if nodes > 1 else [])]
    widths = [max(len(row[i]) for row in [head, *rows] if i < len(row)) for i in range(len(head))]
    lines = [
        "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in [head, *rows]
    ]
    shares = []
    if dims.tp > 1:
        shares.append(f"{dims.tp} neighbours share every layer (tp)")
    if dims.cp > 1:
        shares.append("a line shares its rows" if dims.tp > 1 else "a line shares every row (cp)")
    return "\n".join([title, *lines, *([f"  {'; '.join(shares)}"] if shares else [])])


def _row(dims: ParallelDims, number: int, shards: int, per_node: int, with_nodes: bool) -> list[str]:
    """A line: ``shards`` data ranks, of which ``number`` lines come before."""
    size = shards * dims.cp * dims.tp
    first = number * size
    replica, shard = divmod(number * shards, dims.dp_shard)
    names = [f"replica {replica}"] if dims.dp_replicate > 1 else []
    names += [f"shard {shard}"] if shards == 1 and (dims.dp_shard > 1 or not names) else []
    cells = [_ranks(first + c * dims.tp * shards, dims.tp * shards) for c in range(dims.cp)]
    low, high = first // per_node, (first + size - 1) // per_node
    node = [str(low) if low == high else f"{low}–{high}"] if with_nodes else []
    return [" ".join(names), *cells, *node]


def _ranks(first: int, count: int) -> str:
    return " ".join(map(str, range(first, first + count))) if count <= 4 else f"{first}–{first + count - 1}"
