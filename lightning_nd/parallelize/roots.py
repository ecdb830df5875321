"""What a LightningModule holds: the models that are parallelised as units, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_nd.loss.objective import check_router_loss
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize import is_parallelized, parallelized_part

if TYPE_CHECKING:
    import lightning.pytorch as pl


def find_roots(module: pl.LightningModule, tp: int) -> list[nn.Module]:
    """The models of a LightningModule that are still to be parallelised, each called as a whole.

    transformers models wherever they stand; else the direct children that hold parameters (elements of a `ModuleList`
    one by one, since a list is not called).

    Raises:
        TypeError: if the LightningModule owns parameters itself, or a child mixes a transformers model with others.
    """
    from transformers import PreTrainedModel

    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise TypeError(
            f"NDStrategy: {type(module).__name__} owns parameters itself ({', '.join(own)}). They would not be sharded,"
            " and their gradients would drift apart: Lightning does not call the module's forward. Move them into a"
            " submodule."
        )
    roots: list[nn.Module] = []

    def visit(child: nn.Module, name: str) -> None:
        if is_parallelized(child) or not any(True for _ in child.parameters()):
            return
        if isinstance(child, PreTrainedModel):
            if part := parallelized_part(child):
                raise TypeError(
                    f"NDStrategy: {name}.{part} has been parallelised, and the rest of {name}"
                    f" ({type(child).__name__}) has not. Call lightning_nd.parallelize on {name} itself."
                )
            roots.append(child)
        elif isinstance(child, nn.ModuleList | nn.ModuleDict):
            for key, element in child.named_children():
                visit(element, f"{name}.{key}")
        elif any(isinstance(m, PreTrainedModel) or is_parallelized(m) for m in child.modules()):
            direct = [n for n, _ in child.named_parameters(recurse=False)]
            if direct:
                raise TypeError(
                    f"NDStrategy: {name} ({type(child).__name__}) holds a model that is sharded by itself, and"
                    f" parameters of its own ({', '.join(direct)}). Move those into a submodule."
                )
            for key, element in child.named_children():
                visit(element, f"{name}.{key}")
        else:
            roots.append(child)

    for name, child in module.named_children():
        visit(child, name)
    return roots


def is_causal_lm(module: nn.Module) -> bool:
    """Whether a module is a transformers model that predicts the next token."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return False
    return type(module).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def check_objective(model: nn.Module, dims: ParallelDims) -> None:
    """Refuse an auxiliary loss that is no sum over tokens: each layout would give another number.

    Each forward looks again (`install_loss`): the model's call and its config may ask for it later.

    Raises:
        ValueError: for mixture-of-experts models that add their load-balancing loss, on several data ranks.
    """
    check_router_loss(model, dims.data * dims.cp)


def sync_metrics_over(module: nn.Module, group: ProcessGroup) -> None:
    """Let torchmetrics sync over the ranks that hold different tokens; over the world, tp peers would count again."""
    from torchmetrics import Metric

    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = group


def check_optimizers(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer that holds other tensors than the module (it would train nothing, silently), or cannot shard.

    Raises:
        RuntimeError: naming the optimizer.
        ValueError: for one that needs whole matrices.
    """
    known = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        if "adafactor" in type(optimizer).__name__.lower():
            raise ValueError(
                f"NDStrategy: {type(optimizer).__name__} takes means over the rows and columns of whole matrices, which"
                " it cannot do on shards. Use an optimizer that works element by element (AdamW, SGD, Lion)."
            )
        strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise RuntimeError(
                f"NDStrategy: {strangers} parameters of {type(optimizer).__name__} are not parameters of the model any"
                " more: the optimizer was made before the model was parallelised. Make it in configure_optimizers,"
                " from self.parameters()."
            )


def small_steps(optimizers: Iterable[Optimizer]) -> str | None:
    """Words for a learning rate at which bf16 weights would not move, if an optimizer has one.

    A bf16 number has 8 bits of mantissa: what changes a weight w by less than |w| · 2⁻⁹ is rounded away. A step of
    Adam is about the learning rate.
    """
    for optimizer in optimizers:
        if "adam" not in type(optimizer).__name__.lower():
            continue
        for group in optimizer.param_groups:
            rate = float(group.get("initial_lr", group["lr"]))
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if parameter.dtype != torch.bfloat16 or parameter.dim() < 2 or not local.numel():
                    continue
                size = float(local.detach().float().square().mean().sqrt())
                if rate < size / 512:
                    return (
                        f"NDStrategy: bf16 weights of size {size:.1e} round steps below {size / 512:.1e} away, and the"
                        f" learning rate is {rate:.1e}: most of them will not move. Use precision='bf16-mixed', which"
                        " keeps fp32 weights, or a higher learning rate."
                    )
                break
    return None


def describe(module: nn.Module, dims: ParallelDims) -> str:
    """One line for the log: layout and size."""
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    local = sum(_local_numel(p) for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    part = "" if trained == total else f", {trained:,} of them trained ({100 * trained / max(total, 1):.2f}%)"
    shard = f"{local:,} on rank 0 ({100 * local / max(total, 1):.1f}%)"
    return f"NDStrategy: {dims}; {total:,} parameters{part}, {shard}"


def _local_numel(parameter: Any) -> int:
    return int(parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel())
