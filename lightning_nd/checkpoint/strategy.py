"""The part of the strategy that Lightning calls for checkpoints; the work is done by `Saver`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_nd.checkpoint import resume, state
from lightning_nd.checkpoint.last import checkpoint_folders
from lightning_nd.checkpoint.manifest import CheckpointError
from lightning_nd.checkpoint.saver import Saver
from lightning_nd.launch import PREEMPTED, RankFailedError
from lightning_nd.watch import first_error

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CheckpointedStrategy(ModelParallelStrategy):
    """Checkpoints that are whole or not there, load on any layout, and are saved once more before a preemption."""

    _async_checkpoint = False
    _saver: Saver | None = None
    _asked_to_stop = False
    _asked_to_be_requeued = False
    _stopping = False
    _resumed = False
    _failure: BaseException | None = None
    #: Set before processes start, by `lightning_nd.checkpoint.last.settle`.
    checkpoints_to_try: list[Path]
    load_weights_only: bool | None = None

    @property
    def saver(self) -> Saver:
        """Made when the processes are connected."""
        assert self._saver is not None, "NDStrategy: there are no checkpoints before the processes are connected."
        return self._saver

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _mark(self, phase: str, *batch: Any, ahead: int = 0) -> None:
        raise NotImplementedError

    @override
    def _setup_distributed(self) -> None:
        store = getattr(self._launcher, "store", None)
        if store is not None and not dist.is_initialized():  # Lightning does not when it is done
            dist.init_process_group(
                self._get_process_group_backend(),
                store=store,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        # What `timeout` limits is waiting for a rank that hangs; one may be slow to start.
        first, wanted = not dist.is_initialized(), self._timeout
        self._timeout = max(wanted or default_pg_timeout, default_pg_timeout)
        try:
            super()._setup_distributed()
        finally:
            self._timeout = wanted
        if first and wanted is not None and wanted != default_pg_timeout:
            dist.distributed_c10d._set_pg_timeout(wanted)

    # -- state --------------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Names and tensors: those in use (DTensors) for a folder; gathered, on rank 0 only, for one file."""
        self._check_alive()
        self._mark("saving")  # the first thing that Lightning asks for; hooks of the model and callbacks come next
        assert self.lightning_module is not None
        tensors = state.module_tensors(self.lightning_module)
        if self._save_distributed_checkpoint:
            return tensors
        whole = state.gathered(state.without_aliases(tensors).items(), keep=self.is_global_zero)
        if not self.is_global_zero:
            return {}
        shared = {_place(tensors[name]): tensor for name, tensor in whole.items()}
        return {name: whole[name] if name in whole else shared[_place(t)] for name, t in tensors.items()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return state.optimizer_tensors(optimizer, state.parameter_names(self.lightning_module))

    # -- saving and loading -------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__}: storage_options are for a CheckpointIO, which is not used here.")
        self.saver.save(self._trainer(), checkpoint, Path(self.broadcast(filepath)))
        self._mark("data")

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._mark("loading")
        self.saver.weights_only = self.load_weights_only
        self.saver.others = [Path(p) for p in self.checkpoints_to_try]
        return self.saver.load(self._trainer(), Path(checkpoint_path), self.optimizers, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        pass  # done in load_checkpoint

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.saver.remove(Path(filepath))

    # -- the loop -----------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self._trainer() if self._resumed else None
        if trainer is not None and trainer.training and trainer.lightning_module.automatic_optimization:
            # What Lightning logs under goes up by one where it passes over a validation that has been done already.
            self._resumed = False
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        trainer = self._trainer()
        if self.saver.loaded is not None:
            resume.check_recipe(self.saver.loaded, trainer)
            resume.tell_places(trainer.fit_loop)
            resume.fit_to_layout(trainer.fit_loop)
            resume.begin_epoch(trainer.fit_loop)
            self.saver.begin_epoch(trainer)
            resume.spare_callbacks(trainer)
            for logger in trainer.loggers:
                if callable(go_on := getattr(logger, "resume_at", None)):
                    go_on(trainer.global_step)
            self.saver.loaded = None
            self._resumed = True
        # Lightning's handler starts a collective, in which a rank that is in another one would wait for ever.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask_to_stop)
            slurm = self.cluster_environment
            if isinstance(slurm, SLURMEnvironment) and slurm.auto_requeue and slurm.requeue_signal is not None:
                signal.signal(slurm.requeue_signal, self._ask_to_be_requeued)

    def end_on_sigterm(self) -> None:
        """Where nothing is trained, nothing is saved: the signal ends the process, wherever it waits."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @override
    def on_test_start(self) -> None:
        self.end_on_sigterm()

    @override
    def on_predict_start(self) -> None:
        self.end_on_sigterm()

    @override
    def on_train_end(self) -> None:
        self._mark("saving")
        self.saver.wait()
        self._mark("data")

    def _ask_to_stop(self, *_: Any) -> None:
        self._asked_to_stop = True

    def _ask_to_be_requeued(self, *_: Any) -> None:
        self._asked_to_stop = self._asked_to_be_requeued = True

    def agree_to_go_on(self) -> None:
        """After an optimizer step: all ranks stop together if one was sent SIGTERM, or could not save.

        Raises:
            OSError: what a save in the background has met.
        """
        flags = torch.tensor([int(self._asked_to_stop), int(self.saver.failed()), int(self._asked_to_be_requeued)])
        if self.world_size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.saver.group)
        if flags[1]:
            self.saver.wait()
        self.saver.note_places(self._trainer())
        self.saver.take_memory(self._trainer())
        if flags[0] and not self._stopping:
            # Lightning looks at this when the batch is done, on every rank of the same one.
            self._stopping, self._asked_to_be_requeued = True, bool(flags[2])
            self._trainer()._signal_connector.received_sigterm = True

    def save_before_the_end(self, exception: BaseException) -> None:
        """On SIGTERM or SLURM's requeue signal: save once, where the Trainer's callbacks save, and exit with 143."""
        if not isinstance(exception, SIGTERMException):
            self._failure = exception
        if not isinstance(exception, SIGTERMException) or not self._stopping or self._saver is None:
            return
        self._stopping = False
        trainer: pl.Trainer = self._trainer()
        exception.code = PREEMPTED
        if self._launcher is not None:
            self._launcher.preempted = True  # type: ignore[attr-defined]
        folders = checkpoint_folders(trainer)
        saved = any(
            getattr(callback, "_last_global_step_saved", None) == trainer.global_step
            and not getattr(callback, "save_weights_only", False)
            for callback in trainer.checkpoint_callbacks
        )
        if folders and not saved:
            trainer.save_checkpoint(folders[0] / "preempted.ckpt", weights_only=False)
        self.saver.wait()
        where = (
            f"saved step {trainer.global_step} in {folders[0]}" if folders else "nothing is saved without a callback"
        )
        rank_zero_info(f"NDStrategy: asked to stop by {self._asked_by()}: {where}.")
        if self._asked_to_be_requeued and folders and self.is_global_zero:
            requeue(os.environ)

    def _check_alive(self) -> None:
        """Refuse to save where a callback is told of an error (`on_exception`): other ranks do not come any more."""
        if self._saver is None:  # the fit has been refused, and a callback saves on errors
            raise RankFailedError(f"NDStrategy: there is nothing to save yet. {self._failure or sys.exception() or ''}")
        trainer = self._trainer()
        if self._failure is None or self.world_size == 1 or trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        if trainer.state.stage is None:  # the error has been told
            return
        story = getattr(getattr(getattr(self, "_progress", None), "line", None), "story", None)
        first = first_error() or story or f"{type(self._failure).__name__}: {self._failure}"
        raise RankFailedError(f"NDStrategy: nothing can be saved once a rank has failed, all must take part. {first}")

    def _asked_by(self) -> str:
        if not self._asked_to_be_requeued:
            return "SIGTERM"
        return f"SLURM ({self.cluster_environment.requeue_signal.name})"  # type: ignore[union-attr]

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._saver is not None:
            self._saver.check()


def requeue(environ: Mapping[str, str]) -> None:
    """Ask SLURM to run this job again; it then goes on from the newest checkpoint, as `SLURM_RESTART_COUNT` says."""
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        problem = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        rank_zero_warn(f"NDStrategy: job {job} could not be queued again ({problem}): scontrol requeue {job}")
    else:
        rank_zero_info(f"NDStrategy: job {job} is queued again.")


def _place(tensor: Tensor) -> Any:
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (local.data_ptr(), tuple(local.shape)) if local.numel() else id(tensor)


__all__ = ["CheckpointError", "CheckpointedStrategy"]
