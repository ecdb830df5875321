"""The most memory that a process takes while something is done."""

from __future__ import annotations

import ctypes
import gc
import platform
import threading
from pathlib import Path
from typing import Any

import pytest


class Peak:
    """The most anonymous memory (that no file backs) of this process while it is open, above that at its begin.

    Attributes:
        most: in bytes.
    """

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be reused unseen
        self._begin, self.most, self._done = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, _anonymous() - self._begin)

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.most = max(self.most, _anonymous() - self._begin)


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


needs_linux = pytest.mark.skipif(
    platform.system() != "Linux" or platform.libc_ver()[0] != "glibc", reason="needs Linux's /proc, and malloc_trim"
)
