"""The scores of a prediction run as a file, one line a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from typing_extensions import override

from lightning_nd.data.dataset import NO_ROW


class ScoreWriter(BasePredictionWriter):
    """Writes what `CausalLM.predict_step` gives: ``row``, ``nll`` (nats, summed) and ``supervised_tokens``.

    Rows are numbered from 0 in the order of the data set; each is written once, whatever the layout.

    Args:
        path: of the JSONL file; its folder is made.
    """

    def __init__(self, path: str) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self._found: dict[int, tuple[float, int]] = {}

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert batch_indices is not None
        scores = zip(batch_indices, prediction["nll"].tolist(), prediction["supervised_tokens"].tolist(), strict=True)
        # a rank that has no row left scores an empty one
        self._found |= {row: (nll, tokens) for row, nll, tokens in scores if row != NO_ROW}

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_end(trainer, pl_module)
        found = [self._found]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            found = [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(found, self._found)
        if not trainer.is_global_zero:
            return
        merged = {row: score for part in found for row, score in part.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w", encoding="utf-8") as file:
            for row in sorted(merged):
                nll, tokens = merged[row]
                file.write(json.dumps({"row": row, "nll": nll, "supervised_tokens": tokens}) + "\n")
