"""Tensor-parallel styles: how one module's parameters are sharded, and what its forward exchanges.

The style names are those of transformers' ``base_model_tp_plan``. Parameters are DTensors on the ``tp`` mesh, so that
FSDP2, checkpoints and optimizers see global tensors; a module's own forward runs on the local shards (plain tensors,
no DTensor dispatch). What crosses ranks is written out here.

A *pure* region is a submodule of a block (attention, MLP) in which all parametrised modules are column-wise,
row-wise, or norms over local heads. Its input is then exchanged once, at its border (`sequence.py`), and column-wise
layers exchange nothing. In any other place each style makes its own input and output right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_nd.loss.chunked import VocabularySlice
from lightning_nd.loss.pending import PendingLogits, gather_slices
from lightning_nd.parallelize import collectives as comm


@dataclass(frozen=True)
class Site:
    """Where a style is applied.

    Attributes:
        mesh: the ``tp`` mesh.
        pure: the module stands in a pure region (see the module's docstring).
        scatter: sums over the ranks and keeps this rank's tokens (`sequence.SequenceShard.scatter_sum`); ``None``
            without sequence parallelism.
        share: what gives whole activations to work that is split (`sequence.SequenceShard.into_head`); ``None`` for
            `collectives.identity_allreduce`.
    """

    mesh: DeviceMesh
    pure: bool = False
    scatter: Callable[[Tensor], Tensor] | None = None
    share: Callable[[Tensor], Tensor] | None = None

    @property
    def group(self) -> ProcessGroup:
        """The ``tp`` process group."""
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        """The ``tp`` degree."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank's place on the ``tp`` axis."""
        return self.mesh.get_local_rank()


class Stage(Protocol):
    """Where shapes are rehearsed: makes the activations that exchanges would."""

    size: int

    def whole(self, like: Tensor, width: int | None = None) -> Tensor:
        """An activation that is equal on every rank."""
        ...

    def split(self, like: Tensor, width: int | None = None) -> Tensor:
        """An activation of this rank's features or heads."""
        ...

    def scatter_sum(self, partial: Tensor) -> Tensor:
        """This rank's tokens of a total."""
        ...


class Style:
    """Base: replicated parameters, nothing exchanged."""

    #: Whether the parameters' gradients are partial sums over the tp ranks.
    partial_gradients = False
    #: Whether a region that holds this style can still be pure.
    fits_pure_region = False
    #: Whether the output is this rank's slice of the features.
    splits_output = False

    def placement(self, parameter: str, ndim: int) -> Placement:
        """How a parameter with the own name ``parameter`` (say ``weight``) and ``ndim`` dims lies on the mesh."""
        return Replicate()

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Raise ValueError if the module called ``name`` cannot be split over ``size`` ranks."""

    def is_partial(self, parameter: str, site: Site) -> bool:
        """Whether the gradient of this parameter must be summed over the tp ranks after backward."""
        return self.partial_gradients

    def install(self, module: nn.Module, site: Site) -> None:
        """Register the hooks that exchange activations."""

    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        """Register hooks that do to shapes what those of `install` do, without ranks (`flow.py`)."""


class Colwise(Style):
    """Output features are split: weight ``Shard(out)``; the output is this rank's slice of the last dim.

    Args:
        gather: exchange the slices, so that the output is whole on every rank.
        even: refuse widths that the ranks do not divide. The vocabulary may be uneven, heads may not.
    """

    fits_pure_region = True

    def __init__(self, gather: bool = False, even: bool = True) -> None:
        self.gather = gather
        self.even = even
        self.fits_pure_region = self.splits_output = not gather

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        return Shard(max(ndim - 2, 0))

    @override
    def check(self, name: str, module: nn.Module, size: int) -> None:
        _check_plain(name, module, size)
        features = getattr(module, "out_features", None)
        if features is not None and not self.gather:
            _check_divisible(name, "out_features", features, size)

    @override
    def install(self, module: nn.Module, site: Site) -> None:
        if not site.pure:
            _map_input(module, site.share or (lambda x: comm.identity_allreduce(x, site.group)))
        if self.gather:
            width = int(module.out_features)  # type: ignore[arg-type]
            shard = -(-width // site.size)  # torch.chunk's rule: the last rank may hold less
            if width <= shard * (site.size - 1):
                raise ValueError(f"NDStrategy: {width} output features leave a rank of tp={site.size} with none.")

            part = VocabularySlice(site.group, site.rank * shard, width)
            # The loss takes pending logits in slices, as they are.
            _map_output(module, lambda y: y.split(part) if isinstance(y, PendingLogits) else gather_slices(y, part))

    @override
    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        if self.gather:
            width = int(module.out_features)  # type: ignore[arg-type]
            _map_output(module, lambda y: stage.whole(y, width))
        else:
            _map_output(module, stage.split)


class Rowwise(Style):
    """Input features are split: weight ``Shard(in)``, bias replicated and added once, after the sum.

    Args:
        split: the input is whole on every rank; take this rank's slice first.
    """

    fits_pure_region = True

    def __init__(self, split: bool = False) -> None:
        self.split = split
        self.fits_pure_region = not split

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        return Replicate() if parameter == "bias" else Shard(ndim - 1)

    @override
    def check(self, name: str, module: nn.Module, size: int) -> None:
        _check_plain(name, module, size)
        features = getattr(module, "in_features", None)
        if features is not None:
            _check_divisible(name, "in_features", features, size)

    @override
    def is_partial(self, parameter: str, site: Site) -> bool:
        # The bias is added to this rank's tokens only.
        return parameter == "bias" and site.pure and site.scatter is not None

    @override
    def install(self, module: nn.Module, site: Site) -> None:
        if self.split:
            _map_input(module, lambda x: comm.slice_allgather(x, x.dim() - 1, site.group))
        base = getattr(module, "base_layer", module)  # an adapter's output is a partial sum as well

        def reduce(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            bias, base._parameters["bias"] = base._parameters.get("bias"), None
            try:
                y = forward(*args, **kwargs)
            finally:
                base._parameters["bias"] = bias
            y = site.scatter(y) if site.pure and site.scatter is not None else comm.allreduce_identity(y, site.group)
            if isinstance(bias, DTensor):  # of an adapter's base layer, taken away before that has made it local
                bias = bias.to_local()
                bias = comm.scale_gradient(bias, site.size) if self.is_partial("bias", site) else bias
            return y if bias is None else y + bias.to(y.dtype)

        wrap_forward(module, reduce)

    @override
    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        if self.split:
            _map_input(module, lambda x: stage.split(x, x.shape[-1] // stage.size))
        _map_output(module, stage.whole)
        if pure:
            _map_output(module, stage.scatter_sum)


class PackedColwise(Colwise):
    """Column-wise for blocks packed along the output (gate and up): every rank gets its slice of each block."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = blocks

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        # A 1-D bias cannot be told apart from a plain one by its shape; the blocks are packed along it as well.
        return _StridedShard(max(ndim - 2, 0), split_factor=self.blocks)

    @override
    def check(self, name: str, module: nn.Module, size: int) -> None:
        super().check(name, module, size)
        features = getattr(module, "out_features", None)
        if features is not None and features % (self.blocks * size):
            raise ValueError(
                f"NDStrategy: {name!r} packs {self.blocks} blocks of equal width and tp={size} splits each, but its"
                f" out_features={features} is no multiple of {self.blocks * size}. Split the layer into one for each"
                " block, or choose another tp."
            )


class PackedRowwise(Rowwise):
    """Row-wise for blocks packed along the input."""

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        return Replicate() if ndim == 1 else _StridedShard(ndim - 1, split_factor=2)


class VocabularyEmbedding(Style):
    """Rows of the embedding are split; a rank looks up its own tokens, the others give zero, and the sum is whole."""

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        return Shard(0)

    @override
    def install(self, module: nn.Module, site: Site) -> None:
        rows = int(module.num_embeddings)  # type: ignore[arg-type]
        shard = -(-rows // site.size)
        first, last = site.rank * shard, min((site.rank + 1) * shard, rows)
        if first >= last:
            raise ValueError(f"NDStrategy: a vocabulary of {rows} leaves a rank of tp={site.size} with no row.")
        padding = module.padding_idx
        if isinstance(padding, int):  # F.embedding keeps that row's gradient at zero; it counts local rows
            module.padding_idx = padding - first if first <= padding < last else None  # type: ignore[assignment]
        foreign: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            tokens = args[0]
            torch._assert_async(
                ((tokens >= 0) & (tokens < rows)).all(), f"a token id is outside the vocabulary of {rows} rows"
            )
            outside = (tokens < first) | (tokens >= last)
            foreign.append(outside)
            # A token of another rank reads some row of ours; its output and its gradient are zeroed below.
            return ((tokens - first).masked_fill(outside, 0), *args[1:])

        def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return comm.allreduce_identity(output.masked_fill(foreign.pop().unsqueeze(-1), 0), site.group)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    @override
    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        _map_output(module, stage.whole)


class LocalHeadNorm(Style):
    """Replicated parameters that each rank applies to its own heads (q and k norms): gradients are partial."""

    partial_gradients = True
    fits_pure_region = True


class Experts(Style):
    """The module that owns packed expert weights: every rank computes its slice of every expert."""

    partial_gradients = False

    @override
    def install(self, module: nn.Module, site: Site) -> None:
        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # Hidden states and routing weights are whole; what flows back from one rank's slice is partial.
            return tuple(
                comm.identity_allreduce(a, site.group) if isinstance(a, Tensor) and a.is_floating_point() else a
                for a in args
            )

        module.register_forward_pre_hook(before)
        _map_output(module, lambda y: comm.allreduce_identity(y, site.group))

    @override
    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        _map_output(module, stage.whole)


class AllReduceOutput(Style):
    """The module's output is a partial sum."""

    @override
    def install(self, module: nn.Module, site: Site) -> None:
        _map_output(module, lambda y: comm.allreduce_identity(y, site.group))

    @override
    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        _map_output(module, stage.whole)


class ShardedParameter(Style):
    """A bare parameter with one entry a head (attention sinks): its first dim is split."""

    fits_pure_region = True

    @override
    def placement(self, parameter: str, ndim: int) -> Placement:
        return Shard(0)


class ReplicatedKeyValue(Style):
    """k and v projections with fewer heads than ranks: the weight is whole, each rank computes the heads it reads.

    Args:
        head_dim: features of a head.
        heads: for this rank, which key/value heads its query heads read, in order.
    """

    partial_gradients = True
    fits_pure_region = True
    splits_output = True

    def __init__(self, head_dim: int, heads: tuple[int, ...]) -> None:
        self.head_dim = head_dim
        self.heads = heads

    @override
    def install(self, module: nn.Module, site: Site) -> None:
        if not site.pure:
            _map_input(module, lambda x: comm.identity_allreduce(x, site.group))
        index = torch.tensor(self.heads)

        def select(y: Tensor) -> Tensor:
            heads = y.unflatten(-1, (-1, self.head_dim))
            return heads.index_select(-2, index.to(y.device)).flatten(-2)

        _map_output(module, select)

    @override
    def rehearse(self, module: nn.Module, stage: Stage, pure: bool) -> None:
        width = len(self.heads) * self.head_dim
        _map_output(module, lambda y: stage.split(y, width))


STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(gather=True),
    "colwise_rep": Colwise(gather=True),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(split=True),
    "rowwise_rep": Rowwise(split=True),
    "packed_colwise": PackedColwise(),
    "packed_rowwise": PackedRowwise(),
    "qkv_colwise": PackedColwise(3),
    "qkv_interleaved_colwise": Colwise(),
    "embedding_rowwise": VocabularyEmbedding(),
    "replicated_with_grad_allreduce": LocalHeadNorm(),
    "moe_tp_experts": Experts(),
    "all_reduce": AllReduceOutput(),
    "sharded_parameter": ShardedParameter(),
    "replicate": Style(),
    "local_params": Style(),
}


def lend_parameters(lender: nn.Module, user: nn.Module, site: Site, partial: frozenset[str]) -> None:
    """Make a module's own parameters local while another one runs, which uses them without calling it."""
    _localize(user, lender, site, partial)


def install_style(module: nn.Module, style: Style, site: Site, partial: frozenset[str] = frozenset()) -> None:
    """Make a module's forward run on the local shards of its own parameters, and exchange what the style says.

    The gradients of the parameters named in `partial` are this rank's part of a sum over the tp ranks. They are counted
    tp times, to be averaged after backward: what reaches such a parameter by another way (a regulariser on weights, a
    gradient that is there already) is whole on every rank, and the average leaves it so.

    The hooks of `fully_shard` surround this: parameters are gathered over the data axes before they are made local, and
    given back before they are resharded.
    """
    style.install(module, site)
    _localize(module, module, site, partial)


def _localize(runs: nn.Module, owner: nn.Module, site: Site, partial: frozenset[str]) -> None:
    """Make the own parameters of ``owner`` local while ``runs`` computes."""

    def on_shards(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = {name: p for name, p in owner._parameters.items() if isinstance(p, DTensor)}
        local = {name: p.to_local() for name, p in own.items()}
        local |= {name: comm.scale_gradient(local[name], site.size) for name in partial & local.keys()}
        owner._parameters.update(local)
        try:
            return forward(*args, **kwargs)
        finally:
            owner._parameters.update(own)

    wrap_forward(runs, on_shards)


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(forward, *args, **kwargs)`` run in place of a module's forward.

    Where something must be undone also when forward raises (as a recomputation of activation checkpointing does at its
    end), a hook would have to be one that is always called; torch's compiler knows these by number, and would compile
    each block of a model anew.
    """
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = wrapped


def _map_input(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_pre_hook(lambda _, args: (fn(args[0]), *args[1:]))


def _map_output(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda _, __, output: fn(output))


def _check_plain(name: str, module: nn.Module, size: int) -> None:
    if hasattr(module, "base_layer"):  # see adapters.py
        return
    if is_parametrized(module):
        raise ValueError(
            f"NDStrategy: tp={size} would split {name!r}, which is parametrized (weight norm, for example):"
            " its weight is computed from others in each forward. Remove the parametrization"
            " (torch.nn.utils.parametrize.remove_parametrizations), or use tp=1 (dp_shard works)."
        )
    if not any(True for _ in module.parameters(recurse=False)):
        raise ValueError(
            f"NDStrategy: tp={size} would split {name!r}, but {type(module).__name__} holds no weight itself: it wraps"
            " another layer. Use tp=1 (dp_shard works), or a tp_plan that names the inner layers."
        )


def _check_divisible(name: str, what: str, value: int, size: int) -> None:
    if value % size:
        raise ValueError(
            f"NDStrategy: tp={size} does not divide {what}={value} of {name!r}."
            f" Allowed values of tp divide {value}; choose another tp."
        )
