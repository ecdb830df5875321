"""Which rows a rank reads: loaders split over the data ranks, and a check that ranks that share rows agree on them."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_nd.data.loader import StatefulLoader
from lightning_nd.data.sampler import RowSampler
from lightning_nd.data.stream import StreamLoader
from lightning_nd.mesh import Meshes

_LONG = 8192
_CHECKED = 4  # batches of a stage; a loader that is shuffled by each rank alone shows it in the first


def split_loader(loader: object, overfit: float, place: dict[str, Any]) -> object:
    """Split a loader over the data ranks in the order that the user gave it: shuffled only if it was.

    ``DataLoader(shuffle=True)`` is shuffled by epoch and ``seed_everything``. Such a loader, and one that reads its
    rows in order, knows its place and goes on there when a run is resumed. Any other sampler is asked on rank 0, and
    its order holds for all. Loaders that have a distributed sampler, or an iterable dataset, are returned as they are.

    Args:
        loader: what the LightningModule returned.
        overfit: ``Trainer(overfit_batches=...)``.
        place: ``num_replicas`` and ``rank`` on the data axes.
    """
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.sampler, DistributedSampler)
        or has_iterable_dataset(loader)
    ):
        return loader
    shuffled = _is_shuffle(loader.sampler)
    in_order = isinstance(loader.sampler, SequentialSampler)
    if (shuffled or in_order) and type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler:
        return _placed(loader, shuffled and not overfit, place)
    if not shuffled and not in_order:
        loader = _update_dataloader(loader, OneOrder(loader.sampler))
    return _update_dataloader(loader, _get_distributed_sampler(loader, shuffled, overfit, **place))


def _placed(loader: DataLoader[Any], shuffled: bool, place: dict[str, Any]) -> StatefulLoader:
    """A loader of rows, with all its settings, that knows its place."""
    assert loader.batch_size is not None
    sampler = RowSampler(
        loader.dataset,  # type: ignore[arg-type]
        micro_batch_size=loader.batch_size,
        whole_batches=loader.drop_last,
        shuffle=shuffled,
        seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),  # as Lightning's own
        **place,
    )
    ordering = ("self", "shuffle", "sampler", "batch_sampler")
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in ordering]
    return StatefulLoader(**{name: getattr(loader, name) for name in names if hasattr(loader, name)}, sampler=sampler)


def _is_shuffle(sampler: Any) -> bool:
    """Whether a sampler is what ``shuffle=True`` makes: every row once, in any order."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


class Behind:
    """A loader of unknown length with a state of its own, whose state stands behind the batch that is worked on.

    To know which batch is the last, Lightning fetches one more than it hands out: resuming from the loader's own state
    would leave that one out.

    Args:
        loader: of the user.
        fit_loop: which fetches from it.
    """

    def __init__(self, loader: Any, fit_loop: Any) -> None:
        self.loader, self._fit_loop = loader, fit_loop
        self._states: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self._states = []
        for batch in self.loader:
            self._states = [*self._states[-1:], copy.deepcopy(self.loader.state_dict())]
            yield batch
        self._states = self._states[-1:]

    def state_dict(self) -> Any:
        """That behind the last batch but one that was fetched, where Lightning is one ahead."""
        fetcher = self._fit_loop._data_fetcher
        ahead = isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None
        return self._states[0] if ahead and self._states else self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """The loader's own."""
        self.loader.load_state_dict(state)

    @property
    def _iterator(self) -> Any:  # Lightning ends the workers by it
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # it is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)


def behind(loader: object, trainer: Any) -> object:
    """The same loader, or one whose state can be resumed from where Lightning's fetching would lead it astray."""
    stateful = isinstance(loader, _Stateful) and not isinstance(loader, StatefulLoader | StreamLoader)
    return Behind(loader, trainer.fit_loop) if stateful and trainer.training and sized_len(loader) is None else loader


class OneOrder(Sampler[int]):
    """The order of rank 0's sampler on every rank: one that draws at random draws otherwise on each."""

    def __init__(self, sampler: Iterable[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        order = [list(self.sampler)]
        if dist.is_initialized():
            dist.broadcast_object_list(order, src=0)
        return iter(order[0])

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Passed on to a sampler that takes it."""
        if callable(setter := getattr(self.sampler, "set_epoch", None)):
            setter(epoch)


class SameRows:
    """Compares the first batches of a stage over the tp and cp ranks, which must read the same rows.

    Args:
        meshes: of the strategy.
        device: where the process groups communicate.
    """

    def __init__(self, meshes: Meshes, device: torch.device) -> None:
        self._groups = {axis: mesh for axis, mesh in (("tp", meshes.tp), ("cp", meshes.cp)) if mesh.size() > 1}
        self._data = meshes.data if meshes.data.size() > 1 else None
        self._device = device
        self._left = _CHECKED

    def check(self, batch: Any, training: bool = False) -> None:
        """Compare one batch as it came from the loader; collective over the tp and cp ranks, and at first over all.

        Warns if the first batch that is trained on is the same on all data ranks, which are to read different rows.

        Raises:
            RuntimeError: on every rank of the group, if they do not hold the same batch.
        """
        if not (self._groups or self._data) or self._left == 0:
            return
        self._left -= 1
        mine = torch.tensor(_digest(batch), device=self._device)
        if training and self._data is not None:
            if bool(mine.any()) and self._equal(mine, self._data):
                rank_zero_warn(
                    f"NDStrategy: all {self._data.size()} data ranks have read the same rows in the first batch, so"
                    " each row counts that many times. A loader with an IterableDataset, or with"
                    " use_distributed_sampler=False, must read its part of the rows:"
                    " trainer.strategy.distributed_sampler_kwargs has num_replicas and rank."
                )
            self._data = None
        for axis, mesh in self._groups.items():
            if not self._equal(mine, mesh):
                raise RuntimeError(
                    f"NDStrategy: ranks that differ only in {axis} have read different rows, and they must read the"
                    " same: they work on one micro-batch together. Does each rank shuffle with a seed of its own, or"
                    " split the data by the global rank? Use trainer.strategy.distributed_sampler_kwargs"
                    " (num_replicas, rank) to split it, and the same seed on all ranks."
                )

    def _equal(self, mine: Tensor, mesh: DeviceMesh) -> bool:
        bounds = torch.stack([mine, -mine])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.get_group())
        return bool((bounds[0] == -bounds[1]).all())


def warn_of_masks(batch: Any) -> None:
    """Say once what keeps long rows that are padded or packed from needing masks of all pairs of tokens."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < _LONG:
        return
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all())
    packed = mask is None and isinstance(positions, Tensor) and int((positions == 0).sum()) > len(ids)
    if padded or packed:
        rank_zero_warn(
            f"NDStrategy: rows of {_LONG:,} tokens or more that are padded or packed make attention build a mask of all"
            " pairs of tokens, and may make it slow. NDStrategy(document_attention=True), or --nd.document_attention"
            " true, needs none and gives the same numbers."
        )


def _digest(batch: Any) -> tuple[int, int]:
    """Two sums over the integer tensors of a batch, one of them by position; floats may differ in their last bit."""
    plain = weighted = 0
    for tensor in _integers(batch):
        flat = tensor.reshape(-1).long()
        place = torch.arange(1, flat.numel() + 1, device=flat.device) % 65521
        plain += int(flat.sum()) + flat.numel()
        weighted += int((flat * place).sum())
    return plain % 2**61, weighted % 2**61


def _integers(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [] if batch.is_floating_point() or batch.is_complex() else [batch]
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in _integers(value)]
