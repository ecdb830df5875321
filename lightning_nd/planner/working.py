"""What a block holds while it works, beside what it keeps: its passes on meta, watched operation by operation.

A block's forward, its forward under checkpointing and its backward are run alone. Of each the moments are noted at
which most is live: activations (bytes per token, by how tensor parallelism divides them) and gradients of its weights
(elements). A moment that another one exceeds in everything is left out, so that few remain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_nd.planner.experts import PRODUCTS, ExpertRows
from lightning_nd.planner.model import Moment, PerToken, Sizes, Working

#: ``split``, ``whole`` or ``residual`` (see `PerToken`), of a tensor made forward.
Where = Callable[[Tensor], str]
_KINDS = ("split", "whole", "residual", "gathered")


class _Live(TorchDispatchMode):
    """Live bytes of a block's tensors, by kind, and every moment at which there is more than at any other."""

    def __init__(
        self,
        tokens: int,
        where: Where,
        weights: Iterable[Tensor],
        sized: dict[torch.Size, Sizes],
        experts: ExpertRows,
    ) -> None:
        super().__init__()
        self.tokens, self.sized, self.experts = tokens, sized, experts
        self.where: Where | None = where  # None: backward, where kinds are those of tensors as wide
        self.widths: dict[float, str] = {}
        self.live: dict[Any, float] = {}
        self.found: list[dict[Any, float]] = []
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for tensor in weights:
            self._known[tensor.untyped_storage()] = None

    def add(self, tensor: Tensor, where: str | None = None) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if (known := self._known.get(storage)) is not None and where is not None:
            self.live[known[0]] -= known[1]
            known[0] = where
            self.live[where] = self.live.get(where, 0.0) + known[1]
        if storage in self._known:
            return
        size = storage.nbytes()
        key: Any
        if tensor.numel() % self.tokens == 0 and size % self.tokens == 0:
            features = tensor.numel() / self.tokens
            if where is None and self.experts.has(tensor):
                key = self.experts.where(tensor)
            else:
                key = where or (self.where(tensor) if self.where else self.widths.get(features, "whole"))
                self.widths.setdefault(features, key)
        elif tensor.shape in self.sized:
            key, size = tensor.shape, 1
        else:
            self._known[storage] = None
            return
        record = [key, size]
        self._known[storage] = record
        self.live[key] = self.live.get(key, 0.0) + size
        weakref.finalize(storage, self._freed, record)

    def _freed(self, record: list[Any]) -> None:
        self.live[record[0]] -= record[1]

    def _gathered(self, tensor: Tensor) -> None:
        """A split layer's input is whole on every tp rank from there on."""
        record = self._known.get(tensor.untyped_storage())
        if record and record[0] == "residual" and self.where is not None and self.where(tensor) == "whole":
            self.live["residual"] -= record[1]
            self.live["whole"] = self.live.get("whole", 0.0) + record[1]
            record[0] = "whole"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in args if self.where is not None else ():
            if isinstance(tensor, Tensor):
                self._gathered(tensor)
        out = func(*args, **(kwargs or {}))
        self.experts.note(func, args, out)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.add(tensor)
        now = dict(self.live)
        if self.where is None and func._schema.name.rpartition("::")[2] in PRODUCTS:
            now["gathered"] = self._rows((*args, out))
        if not self.found or self.found[-1] != now:
            self.found.append(now)
        return out

    def _rows(self, tensors: Iterable[Any]) -> float:
        """Bytes of gradients between attention and MLP that a split layer takes or makes: it needs all rows of them."""
        storages = {id(s): s for t in tensors if isinstance(t, Tensor) for s in [t.untyped_storage()]}
        records = [self._known.get(storage) for storage in storages.values()]
        return sum(record[1] for record in records if record and record[0] == "residual")

    @property
    def now(self) -> PerToken:
        """Activations that are live."""
        return PerToken(**{k: self.live.get(k, 0.0) / self.tokens for k in _KINDS})

    def moments(self) -> tuple[Moment, ...]:
        """Those of `found` that no other exceeds; they are forgotten."""
        every = []
        for live in self.found:
            grads = Sizes()
            for key, count in live.items():
                if not isinstance(key, str):
                    grads += self.sized[key].times(count)
            every.append(Moment(PerToken(**{k: live.get(k, 0.0) / self.tokens for k in _KINDS}), grads))
        self.found.clear()
        kept: list[Moment] = []
        for moment in sorted(set(every), key=lambda m: (-m.activations.total, -m.gradients.total, repr(m))):
            if not any(moment.is_within(other) for other in kept):
                kept.append(moment)
        return tuple(kept)


class _Input(torch.autograd.Function):
    """A tensor as a block before would hand it over: autograd holds it no longer than it is needed."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, shape: torch.Size) -> Tensor:
        return leaf.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(()), None


class _Loss(torch.autograd.Function):
    """A number, whose backward makes the gradient of what it is given."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.like = torch.empty(0, dtype=out.dtype, device=out.device), out.shape
        return out.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        empty, shape = ctx.like
        return empty.new_empty(shape)


def watch(
    call: Callable[[Tensor], Any],
    hidden: Tensor,
    where: Where,
    weights: dict[str, nn.Parameter],
    sized: Callable[[str], Sizes],
    held: Iterable[Tensor] = (),
    experts: ExpertRows | None = None,
) -> Working:
    """What is live while ``call(hidden)`` runs forward and backward on meta.

    Args:
        call: one block, or what follows the blocks.
        hidden: its input, ``[1, tokens, features]``.
        where: how tensor parallelism divides a tensor of the forward pass.
        weights: its parameters by name.
        sized: how it divides a parameter.
        held: other tensors that are there anyway.
        experts: follows the rows of a block's experts, if it has any.
    """
    experts = experts or ExpertRows(hidden.shape[1], 0, False)
    tokens = hidden.shape[1]
    grads: dict[torch.Size, Sizes] = {}
    for name, p in weights.items():
        if p.requires_grad:  # a product makes the gradient of a linear layer transposed
            for shape in (p.shape, torch.Size(reversed(p.shape))):
                grads.setdefault(shape, sized(name).times(p.numel()))
    known = [*weights.values(), *held]

    def forward(live: _Live) -> Any:
        made = _Input.apply(torch.empty((), dtype=hidden.dtype, device=hidden.device, requires_grad=True), hidden.shape)
        live.add(made, "residual")
        out = call(made)
        return out[0] if isinstance(out, tuple) else out

    checkpointed = _Live(tokens, where, known, grads, experts)
    with checkpointed, saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        forward(checkpointed)
    live = _Live(tokens, where, known, grads, experts)
    with live:
        out = forward(live)
        ahead = live.moments()
        live.where, kept = None, live.now
        loss = _Loss.apply(out)
        del out
        loss.backward()
        behind = live.moments()
    for parameter in weights.values():
        parameter.grad = None
    return Working(ahead, checkpointed.moments(), behind, kept)
