"""Precision plugins whose clipping and backward know the meshes.

Lightning clips in the precision plugin. The strategy replaces the plugin that the Trainer has chosen by one of these,
through its `precision_plugin` setter. Mixed precision is FSDP2's: fp32 master weights, bf16 compute, fp32 reduction.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_nd.parallelize.adapters import is_adapter

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_nd.strategy import NDStrategy

_KNOWN = (HalfPrecision, MixedPrecision)
SUPPORTED = ("32-true", "bf16-mixed", "bf16-true")  # Lightning lets no Trainer choose 64-true here


class _MeshAware(Precision):
    """Backward and clipping that go through the strategy."""

    strategy: NDStrategy
    #: dtype of the parameters that the optimizer sees; ``None`` leaves the model's.
    parameter_dtype: torch.dtype | None = None
    sharding = MixedPrecisionPolicy()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # Parameters only: buffers (the frequencies of rotary embeddings) keep the precision they were computed in.
        if self.parameter_dtype is not None:
            for parameter in module.parameters():
                if parameter.is_floating_point() and parameter.dtype != self.parameter_dtype:
                    parameter.data = parameter.data.to(self.parameter_dtype)
        return module

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().backward(tensor, model, optimizer, *args, **kwargs)
        # Before `on_after_backward`: whoever looks at gradients sees complete ones.
        self.strategy.after_backward()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.strategy.clip_by_norm(list(self.main_params(optimizer)), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.strategy.clip_by_value(list(self.main_params(optimizer)), float(clip_val))

    @override
    def _clip_gradients(self, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        # After `on_before_optimizer_step`, whose hooks may have changed the gradients.
        self.strategy.check_gradients()
        super()._clip_gradients(model, optimizer, *args, **kwargs)


class NDPrecision(_MeshAware):
    """32-true."""


class NDDoublePrecision(_MeshAware, DoublePrecision):
    """64-true."""

    parameter_dtype = torch.float64


class NDHalfPrecision(_MeshAware, HalfPrecision):
    """bf16-true: parameters, gradients and optimizer state in bf16; gradients are reduced in fp32."""

    parameter_dtype = torch.bfloat16
    sharding = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        # HalfPrecision changes torch's default dtype here; transformers computes masks and positions under it.
        yield


class NDMixedPrecision(_MeshAware, MixedPrecision):
    """bf16-mixed: fp32 master weights, gathered and computed with in bf16, gradients reduced in fp32."""

    parameter_dtype = torch.float32
    sharding = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # Beside low-rank pairs weights are frozen: no step is lost in bf16, and a float32 copy would only cost memory.
        frozen = [p for p in module.parameters() if not p.requires_grad and p.dtype == torch.bfloat16]
        if any(map(is_adapter, module.modules())) and frozen:
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                    parameter.data = parameter.data.float()
            return module
        return super().convert_module(module)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        yield  # FSDP2 casts; autocast would keep a second copy of every weight

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # MixedPrecision refuses fused optimizers here, because they undo a loss scale themselves; bf16 has no scale.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


def check_precision(precision: str) -> None:
    """Raise ValueError for a precision that cannot give one process's numbers here."""
    if str(precision) not in (*SUPPORTED, "32", "bf16", "None"):
        raise ValueError(
            f"NDStrategy: precision={precision!r} is not supported; allowed: {', '.join(SUPPORTED)}. fp16 needs a loss"
            " scaler that agrees over all meshes, and gains nothing over bf16 where there is bf16: use 'bf16-mixed'."
        )


def adapt_precision(plugin: Precision, strategy: NDStrategy) -> _MeshAware:
    """The mesh-aware counterpart of a plugin that the Trainer has chosen.

    Raises:
        ValueError: for a precision that cannot give one process's numbers here.
    """
    made: _MeshAware
    if isinstance(plugin, _MeshAware):
        made = plugin
    elif type(plugin) is Precision:
        made = NDPrecision()
    elif type(plugin) is DoublePrecision:
        made = NDDoublePrecision()
    elif type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        made = NDHalfPrecision("bf16-true")
    elif type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        made = NDMixedPrecision("bf16-mixed", plugin.device)
    else:
        check_precision(str(getattr(plugin, "precision", "")) if type(plugin) in _KNOWN else type(plugin).__name__)
        raise ValueError(f"NDStrategy: {type(plugin).__name__} cannot be used; give Trainer(precision=...) instead.")
    made.strategy = strategy
    return made
