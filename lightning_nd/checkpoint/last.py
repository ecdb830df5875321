"""Which checkpoint a run goes on from, settled before processes start."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_nd.checkpoint.manifest import CheckpointError, find_last

if TYPE_CHECKING:
    import lightning.pytorch as pl

#: Words that Lightning gives a meaning of their own.
_WORDS = ("best", "hpc")


def checkpoint_folders(trainer: pl.Trainer) -> list[Path]:
    """The folders into which the Trainer's callbacks save."""
    found = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            # Before `setup`, Lightning knows the folder by this method only.
            resolve = getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)
            if folder := callback.dirpath if resolve is None else resolve(trainer):
                found.append(Path(folder))
    return list(dict.fromkeys(found))


def was_restarted(environ: Any = os.environ) -> bool:
    """Whether torchrun or SLURM has started this job again after it had failed or was preempted."""
    return any(int(environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def settle(trainer: pl.Trainer, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a Trainer function with ``ckpt_path="last"`` replaced by a path, or None.

    Also after a restart by torchrun or SLURM, whatever was given: the run goes on where it was. The strategy is told
    which checkpoints to take if that one turns out to be damaged.

    Raises:
        CheckpointError: there are checkpoints, and none is whole; or a path that does not exist was given.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs
    strategy: Any = trainer.strategy
    strategy.checkpoints_to_try, strategy.load_weights_only = [], bound.arguments.get("weights_only")
    if "ckpt_path" not in inspect.signature(function).parameters:
        return args, kwargs
    given = bound.arguments.get("ckpt_path")
    fitting = trainer.state.fn == TrainerFn.FITTING
    if given == "last" or (fitting and was_restarted()):
        whole, skipped = find_last(checkpoint_folders(trainer))
        for words in skipped:
            rank_zero_warn(f"NDStrategy: passed over {words}")
        if whole:
            rank_zero_info(f"NDStrategy: going on from {whole[0]}")
            bound.arguments["ckpt_path"], strategy.checkpoints_to_try = whole[0], whole
        elif skipped:
            raise CheckpointError(
                "There are checkpoints to go on from, and none is whole:\n" + "\n".join(skipped) + "\nRemove them to"
                " start from the beginning, or give ckpt_path."
            )
        elif given == "last":
            rank_zero_info("NDStrategy: there is no checkpoint yet; starting from the beginning.")
            bound.arguments["ckpt_path"] = None
    elif given is not None and not _is_special(str(given)) and not Path(given).exists():
        raise CheckpointError(f"ckpt_path: there is no checkpoint {Path(given).absolute()}.")
    return bound.args, bound.kwargs


def _is_special(given: str) -> bool:
    return given in _WORDS or "://" in given or given.startswith("registry")
