"""Lightning's own callbacks that a sharded model changes the meaning of."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import (
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_AVERAGING = (StochasticWeightAveraging, WeightAveraging)


def check_callbacks(trainer: Any, peers: int) -> None:
    """Refuse callbacks that would do nothing or fail, before anything is started.

    Args:
        trainer: whose callbacks are looked at.
        peers: ranks that read the same rows, tp × cp.

    Raises:
        ValueError: naming the callback, and the way to the same result.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, _AVERAGING):
            raise ValueError(
                f"NDStrategy: {type(callback).__name__} copies the module before it is sharded, and would average a"
                " copy that is never trained. Keep checkpoints (save_top_k=-1) and average their exports, or average"
                " over parameters of the sharded module in a callback of your own (they are there in on_fit_start)."
            )
        on_exception = isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
        if on_exception and trainer.world_size > 1:
            raise ValueError(
                f"NDStrategy: {type(callback).__name__} is to save when a rank fails, and no rank can save alone: it"
                " would wait for the others, which wait for it in their step. Save as you go"
                " (ModelCheckpoint(every_n_train_steps=...), NDStrategy(async_checkpoint=True)) and go on with"
                ' ckpt_path="last" or --auto-resume; SIGTERM saves by itself.'
            )
        if isinstance(callback, ThroughputMonitor) and peers > 1:
            rank_zero_warn(
                f"NDStrategy: ThroughputMonitor multiplies by all ranks, and {peers} of them work on the same rows: its"
                f" global rates are {peers} times too high. Use lightning_nd.callbacks.Throughput."
            )
