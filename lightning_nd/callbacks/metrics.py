"""The log of a run's numbers, which goes on where a resumed run does."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override


class MetricsLog(CSVLogger):
    """``metrics.csv`` as Lightning's `CSVLogger` writes it, in one piece over any number of resumed runs.

    Lightning's deletes the file of an earlier run in the same folder. Here a run that goes on from step n keeps the
    rows of the steps before n, and drops those that the interrupted run had written after its last checkpoint. A run
    that starts from the beginning starts a new file. Arguments are those of `CSVLogger`.
    """

    @property
    @override
    def experiment(self) -> Any:
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            current = Path(self.log_dir) / "metrics.csv"
            if current.is_file():
                current.replace(self._earlier)
        return super().experiment

    @property
    def _earlier(self) -> Path:
        return Path(self.log_dir) / ".metrics.earlier.csv"

    @rank_zero_only
    def resume_at(self, step: int) -> None:
        """Take over the rows of the steps before ``step``; called before the run logs anything."""
        writer = self.experiment
        if not self._earlier.is_file():
            return
        with self._earlier.open(newline="") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or [])
            rows = [row for row in reader if int(float(row["step"])) < step]
        with Path(writer.metrics_file_path).open("w", newline="") as file:
            table = csv.DictWriter(file, fieldnames=sorted(names))
            table.writeheader()
            table.writerows(rows)
        writer.metrics_keys = sorted(names)
        self._earlier.unlink()

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        current = Path(self.log_dir) / "metrics.csv"
        if status != "success" and self._earlier.is_file() and not current.is_file():
            self._earlier.replace(current)  # nothing has been logged: the earlier run is still what there is

    @override
    @rank_zero_only
    def save(self) -> None:
        super().save()
        if Path(self.experiment.metrics_file_path).is_file():
            self._earlier.unlink(missing_ok=True)
