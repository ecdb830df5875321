"""What is known to be wrong before processes start and weights load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from lightning_nd.callbacks.foreign import check_callbacks
from lightning_nd.mesh import ParallelDims
from lightning_nd.parallelize import TPPlan, check_tensor_parallel, roots
from lightning_nd.parallelize.context import check_context_parallel

if TYPE_CHECKING:
    import lightning.pytorch as pl


def preflight(
    trainer: pl.Trainer,
    data: pl.LightningDataModule | None,
    dims: ParallelDims,
    tp_plan: TPPlan | Literal["auto"] = "auto",
    by_document: bool = False,
) -> None:
    """Refuse a Trainer, a model and data that cannot run on this layout.

    A LightningModule with a method ``preflight(data)`` is asked first. Looks at the models that it has made in
    ``__init__``, and at those that its method ``skeleton()`` returns (a meta model of what `configure_model` will
    load), if it has one. A data module with a method ``preflight(stage)`` checks its sources. The same checks are made
    again by every rank; here they come seconds earlier, and once.

    Raises:
        ValueError: naming what was given, what is allowed, and what to change.
    """
    accumulate = trainer.accumulate_grad_batches
    if accumulate < 1:
        raise ValueError(f"Trainer: accumulate_grad_batches is {accumulate}; it must be at least 1.")
    check_callbacks(trainer, dims.tp * dims.cp)
    module: Any = trainer.strategy.lightning_module
    if callable(check := getattr(module, "preflight", None)):
        check(data)
    skeleton = getattr(module, "skeleton", None)
    models: list[nn.Module] = [skeleton()] if callable(skeleton) else roots.find_roots(module, dims.tp)
    for model in models:
        try:
            check_tensor_parallel(model, tp_plan, dims.tp)
        except ValueError as error:
            if len(models) == 1:
                raise
            name = next(name for name, child in module.named_modules() if child is model)
            raise ValueError(f"{type(module).__name__}.{name}: {error}") from None
        if by_document:
            check_context_parallel(model)
        if roots.is_causal_lm(model):
            roots.check_objective(model, dims)
    if data is not None and callable(check := getattr(data, "preflight", None)):
        data.trainer = trainer
        assert trainer.state.fn is not None
        check(trainer.state.fn.value)
