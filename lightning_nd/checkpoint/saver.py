"""What the strategy does with checkpoints: save (now or in the background), load on any layout, remove."""

from __future__ import annotations

import copy
import io
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from lightning_nd.checkpoint import resume, state
from lightning_nd.checkpoint.files import Reader, check_room, read_folder, remove, tidy, write_file, write_folder
from lightning_nd.checkpoint.manifest import (
    META,
    OURS,
    CheckpointError,
    Manifest,
    damage,
    find_last,
    read_manifest,
)
from lightning_nd.checkpoint.pieces import Pieces
from lightning_nd.checkpoint.staging import Staging
from lightning_nd.data.loader import StatefulLoader
from lightning_nd.data.stream import StreamLoader

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


class Saver:
    """Saves and loads the checkpoints of one strategy; made when the processes are connected.

    Args:
        layout: degree of every axis.
        sharded: folders, or single files.
        in_background: write while training goes on.
        timeout: of the strategy's groups; those that are used here wait for slow disks, so for half an hour at least.
    """

    def __init__(self, layout: dict[str, int], sharded: bool, in_background: bool, timeout: timedelta | None) -> None:
        self.layout, self.sharded, self.in_background = layout, sharded, in_background
        patient = max(timeout or default_pg_timeout, default_pg_timeout)
        #: For what the main thread does, and for the thread that writes: two threads must not share one.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"  # a simulated world has no other
        self.group, self._writing = (dist.new_group(backend=backend, timeout=patient) for _ in range(2))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._removals: list[Path] = []
        self._staging = Staging()
        self._has_room = False
        #: Checkpoints to take in turn if the one to be loaded is damaged; set where "last" was asked for.
        self.others: list[Path] = []
        self.weights_only: bool | None = None
        self.loaded: Manifest | None = None
        self._random: Mapping[str, Tensor] | None = None
        self._places: list[Any] = []
        self._at_end = False
        self._at_end_random: Mapping[str, Tensor] | None = None
        #: Seconds for which the last save held up training.
        self.stopped = 0.0

    @property
    def _first(self) -> bool:
        return dist.get_rank() == 0

    # -- saving -------------------------------------------------------------------------------------------------------

    @torch.no_grad()  # and so no graph is made for each shard that is looked at
    def save(self, trainer: pl.Trainer, checkpoint: dict[str, Any], target: Path) -> None:
        """Save what `Trainer.dump_checkpoint` made; collective.

        Raises:
            OSError: it cannot be written; what was at `target` is still there. In the background this is raised by
                `check` or by the next save.
        """
        started = time.monotonic()
        self.wait()
        if target.is_dir() and not target.is_symlink() and any(target.iterdir()) and not (target / META).is_file():
            raise IsADirectoryError(f"{target} is a folder and not a checkpoint; it is not replaced.")
        module = trainer.lightning_module
        accumulate = trainer.accumulate_grad_batches
        places = self._places if _foreign_loaders(trainer) else None
        if moved := resume.rewind_window(checkpoint, accumulate, module.automatic_optimization, places):
            rank_zero_info(f"{target.name}: saved inside an accumulation window; resuming reads {moved} batches again.")
        full = "optimizer_states" in checkpoint
        # After a fit nobody waits for it any more.
        background = self.in_background and trainer.state.fn == TrainerFn.FITTING and trainer.state.stage is not None
        manifest = Manifest(
            step=checkpoint.get("global_step", 0),
            epoch=checkpoint.get("epoch", 0),
            layout=self.layout,
            world_size=dist.get_world_size(),
            saved_at=time.time(),
            models=resume.describe_models(module),
            recipe=resume.describe_recipe(trainer) if full else {},
            weights_only=not full,
        )
        ours: dict[str, Any] = {"random": resume.shared_states(self._gather(resume.random_state()))} if full else {}
        if self.sharded:
            work = self._prepare_folder(checkpoint, ours, manifest, target, background)
        else:
            work = self._prepare_file(checkpoint, ours, manifest, target, background)
        if background:
            self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            work()
        self.stopped = time.monotonic() - started

    def _prepare_folder(
        self, checkpoint: dict[str, Any], ours: dict[str, Any], manifest: Manifest, target: Path, background: bool
    ) -> Callable[[], None]:
        optimizers = checkpoint.pop("optimizer_states", [])
        sharded = state.flat(checkpoint.pop("state_dict"), [one.pop("sharded") for one in optimizers])
        ours["optimizers"] = optimizers
        meta = b""
        if self._first:
            stream = io.BytesIO()
            torch.save(resume.plain({**checkpoint, OURS: ours}), stream)
            meta = stream.getvalue()
        if background:
            sharded = self._staging.copy(sharded)
        return lambda: write_folder(sharded, meta, target, manifest, self._writing)

    def note_places(self, trainer: pl.Trainer) -> None:
        """After an optimizer step: where loaders are that only they can set back, for a save within the next window."""
        accumulates = trainer.accumulate_grad_batches > 1 and trainer.lightning_module.automatic_optimization
        if accumulates and _foreign_loaders(trainer):
            loader: Any = trainer.fit_loop._combined_loader
            self._places = copy.deepcopy(loader._state_dicts())

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Go on from the end of an epoch with loaders that are not ours: what they say there may be that it is over.

        Lightning would take that for the next epoch, and count one in which nothing was read.
        """
        if not (self._at_end and self._places and _foreign_loaders(trainer)):
            return
        fit_loop: Any = trainer.fit_loop
        loader = fit_loop._combined_loader
        loader._load_state_dicts(copy.deepcopy(self._places))
        if next(iter(loader), None) is not None:  # one that goes on, as a stream does
            loader._load_state_dicts(copy.deepcopy(self._places))
        if self._at_end_random is not None:  # of which an order may be drawn
            resume.set_random_state(self._at_end_random)
        iter(fit_loop._data_fetcher)

    @torch.no_grad()
    def take_memory(self, trainer: pl.Trainer) -> None:
        """After the first step of a fit: the memory that saves in the background need, while training goes on."""
        if self._has_room or not self.in_background:
            return
        self._has_room = True
        callbacks = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_top_k", 1)]
        if not self.sharded or not callbacks:  # one file is gathered on rank 0, when it is saved
            return
        strategy: Any = trainer.strategy
        full = not all(getattr(c, "save_weights_only", False) for c in callbacks)
        optimizers = [strategy.optimizer_state(one)["sharded"] for one in (trainer.optimizers if full else [])]
        self._staging.take_memory(state.flat(state.module_tensors(trainer.lightning_module), optimizers))

    def _prepare_file(
        self, checkpoint: dict[str, Any], ours: dict[str, Any], manifest: Manifest, target: Path, background: bool
    ) -> Callable[[], None]:
        named = []
        for i, one in enumerate(checkpoint.get("optimizer_states", [])):
            whole = state.gathered((((n, k), t) for n, s in one["sharded"].items() for k, t in s.items()), self._first)
            by_name: dict[str, dict[str, Tensor]] = {}
            for (name, key), tensor in whole.items():
                by_name.setdefault(name, {})[key] = tensor
            named.append({"class": one["class"], "names": [group["params"] for group in one["groups"]]})
            checkpoint["optimizer_states"][i] = state.numbered(one, by_name)
        content = None
        if self._first:
            tensors = checkpoint.pop("state_dict")
            content = resume.plain({**checkpoint, OURS: {**ours, "manifest": manifest.as_dict(), "optimizers": named}})
            content["state_dict"] = tensors
            if background:
                content = self._staging.copy(content)
        return lambda: write_file(content, target, self._writing)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._remove_now()
        except BaseException as error:
            self._failure = error

    def failed(self) -> bool:
        """Whether the save in the background has failed on this rank."""
        return self._failure is not None

    def check(self) -> None:
        """Raise what a save in the background has met."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the save in the background, and raise what it has met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._remove_now()
        self.check()

    def remove(self, path: Path) -> None:
        """Remove an older checkpoint, once the one that is being written is complete."""
        if self._first:
            self._removals.append(path)
            if self._thread is None:
                self._remove_now()

    def _remove_now(self) -> None:
        if self._failure is None:
            while self._removals:
                remove(self._removals.pop())

    def check_target(self, trainer: pl.Trainer) -> None:
        """Refuse to start a fit whose first checkpoint cannot be written; collective.

        Raises:
            OSError: naming the folder, and the bytes that are needed and free.
        """
        callbacks = [c for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)]
        callbacks = [c for c in callbacks if getattr(c, "save_top_k", 1) or getattr(c, "save_last", False)]
        if not callbacks or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        tensors = state.without_aliases(state.module_tensors(trainer.lightning_module))
        weights = sum(t.numel() * t.element_size() for t in tensors.values())
        rest = 0
        for optimizer in trainer.optimizers:
            copies = 2 if "adam" in type(optimizer).__name__.lower() else int(bool(optimizer.defaults.get("momentum")))
            rest += copies * sum(p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"])
        failure = None
        for callback in callbacks if self._first else ():
            needed = weights + (0 if getattr(callback, "save_weights_only", False) else rest)
            try:
                check_room(Path(callback.dirpath), needed)  # type: ignore[attr-defined]
            except OSError as error:
                failure = error
        told = self._gather((failure.errno, failure.strerror) if failure is not None else None)[0]
        if told is not None:
            raise OSError(*told)

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, trainer: pl.Trainer, path: Path, optimizers: list[Any], weights_only: bool | None) -> dict[str, Any]:
        """Load a checkpoint into the module and the optimizers, and return the rest of it; collective.

        Raises:
            CheckpointError: damaged, incomplete, of a newer format, or it does not fit; says what to do.
        """
        self.wait()
        weights_only = self.weights_only if weights_only is None else weights_only
        asked, path = path, self._whole(path)
        if path != asked and trainer._checkpoint_connector._ckpt_path is not None:
            trainer._checkpoint_connector._ckpt_path = str(path)  # Lightning's last word is of what was loaded
        fitting = trainer.state.fn == TrainerFn.FITTING
        read = self._load_folder if path.is_dir() else self._load_file
        configured = resume.optimizer_settings(optimizers if fitting else [])
        rest, manifest = read(trainer, path, optimizers if fitting else [], weights_only)
        self.loaded = manifest if fitting else None
        if not fitting:
            return rest
        ours = rest.get(OURS, {})
        if manifest is not None and "lr_schedulers" in rest:
            rest["lr_schedulers"] = resume.check_schedulers(manifest, trainer, rest["lr_schedulers"])
            now = resume.optimizer_settings(optimizers)
            resume.warn_of_settings(configured, now, trainer, rest["lr_schedulers"])
        if "random" in ours and manifest is not None:
            same = manifest.layout == self.layout and manifest.world_size == dist.get_world_size()
            self._random = resume.state_of_rank(ours["random"], dist.get_rank(), same)
            resume.set_random_state(self._random)
            progress = rest["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            if progress["is_last_batch"]:
                self._at_end_random, self._random = self._random, None  # the next epoch begins from here
        if "loops" in rest:
            self._at_end = rest["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]
            resume.continue_epoch(rest["loops"]["fit_loop"])
            self._places = copy.deepcopy(rest["loops"]["fit_loop"]["state_dict"].get("combined_loader") or [])
        if self._first:
            for folder in {path.parent, *(other.parent for other in self.others)}:
                tidy(folder)
        return rest

    def restore_random(self) -> None:
        """Before the first batch: loaders and hooks have drawn numbers that the interrupted run had drawn before."""
        if self._random is not None:
            resume.set_random_state(self._random)
            self._random = None

    def _whole(self, path: Path) -> Path:
        """The checkpoint to load: every byte of it is as it was written."""
        tried: list[str] = []
        while True:
            path = self._gather(path)[0]
            words: list[str] = []
            try:
                manifest = None if path.is_file() and not _is_ours(path) else read_manifest(path)
                ranks = slice(dist.get_rank(), None, dist.get_world_size())
                words = damage(path, manifest, only=ranks)
            except CheckpointError as error:
                words = [str(error)]
            found = [text for texts in self._gather(words) for text in texts]
            if not found:
                return path
            problem = f"{path} is damaged: {found[0]}" if not found[0].startswith(str(path)) else found[0]
            tried.append(str(path))
            self.others = [other for other in self.others if str(other) not in tried]
            if not self.others:
                beside = find_last([path.parent])[0] if self._first else []
                others = [str(other) for other in self._gather(beside)[0] if str(other) not in tried]
                hint = f" The newest complete one beside it is {others[0]}." if others else ""
                hint += f" No other is whole: {', '.join(tried[:-1])} was found damaged, too." if tried[1:] else ""
                raise CheckpointError(problem + hint)
            rank_zero_warn(f"NDStrategy: {problem} Going on with {self.others[0]}.")
            path = self.others[0]

    def _load_folder(
        self, trainer: pl.Trainer, path: Path, optimizers: list[Any], weights_only: bool | None
    ) -> tuple[dict[str, Any], Manifest | None]:
        manifest, module = read_manifest(path), trainer.lightning_module
        _check_resumable(path, manifest.weights_only, trainer)
        rest = _load_archive(path / META, weights_only)
        ours = rest.get(OURS, {})
        reader = Reader(path, set(manifest.files))
        stored: Mapping[str, Any] = _metadata(reader).state_dict_metadata
        prefix = "state_dict."
        shapes = {
            name[len(prefix) :]: entry.size
            for name, entry in stored.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        differ = resume.model_differences(manifest.models, resume.describe_models(module))
        take = state.check_names(path, state.module_tensors(module), shapes, module.strict_loading, differ)
        target = {prefix + name: tensor for name, tensor in take.items()}
        names = state.parameter_names(module)
        for i, optimizer in enumerate(optimizers):
            saved = self._saved_optimizer(ours.get("optimizers", []), i, path)
            saved["sharded"] = state.stored_optimizer(
                i, stored, [n for group in saved["groups"] for n in group["params"]]
            )
            state.check_groups(i, saved, optimizer, names, differ)

            def empty(parameter: Any, name: str, key: str, saved: dict[str, Any] = saved) -> Tensor:
                entry = saved["sharded"][name][key]
                return state.like_parameter(parameter, entry.size, entry.properties.dtype)

            target |= state.flat_optimizer(i, state.restore_optimizer(saved, optimizer, names, empty))
        with torch.no_grad():
            read_folder({name: Pieces.of(tensor) for name, tensor in target.items()}, reader, self.group)
        return rest, manifest

    def _load_file(
        self, trainer: pl.Trainer, path: Path, optimizers: list[Any], weights_only: bool | None
    ) -> tuple[dict[str, Any], Manifest | None]:
        module = trainer.lightning_module
        rest = _load_archive(path, weights_only, mmap=True)
        ours = rest.get(OURS, {})
        manifest = Manifest.parse(path, ours["manifest"]) if "manifest" in ours else None
        if not isinstance(rest.get("state_dict"), Mapping):
            raise CheckpointError(
                f"{path} is no checkpoint of a Trainer: it has no 'state_dict' ({', '.join(map(str, list(rest)[:5]))})."
            )
        _check_resumable(path, "optimizer_states" not in rest, trainer)
        tensors = rest.pop("state_dict")
        differ = resume.model_differences(manifest.models, resume.describe_models(module)) if manifest else ""
        take = state.check_names(
            path, state.module_tensors(module), {n: t.shape for n, t in tensors.items()}, module.strict_loading, differ
        )
        with torch.no_grad():
            for name, tensor in take.items():
                _fill(tensor, tensors[name])
            names = state.parameter_names(module)
            for i, optimizer in enumerate(optimizers):
                here = [{"params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
                known = self._saved_optimizer(ours["optimizers"], i, path) if "optimizers" in ours else None
                groups = here if known is None else [{"params": own} for own in known["names"]]
                saved = state.named_optimizer(self._saved_optimizer(rest["optimizer_states"], i, path), groups)
                saved["class"] = None if known is None else known["class"]
                state.check_groups(i, saved, optimizer, names, differ)

                def filled(parameter: Any, name: str, key: str, saved: dict[str, Any] = saved) -> Tensor:
                    whole = saved["sharded"][name][key]
                    tensor = state.like_parameter(parameter, whole.shape, whole.dtype)
                    _fill(tensor, whole)
                    return tensor

                state.restore_optimizer(saved, optimizer, names, filled)
        return rest, manifest

    def _saved_optimizer(self, saved: list[Any], index: int, path: Path) -> dict[str, Any]:
        if index >= len(saved):
            raise CheckpointError(
                f"{path} holds the state of {len(saved)} optimizers, and configure_optimizers makes more."
            )
        return dict(saved[index])

    def _gather(self, value: Any) -> list[Any]:
        if dist.get_world_size() == 1:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self.group)
        return found


def _foreign_loaders(trainer: pl.Trainer) -> bool:
    """Whether some training loader keeps its place in a state that is not ours."""
    loader = trainer.fit_loop._combined_loader
    return loader is not None and not all(isinstance(one, StatefulLoader | StreamLoader) for one in loader.flattened)


def _fill(tensor: Tensor, whole: Tensor) -> None:
    if isinstance(tensor, DTensor):
        Pieces.of(tensor).fill(whole)
    else:
        tensor.copy_(whole)


def _metadata(reader: Reader) -> Metadata:
    return reader.read_metadata()


def _is_ours(path: Path) -> bool:
    try:
        return OURS in torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:
        return False  # what is wrong with it is found by looking at its bytes, or when it is loaded


def _check_resumable(path: Path, weights_only: bool, trainer: pl.Trainer) -> None:
    if weights_only and trainer.state.fn == TrainerFn.FITTING:
        raise CheckpointError(
            f"{path} holds weights only (save_weights_only=True): no optimizer, schedule or place in the data to go on"
            " from. Start a new run from them: lightning-nd export --checkpoint ..., then fit from that folder; or"
            " lightning_nd.load_from_checkpoint and fit without ckpt_path."
        )


def _load_archive(path: Path, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    safe = weights_only is None or weights_only
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=safe, mmap=mmap or None)
    except Exception as error:
        if safe and "weights_only" in str(error).lower():
            words = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), "")
            raise CheckpointError(
                f"{path} holds Python objects that could run code when they are loaded ({words.strip()}). If you trust"
                " it, pass weights_only=False to fit, validate, test or predict."
            ) from error
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no checkpoint of a Trainer: it holds a {type(found).__name__}.")
    return found
