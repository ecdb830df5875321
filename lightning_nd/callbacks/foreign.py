"""Lightning's own callbacks that a sharded model changes the meaning of."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, ThroughputMonitor, WeightAveraging
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
        if isinstance(callback, ThroughputMonitor) and peers > 1:
            rank_zero_warn(
                f"NDStrategy: ThroughputMonitor multiplies by all ranks, and {peers} of them work on the same rows: its"
                f" global rates are {peers} times too high. Use lightning_nd.callbacks.Throughput."
            )
