"""Logits that are not there yet: what a model's head returns while the loss will be computed chunk by chunk.

A transformers model calls its head, does something to the logits or nothing (a scale, a soft cap, a cast), and hands
them to its ``loss_function``. Here the head returns a `PendingLogits`: a tensor without data that knows the hidden
states, the head's weight, and what has been done to it since. The loss takes it apart. Whatever else touches it gets
real logits, made there and then, whole and with their gradient, as if nothing had happened. So a model that does with
its logits what cannot be done chunk by chunk gets the right numbers, at the memory of all logits.

The hooks sit on the linear layers of the head, around nothing that the model or FSDP2 does: the layer runs on no tokens
at all, and its empty output is replaced.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_nd.loss.chunked import VocabularySlice

log = logging.getLogger(__name__)

Step = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Product:
    """``x Wᵀ + b`` of one linear layer, with ``W`` as it was gathered for this forward pass.

    Attributes:
        x: ``[..., features]``.
        weight: ``[v, features]``; ``[v]`` for the bias.
        closed: the weights are not at hand any more.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    closed: bool = False

    def close(self) -> None:
        """Forget the tensors, once the backward pass is over or the model runs again."""
        self.closed = True
        self.x = self.weight = torch.empty(0)
        self.bias = None

    @property
    def trains(self) -> bool:
        """Whether a gradient goes through it."""
        return any(t is not None and t.requires_grad for t in (self.x, self.weight, self.bias))


Term = tuple[Product, float]  # and a number that multiplies it


@dataclass(frozen=True)
class _Cast:
    dtype: torch.dtype

    def __call__(self, y: Tensor) -> Tensor:
        return y.to(self.dtype)


@dataclass(frozen=True)
class _Scale:
    """Multiplication or division by a number, kept as it was written: they round differently."""

    function: Callable[..., Tensor]
    other: float

    def __call__(self, y: Tensor) -> Tensor:
        return self.function(y, self.other)

    @property
    def factor(self) -> float:
        return float(self.function(torch.ones((), dtype=torch.float64), self.other))


@dataclass(frozen=True)
class _Shift:
    function: Callable[..., Tensor]
    other: float

    def __call__(self, y: Tensor) -> Tensor:
        return self.function(y, self.other)


