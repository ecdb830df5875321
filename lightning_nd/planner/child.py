"""Runs a function in a process of its own, a copy of this one: what it changes is gone with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

_OWNER = "LIGHTNING_ND_CHILD"


class ChildError(RuntimeError):
    """The process ended without an answer."""


def is_child() -> bool:
    """Whether this process was made by `in_children`."""
    return os.environ.get(_OWNER) == str(os.getpid())


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns in a copy of this process; see `in_children`."""
    return in_children([(function, args)])[0]


def in_children(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Call each function in a copy of this process, at the same time; only the first one's output is shown.

    A copy (fork) has everything that this process holds: models and trainers need not be pickled, and a notebook's
    code need not be run again. Answers must be picklable.

    Raises:
        Exception: what a function raised, with its traceback as a note.
        ChildError: if a process died, or the system cannot copy processes.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ChildError(f"dry run: {sys.platform} cannot copy a process (fork), which a simulation runs in.")
    # what every copy would import for itself
    import lightning_nd.planner.patches
    import lightning_nd.planner.simulate  # noqa: F401

    context = multiprocessing.get_context("fork")
    started = []
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of threads, which are not in the copy: it computes next to nothing, with one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        for place, (function, args) in enumerate(calls):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, place > 0, function, args), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
    answers = []
    try:
        for process, ours in started:
            try:
                good, answer = ours.recv()
            except EOFError:
                process.join()
                raise ChildError(f"dry run: the simulation ended with code {process.exitcode}.") from None
            if not good:
                raise answer
            answers.append(answer)
    finally:
        for process, ours in started:
            ours.close()
            process.kill()
            process.join()
    return answers


def _run(pipe: Connection, silent: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ[_OWNER] = str(os.getpid())
    torch.set_num_threads(1)  # the threads of this process are not in the copy
    warnings.filterwarnings("ignore", category=FutureWarning)
    if silent:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
    try:
        answer = (True, function(*args))
    except BaseException as error:
        error.add_note("".join(traceback.format_exception(error)))
        answer = (False, error)
    try:
        pickle.loads(pickle.dumps(answer))
    except Exception:  # an error with a constructor of its own, say
        answer = (False, ChildError(f"{type(answer[1]).__name__}: {answer[1]}"))
    pipe.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
