"""Processes of one node that look after each other: rank 0 shows that it lives, the ranks that it started look."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

#: Environment variables: the folder of reports and places, and the process id of rank 0.
REPORTS, PARENT = "LIGHTNING_ND_REPORTS", "LIGHTNING_ND_PARENT"
#: The global rank of the process that starts others. They take it out of their environment when they import this
#: package, so it is there in no process that they start themselves.
STARTED_BY = "LIGHTNING_ND_STARTED_BY"
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


def watch_parent() -> None:
    """In a process that another rank has started: end with it, from the first moment on, also where it waits for it."""
    rank = os.environ.pop(STARTED_BY, None)
    if rank is None:
        return
    threading.Thread(target=_end_with_parent, args=(int(rank),), daemon=True, name="watch-parent").start()


def _end_with_parent(rank: int) -> None:
    while not _is_orphan():
        time.sleep(1.0)
    tell_of_parent(rank)
    os._exit(1)


def _is_orphan() -> bool:
    if not parent_is_gone(0):
        return False
    if os.getppid() == 1:
        return True
    try:  # it may have started this one by way of another process
        os.kill(int(os.environ[PARENT]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def tell_of_parent(rank: int) -> None:
    """Say, once for all that it has started, that a rank has gone in the middle of a run, and where."""
    folder = Path(os.environ[REPORTS])
    record = None
    if any(folder.glob("progress-*")):  # else nothing runs yet; do not wait for an import of torch
        from lightning_nd.faults import read_progress

        record = read_progress(folder, rank)
    # without a record its run was over or had not begun; or it has told itself
    if record is not None and not (folder / "0.txt").exists() and _first_to_tell():
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


def first_error() -> str | None:
    """Its last line: which rank, where, and the error."""
    report = first_report()
    return report.read_text().splitlines()[-1] if report is not None else None


watch_parent()  # on import, which comes first in a process; its parent may be killed while it still imports torch
