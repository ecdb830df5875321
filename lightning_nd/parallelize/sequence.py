"""Sequence parallelism: between attention and MLP, every tp rank keeps its own tokens.

Korthikanti et al. 2022, section 4.2.2. Hidden states are split along the sequence at the first block and put together
after the last one. Norms, dropout and residual sums of a block run on this rank's tokens; a child that may look at
other tokens or whose layers are split (attention, MLP, experts: a *region*) gets the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_nd.names import class_name
from lightning_nd.parallelize import collectives as comm
from lightning_nd.parallelize.blocks import find_blocks

SEQUENCE_DIM = 1


class SequenceShard:
    """How the hidden states ``[batch, sequence, hidden]`` of one model lie on the tp ranks.

    The sequence is padded with zeros to a multiple of the tp degree where it is split and trimmed where it is
    gathered; its true length is noted by each forward and taken back by the recomputation of that forward
    (`checkpoint_contexts`).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.length = 0

    def enter(self, hidden: Tensor) -> Tensor:
        """Whole and equal on every rank → this rank's tokens."""
        self.length = hidden.shape[SEQUENCE_DIM]
        return comm.slice_allgather(self._pad(hidden), SEQUENCE_DIM, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """This rank's tokens → whole, for work that every rank repeats."""
        return self._trim(comm.allgather_slice(hidden, SEQUENCE_DIM, self.group))

    def gather_partial(self, hidden: Tensor) -> Tensor:
        """This rank's tokens → whole, for a pure region: the gradients of the ranks are summed on the way back."""
        return self._trim(comm.allgather_reducescatter(hidden, SEQUENCE_DIM, self.group))

    def scatter(self, hidden: Tensor) -> Tensor:
        """Whole and equal on every rank → this rank's tokens."""
        return comm.slice_allgather(self._pad(hidden), SEQUENCE_DIM, self.group)

    def scatter_sum(self, partial: Tensor) -> Tensor:
        """Partial sums of the whole → this rank's tokens of the total."""
        return comm.reducescatter_allgather(self._pad(partial), SEQUENCE_DIM, self.group)

    def into_head(self, hidden: Tensor) -> Tensor:
        """Whole, for a head split by vocabulary: on the way back every rank gets the gradient of its own tokens.

        `leave` takes no more than that, so a reduce-scatter does what would else be an all-reduce.
        """
        if hidden.dim() != 3 or hidden.shape[SEQUENCE_DIM] != self.length:  # some tokens only
            return comm.identity_allreduce(hidden, self.group)
        return comm.identity_sum_own(hidden, SEQUENCE_DIM, self.group)

    def install_on_tail(self, norm: nn.Module) -> None:
        """Give the norm after the blocks a gradient of this rank's tokens, whoever uses its output."""
        map_hidden_output(norm, lambda hidden: comm.identity_own(hidden, SEQUENCE_DIM, self.group))

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for `torch.utils.checkpoint`: the recomputation sees the length of its own forward."""
        length = self.length

        @contextmanager
        def unchanged() -> Any:
            yield

        @contextmanager
        def restored() -> Any:
            current, self.length = self.length, length
            try:
                yield
            finally:
                self.length = current

        return unchanged(), restored()

    def install_on_chain(self, blocks: list[nn.Module]) -> None:
        """Split before the first block and gather after the last one."""
        map_hidden_input(blocks[0], self.enter)
        map_hidden_output(blocks[-1], self.leave)

    def install_on_region(self, region: nn.Module, pure: bool) -> None:
        """Give a region the whole sequence and keep this rank's tokens of what it returns.

        A region may return its tokens in one dim, ``[batch · sequence, hidden]`` (some experts do).
        """
        gather = self.gather_partial if pure else self.leave
        shape = [0, 0]

        def before(hidden: Tensor) -> Tensor:
            whole = gather(hidden)
            shape[:] = whole.shape[:2]
            return whole

        def after(output: Tensor) -> Tensor:
            rows, tokens = shape
            if output.shape[:2] == (rows, tokens):
                return self.scatter(output)
            if output.dim() == 2 and output.shape[0] == rows * tokens:
                return self.scatter(output.unflatten(0, (rows, tokens))).flatten(0, 1)
            raise RuntimeError(
                f"NDStrategy: {class_name(region)} got hidden states of {rows} rows and {tokens} tokens and returns"
                f" {list(output.shape)}: these cannot be split along the sequence. Use sequence_parallel=False."
            )

        map_hidden_input(region, before)
        if not pure:  # the row-wise layer at the end of a pure region scatters its own output
            map_hidden_output(region, after)

    def _pad(self, hidden: Tensor) -> Tensor:
        missing = -hidden.shape[SEQUENCE_DIM] % self.size
        return F.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def _trim(self, hidden: Tensor) -> Tensor:
        if not self.length <= hidden.shape[SEQUENCE_DIM] < self.length + self.size:
            raise RuntimeError(
                f"SequenceShard: gathered {hidden.shape[SEQUENCE_DIM]} tokens where the forward had {self.length}."
                " Two forwards of different lengths are in flight; use the strategy's activation_checkpointing instead"
                " of the model's own."
            )
        if hidden.shape[SEQUENCE_DIM] == self.length:
            return hidden
        # Contiguous: model code takes views of it.
        return hidden.narrow(SEQUENCE_DIM, 0, self.length).contiguous()


def find_tail(model: nn.Module) -> tuple[str, str] | None:
    """The names of the norm after the blocks and of the head, if nothing else with parameters stands there.

    None where that is not plain to see: the model has other parameters outside of blocks, input embedding and head.
    """
    blocks = [name for name, _ in find_blocks(model)]
    parts = [getter() for kind in ("input", "output") if (getter := getattr(model, f"get_{kind}_embeddings", None))]
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names.get(id(part)) for part in parts]
    if not blocks or len(ends) != 2 or None in ends:
        return None
    known = [*blocks, *ends]
    outside = [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not any(name == part or name.startswith(f"{part}.") for part in known)
    ]
    held, _, chain = blocks[0].rpartition(".")[0].rpartition(".")
    if len(outside) != 1 or outside[0].rpartition(".")[0] != held or not is_tokenwise(model.get_submodule(outside[0])):
        return None
    order = list(model.get_submodule(held)._modules)
    after = order.index(outside[0].rpartition(".")[2]) > order.index(chain)
    return (outside[0], str(ends[1])) if after else None


def is_tokenwise(module: nn.Module) -> bool:
    """Whether a block's child treats every token alone: a leaf with only 1-D parameters (norms, dropout, scales)."""
    return next(module.children(), None) is None and all(p.dim() <= 1 for p in module.parameters())


def map_hidden_input(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply ``fn`` to a module's hidden states: the first positional argument, else ``hidden_states``."""

    def before(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (fn(args[0]), *args[1:]), kwargs
        if "hidden_states" not in kwargs:
            raise TypeError(
                f"NDStrategy: cannot find the hidden states among the arguments of {type(mod).__name__}"
                f" ({', '.join(kwargs)}); use sequence_parallel=False."
            )
        return args, {**kwargs, "hidden_states": fn(kwargs["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def map_hidden_output(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply ``fn`` to a module's output, or to its first element if it returns a tuple."""

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return (fn(output[0]), *output[1:]) if isinstance(output, tuple) else fn(output)

    module.register_forward_hook(after)