class PendingLogits(Tensor):
    """A tensor ``[..., vocabulary]`` that is made when something needs it; see the module's docstring."""

    terms: tuple[Term, ...]
    steps: tuple[Step, ...]
    part: VocabularySlice | None
    _made: Tensor | None
    _hooks: list[Callable[[Tensor], Any]]

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        terms: tuple[Term, ...],
        steps: tuple[Step, ...] = (),
        part: VocabularySlice | None = None,
        dtype: torch.dtype | None = None,
        hooks: list[Callable[[Tensor], Any]] | None = None,
    ) -> PendingLogits:
        first = terms[0][0]
        width = first.weight.shape[0] if part is None else part.width
        made: PendingLogits = Tensor._make_wrapper_subclass(
            cls, (*first.x.shape[:-1], width), dtype=dtype or first.x.dtype, device=first.x.device
        )
        made.terms, made.steps, made.part, made._made = terms, steps, part, None
        made._hooks = [] if hooks is None else hooks
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingLogits({list(_plain(Tensor.size)(self))}, {_plain(_getter('dtype'))(self)})"

    # -- what the head's own hooks do

    def split(self, part: VocabularySlice) -> PendingLogits:  # type: ignore[override]
        """The same, with the weights known to be this tp rank's slice of the vocabulary."""
        return PendingLogits(self.terms, self.steps, part, self._dtype, self._hooks)

    @property
    def _dtype(self) -> torch.dtype:
        result: torch.dtype = _plain(_getter("dtype"))(self)
        return result

    # -- what the loss does

    @property
    def is_made(self) -> bool:
        """Whether the logits are there already."""
        return self._made is not None

    def function(self) -> Step | None:
        """What has been done to ``Σ xᵢ Wᵢᵀ + b`` since; a last cast to at least float32 is left to the loss."""
        steps = list(self.steps)
        while steps and isinstance(steps[-1], _Cast) and steps[-1].dtype in (torch.float32, torch.float64):
            wide = torch.promote_types(self.terms[0][0].x.dtype, torch.float32)
            if steps[-1].dtype != wide:
                break
            steps.pop()
        return partial(_run, tuple(steps)) if steps else None

    def called_back(self, loss: Tensor) -> Tensor:
        """Call the hooks that were put on the logits when the gradient reaches the loss, just before it goes on.

        FSDP2 puts one there: the head's unit then knows that its backward pass begins.
        """
        if loss.requires_grad:
            for hook in self._hooks:
                loss.register_hook(lambda grad, hook=hook: (hook(grad), grad)[1])
        return loss

    # -- what everybody else does

    def make(self) -> Tensor:
        """The logits: whole over tp, of this rank's tokens under cp, with their gradient.

        Raises:
            RuntimeError: after the backward pass, or once the model has been called again.
        """
        if self._made is not None:
            return self._made
        if any(p.closed or not p.weight.untyped_storage().size() for p, _ in self.terms):
            raise RuntimeError(
                "NDStrategy: these logits were not kept: the loss is computed without ever holding them all. They can"
                " be read until the backward pass of their step and the model's next call, and are made then; or use"
                " NDStrategy(loss=LossOptions(chunk=None)), which makes them at once."
            )
        log.debug("NDStrategy: logits of %s tokens are made in full", self.terms[0][0].x.shape[:-1])
        y = sum_of_products(self.terms)
        for step in self.steps:
            y = step(y)
        if self.part is not None:
            y = gather_slices(y, self.part)
        if y.requires_grad:
            for hook in self._hooks:
                y.register_hook(hook)
        self._made = y
        return y

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or func == Tensor.__repr__:
            return _plain(func)(*args, **kwargs)
        me = args[0] if args else None
        if isinstance(me, PendingLogits) and me._made is None:
            if func == _getter("requires_grad"):  # a new object each time
                return torch.is_grad_enabled() and any(p.trains for p, _ in me.terms)
            if func == _getter("_base"):  # FSDP2 asks every output of a unit whether it is a view
                return None
            if func is Tensor.register_hook and len(args) == 2:
                me._hooks.append(args[1])
                return None
        noted = _note(func, args, kwargs)
        if noted is not None:
            return noted
        args, kwargs = made((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"NDStrategy: {func} was applied to pending logits from below autograd, where their gradient would be lost."
            " Use NDStrategy(loss=LossOptions(chunk=None))."
        )


def made(value: Any) -> Any:
    """The same nest of containers with real logits in the place of pending ones, for what outlives its step."""
    return torch.utils._pytree.tree_map_only(PendingLogits, lambda p: p.make(), value)


def read_real_logits(module: nn.Module) -> None:
    """Hand real logits to a module that is not the model they come from (a value head, say)."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return made((args, kwargs))

    # before FSDP2's hook, which takes the arguments apart
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def sum_of_products(terms: tuple[Term, ...]) -> Tensor:
    """``Σ xᵢ Wᵢᵀ + b`` as the layers themselves compute it."""
    total: Tensor | None = None
    for product, scale in terms:
        y = F.linear(product.x, product.weight, product.bias)
        y = y if scale == 1.0 else y * scale
        total = y if total is None else total + y
    assert total is not None
    return total


def gather_slices(y: Tensor, part: VocabularySlice) -> Tensor:
    """The slices of all tp ranks, ``[..., vocabulary]``; slices but the last ones are equally long."""
    from lightning_nd.parallelize import collectives as comm

    shard = -(-part.width // part.group.size())  # torch.chunk's rule: the last rank may hold less
    y = F.pad(y, (0, shard - y.shape[-1])) if y.shape[-1] < shard else y
    whole = comm.allgather_slice(y, y.dim() - 1, part.group)
    return whole if whole.shape[-1] == part.width else whole[..., : part.width].contiguous()


def _run(steps: tuple[Step, ...], y: Tensor) -> Tensor:
    for step in steps:
        y = step(y)
    return y


def _plain(func: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return call


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_METADATA = {
    _getter(name)
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_meta", "is_nested")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.get_device}

_NAMED_CASTS = {Tensor.float: torch.float32, Tensor.double: torch.float64, Tensor.bfloat16: torch.bfloat16}
_SCALES = {Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.multiply} | {
    Tensor.div, torch.div, Tensor.__truediv__, Tensor.true_divide, torch.true_divide, Tensor.divide, torch.divide
}  # fmt: skip
_SHIFTS = {Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__, Tensor.sub, torch.sub, Tensor.__sub__}
_TANH = {Tensor.tanh, torch.tanh}
_IN_PLACE = {
    Tensor.mul_: Tensor.mul, Tensor.__imul__: Tensor.mul, Tensor.div_: Tensor.div, Tensor.__itruediv__: Tensor.div,
    Tensor.tanh_: Tensor.tanh, Tensor.__idiv__: Tensor.div,
}  # fmt: skip


def _note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLogits | None:
    """Pending logits with one step more, or None if ``func`` must have real ones."""
    if not args or not isinstance(args[0], PendingLogits) or args[0]._made is not None:
        return None
    me = args[0]
    if func in _IN_PLACE:
        noted = _note(_IN_PLACE[func], args, kwargs)
        if noted is None or noted._dtype != me._dtype:
            return None
        me.steps = noted.steps
        return me
    if func is Tensor.contiguous and not kwargs and len(args) == 1:
        return me
    if func in _TANH and len(args) == 1 and not kwargs:
        return _with(me, torch.tanh, me._dtype)
    if (dtype := _cast_to(func, me, args[1:], kwargs)) is not None:
        return me if dtype == me._dtype else _with(me, _Cast(dtype), dtype)
    if len(args) != 2 or kwargs:
        return None
    other = args[1]
    if isinstance(other, PendingLogits):
        return _added(me, other) if func in _SHIFTS and func not in (Tensor.sub, torch.sub, Tensor.__sub__) else None
    if isinstance(other, bool) or not isinstance(other, int | float):
        return None
    if func in _SCALES:
        return _with(me, _Scale(func, other), me._dtype)
    return _with(me, _Shift(func, other), me._dtype) if func in _SHIFTS else None


def _with(me: PendingLogits, step: Step, dtype: torch.dtype) -> PendingLogits:
    return PendingLogits(me.terms, (*me.steps, step), me.part, dtype, me._hooks)


def _cast_to(func: Any, me: PendingLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    if func in _NAMED_CASTS and not args and not kwargs:
        return _NAMED_CASTS[func]
    if func is not Tensor.to or len(args) + len(kwargs) != 1:
        return None
    target = args[0] if args else kwargs.get("dtype", kwargs.get("device"))
    if isinstance(target, torch.dtype) and target.is_floating_point:
        return target
    here = me.terms[0][0].x.device
    same = isinstance(target, str | torch.device) and torch.device(target) in (here, torch.device(here.type))
    return me._dtype if same else None


def _added(a: PendingLogits, b: PendingLogits) -> PendingLogits | None:
    """The sum of two layers' outputs over the same tokens (a layer and its low-rank pair), if both are untouched."""
    flat = [_scaled(p) for p in (a, b)]
    alike = a._dtype == b._dtype and _plain(Tensor.size)(a) == _plain(Tensor.size)(b) and a.part == b.part
    if not alike or flat[0] is None or flat[1] is None:
        return None
    return PendingLogits((*flat[0], *flat[1]), (), a.part, a._dtype, [*a._hooks, *b._hooks])


def _scaled(p: PendingLogits) -> tuple[Term, ...] | None:
    factor = 1.0
    for step in p.steps:
        if not isinstance(step, _Scale):
            return None
        factor *= step.factor
    return tuple((product, scale * factor) for product, scale in p.terms)


@dataclass
class Head:
    """The linear layers of a model's head, and whether their outputs are pending just now.

    Attributes:
        active: the forward pass that is running ends in a loss.
        trained: pending logits with gradients came out of it.
    """

    layers: list[nn.Linear]
    active: bool = False
    trained: bool = False
    _open: weakref.WeakSet[Product] = field(default_factory=weakref.WeakSet)

    def begin(self, active: bool) -> None:
        """A forward pass of the model begins: logits of the last one cannot be read any more."""
        self.close()
        self.active, self.trained = active, False

    def close(self) -> None:
        """Logits that are still pending cannot be made any more."""
        for product in list(self._open):
            product.close()
        self._open.clear()

    def install(self) -> None:
        """Put the hooks on the layers."""
        for layer in self.layers:
            held: list[Product] = []
            layer.register_forward_pre_hook(partial(self._before, held))
            # First of all hooks after the layer: what tensor parallelism does with its output comes next.
            layer.register_forward_hook(partial(self._after, held), prepend=True)

    def _before(self, held: list[Product], layer: nn.Module, args: tuple[Any, ...]) -> Any:
        held.clear()
        if not self.active or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            return None
        if isinstance(args[0], PendingLogits) or torch.is_autocast_enabled(args[0].device.type):
            return None
        assert isinstance(layer, nn.Linear)
        held.append(Product(args[0], _local(layer.weight), _local(layer.bias)))
        return (args[0].narrow(-2, 0, 0),)

    def _after(self, held: list[Product], *_: Any) -> PendingLogits | None:
        if not held:
            return None
        product = held.pop()
        self._open.add(product)
        self.trained |= torch.is_grad_enabled() and product.trains
        return PendingLogits(((product, 1.0),))


def find_head(model: Any) -> Head | None:
    """The layers of a transformers model that make its logits, if they are plain linear ones; LoRA's pairs too."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if not isinstance(head, nn.Module):
        return None
    outer = getattr(head, "out_features", None)
    layers = [m for m in head.modules() if _is_linear(m) and m.out_features == outer]
    return Head(layers) if layers else None


def _local(parameter: Tensor | None) -> Any:
    """This rank's slice under tensor parallelism, as the layer itself would compute with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer computes as `nn.Linear` does; FSDP2 gives its units a class of their own."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
