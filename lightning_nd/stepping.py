"""One optimizer step of the strategy: forward and backward passes, gradients over the ranks, norms and clipping."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_nd import gradients
from lightning_nd.checkpoint.strategy import CheckpointedStrategy
from lightning_nd.faults import Progress
from lightning_nd.loss import TokenLedger, made
from lightning_nd.mesh import Meshes
from lightning_nd.parallelize.context import ContextParallel
from lightning_nd.parallelize.data import fsdp_modules


class SteppingStrategy(CheckpointedStrategy):
    """What `NDStrategy` does in an optimizer step, in its order."""

    _context: ContextParallel | None
    _partial: list[nn.Parameter]
    _progress: Progress | None
    _error_if_nonfinite: bool

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._accumulating = False
        self._grad_norm: Tensor | None = None
        #: Token accounting of the current accumulation window.
        self.ledger = TokenLedger()
        #: Global token-mean loss of the last optimizer step; ``None`` where no token loss was computed.
        self.step_loss: Tensor | None = None
        #: Global number of supervised tokens of the last optimizer step.
        self.step_supervised_tokens: Tensor | None = None

    @property
    def meshes(self) -> Meshes:
        """The device meshes by purpose."""
        raise NotImplementedError

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.ledger.discard()  # what validation or a skipped batch has left
        self.saver.restore_random()
        self._mark("forward", *args[:1])
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._mark("validation", *args[:1])
        return super().validation_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return made(super().predict_step(*args, **kwargs))  # the Trainer keeps what is returned

    @override
    def on_validation_start(self) -> None:
        self._mark("validation")
        if self._trainer().state.fn != TrainerFn.FITTING or self._trainer().sanity_checking:
            self.end_on_sigterm()

    @override
    def on_validation_end(self) -> None:
        self._mark("data")

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        # Lightning runs forward and backward inside the optimizer's step.
        result = super().optimizer_step(*args, **kwargs)
        self._mark("data", ahead=1)  # the Trainer counts the step when we return
        self.agree_to_go_on()
        return result

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without reducing: Lightning enters this for all but the last micro-batch of a window."""
        assert self.model is not None
        units = fsdp_modules(self.model)
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        if self._context is not None:
            self._context.check_used(loss_is_ours=self.ledger.is_noted)
        self._mark("backward")
        weight = self.ledger.close_micro_batch()
        if self.lightning_module.automatic_optimization:
            # Lightning has divided by the configured length of the window; the rule divides by what is in it.
            length = self.lightning_module.trainer.accumulate_grad_batches
            if length > 1:
                closure_loss = closure_loss * (length * weight)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def after_backward(self) -> None:
        """Called by the precision plugin once gradients have been computed, before `on_after_backward`."""
        assert self.lightning_module is not None
        if self._accumulating:
            self._mark("data")
            return
        self._mark("optimizer")
        if self._partial:
            gradients.average_partial_gradients(self._partial, self.meshes.tp.get_group())
        factor, self.step_loss, self.step_supervised_tokens = self.ledger.close_window()
        if factor is not None and self.lightning_module.automatic_optimization:
            gradients.scale(self.lightning_module.parameters(), factor)

    def check_gradients(self) -> None:
        """Stop every rank before the optimizer step if some gradient is not finite.

        Raises:
            RuntimeError: with ``error_if_nonfinite=True``; the same on every rank.
        """
        if not self._error_if_nonfinite:
            return
        assert self.lightning_module is not None
        step = self.lightning_module.trainer.global_step + 1
        gradients.check_finite(self.lightning_module.named_parameters(), step)

    def grad_norm(self, parameters: Sequence[nn.Parameter] | None = None) -> Tensor:
        """The global 2-norm of the gradients as they are now, as one process would have it; collective.

        Args:
            parameters: default: all of the LightningModule; that norm is kept for `last_grad_norm`.
        """
        assert self.lightning_module is not None
        if parameters is not None:
            return gradients.global_norm(parameters)
        self._grad_norm = gradients.global_norm(self.lightning_module.parameters())
        return self._grad_norm

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last optimizer step before clipping, if it was asked for or clipped by."""
        return self._grad_norm

    def clip_by_norm(self, parameters: list[nn.Parameter], max_norm: float) -> None:
        """Clip the gradients of an optimizer by their global norm."""
        assert self.lightning_module is not None
        with_gradient = sum(p.grad is not None for p in self.lightning_module.parameters())
        covers_all = sum(p.grad is not None for p in parameters) == with_gradient
        norm = self.grad_norm() if covers_all else self.grad_norm(parameters)
        if not covers_all:
            self._grad_norm = norm
        gradients.clip_by_norm(parameters, max_norm, norm)

    def clip_by_value(self, parameters: list[nn.Parameter], limit: float) -> None:
        """Clamp the gradients of an optimizer."""
        gradients.clip_by_value(parameters, limit)

    def _mark(self, phase: str, *batch: Any, ahead: int = 0) -> None:
        if self._progress is not None and self.lightning_module is not None:
            self._progress.mark(phase, self.lightning_module.trainer.global_step + ahead)
            for seen in batch:
                self._progress.see(seen)
