"""Processes of one node that look after each other: rank 0 shows that it lives, the ranks that it started look."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from lightning_nd.faults import read_progress

#: Environment variables: the folder of reports and places, and the process id of rank 0.
REPORTS, PARENT = "LIGHTNING_ND_REPORTS", "LIGHTNING_ND_PARENT"
_ALIVE, _HUNG = "alive", 5.0  # a file that rank 0 touches; after so many seconds without it, it is taken for hung


def beat(seconds: float) -> None:
    """Wait, and show the children that this process lives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            Path(os.environ[REPORTS], _ALIVE).touch()
        time.sleep(0.5)


def end_hung_parent() -> None:
    """End rank 0 if no thread of it runs any more: stopped, or in code that never returns. Nobody else would."""
    alive, deadline = Path(os.environ[REPORTS], _ALIVE), time.monotonic() + _HUNG
    seen: set[int] = set()
    while time.monotonic() < deadline:
        if parent_is_gone(0):
            return
        with contextlib.suppress(OSError):
            seen.add(alive.stat().st_mtime_ns)
        if len(seen) != 1:
            return
        time.sleep(0.2)
    if (report := first_report()) is not None and _first_to_tell():
        print(f"\n{report.read_text()}\nrank 0 does nothing any more and is ended.", file=sys.stderr, flush=True)
    os.kill(int(os.environ[PARENT]), signal.SIGKILL)
    os._exit(1)


def parent_is_gone(patience: float = 1.0) -> bool:
    """Whether the process that has started this one does not exist any more; its connections end a moment earlier."""
    deadline = time.monotonic() + patience
    while str(os.getppid()) == os.environ[PARENT]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def watch_parent(rank: int) -> None:
    """End this process when the rank that has started it, and was to end it, has gone; the thread of a child."""
    while not parent_is_gone(0):
        time.sleep(1.0)
    tell_of_parent(rank)
    os._exit(1)


def tell_of_parent(rank: int) -> None:
    """Say, once for all that it has started, that a rank has gone in the middle of a run, and where."""
    folder = Path(os.environ[REPORTS])
    record = read_progress(folder, rank)
    if record is None or (folder / "0.txt").exists() or not _first_to_tell():
        return  # its run was over, or it has told itself
    print(
        f"\nrank {rank} on {socket.gethostname()} has ended without a word, as when it is killed (often: out of"
        f" memory), at step {record['step']} ({record['phase']}).",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(folder, ignore_errors=True)


def _first_to_tell() -> bool:
    try:
        os.close(os.open(Path(os.environ[REPORTS], "told"), os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True


def first_report() -> Path | None:
    """The report of the local rank that failed first."""
    folder = os.environ.get(REPORTS)
    if not folder or not Path(folder).is_dir():
        return None
    return min(Path(folder).glob("*.txt"), key=lambda path: path.stat().st_mtime_ns, default=None)
