"""Seconds of training: what passes while the Trainer validates is not counted."""

from __future__ import annotations

import time

import torch


class Clock:
    """A stopwatch that stands still during validation.

    A device is waited for when it is started and read, so that its queue is empty.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._paused: float | None = None

    def restart(self, device: torch.device) -> None:
        """Begin at zero."""
        self._began, self._paused = _now(device), None

    def seconds(self, device: torch.device) -> float:
        """Since the start, pauses left out."""
        return _now(device) - self._began

    def pause(self) -> None:
        """Stand still."""
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Run again."""
        if self._paused is not None:
            self._began += time.perf_counter() - self._paused
            self._paused = None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
