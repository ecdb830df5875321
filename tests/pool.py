"""A pool of worker processes that run functions as the ranks of a gloo process group.

Starting eight processes that import torch, transformers and lightning costs seconds; a test that needs ranks
borrows them from here instead. Every run gets a process group of exactly the size it asks for and leaves
nothing behind: the group, the DTensor caches keyed on its meshes, environment variables and random state are
reset.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from typing_extensions import override

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.distributed",
    "lightning.pytorch",
]
# After one rank failed, its peers may sit in a collective that it will never join: wait this long for them,
# then replace them.
GRACE_SECONDS = 5.0
# Groups that some object still holds keep their threads, which wake up all the time: a fresh worker is cheaper.
MAX_THREADS = 60


class WorkerError(AssertionError):
    """A rank raised: `rank`, `type_name`, `message` of the first failure; `failures` has all tracebacks."""

    def __init__(self, text: str, rank: int, type_name: str, message: str, failures: dict[int, str]) -> None:
        super().__init__(text)
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.failures = failures


class WorkerTimeout(AssertionError):
    """Some ranks did not answer in time; `ranks` lists them and the text shows where each of them stood."""

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    folder: Path

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class _Failure(NamedTuple):
    when: float  # system-wide monotonic clock, s
    type_name: str
    message: str
    trace: str


@dataclass
class _Outcome:
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)


class Pool:
    """Up to `size` worker processes, started when first needed and kept until `close`."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._workers: dict[int, _Worker] = {}
        self._runs = 0
        # One forkserver imports everything once, so that a worker is a fork and not a fresh interpreter.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        atexit.register(self.close)  # else multiprocessing waits at exit for workers that wait for us

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(rank, world_size, *args, **kwargs)` on `world_size` ranks; the list of what they returned.

        `fn` must be a top-level function of an importable module. `timeout` is in seconds of an idle machine;
        the environment variable TEST_TIMEOUT_SCALE stretches it on a busy one. With
        `process_group=False` the ranks start without a process group, as under an external launcher.
        Raises WorkerError if a rank raised or died and WorkerTimeout if one did not answer.
        """
        __tracebackhide__ = True  # pytest: show the test and the worker, not us
        timeout *= float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size is {world_size}; this pool has 1 to {self.size} workers")
        workers = [self._worker(rank) for rank in range(world_size)]
        self._runs += 1
        shared = self.folder / f"run{self._runs}"
        shared.mkdir()
        port = _free_port()
        for rank, worker in enumerate(workers):
            job = (fn, rank, world_size, args, kwargs, str(shared), process_group, port, timeout)
            worker.pipe.send_bytes(pickle.dumps(job))
        outcome, silent = self._collect(workers, time.monotonic() + timeout)
        stacks = {rank: self._stack(workers[rank]) for rank in silent}
        logs = {rank: _tail(worker.folder / "log") for rank, worker in enumerate(workers)}
        shutil.rmtree(shared, ignore_errors=True)
        crowded = {rank for rank, worker in enumerate(workers) if _threads(worker) > MAX_THREADS}
        for rank in {*silent, *outcome.failures, *crowded}:  # a worker that failed may hold anything: start it afresh
            self._workers.pop(rank).stop()
        if outcome.failures:
            raise _worker_error(outcome, silent, logs, fn)
        if silent:
            text = f"{fn.__qualname__}: ranks {silent} of {world_size} did not answer within {timeout:g} s"
            for rank in silent:
                text += f"\n--- rank {rank} stood at\n{stacks[rank]}\n--- rank {rank} printed\n{logs[rank]}"
            raise WorkerTimeout(text, silent)
        return [outcome.results[rank] for rank in range(world_size)]

    def output(self, rank: int) -> str:
        """What the rank printed during the last run."""
        return (self.folder / f"rank{rank}" / "log").read_text(errors="replace")

    def close(self) -> None:
        """Stop all workers; a later run starts new ones."""
        for rank in list(self._workers):
            self._workers.pop(rank).stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers.get(rank)
        if worker is None or not worker.process.is_alive():
            folder = self.folder / f"rank{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, str(folder), list(sys.path)))
            process.start()
            theirs.close()
            worker = self._workers[rank] = _Worker(process, ours, folder)
        return worker

    def _collect(self, workers: list[_Worker], deadline: float) -> tuple[_Outcome, list[int]]:
        outcome = _Outcome()
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, answer = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    workers[rank].process.join(5)
                    stack = workers[rank].folder / "stack"  # where a signal has ended it
                    trace = stack.read_text() if stack.exists() else ""
                    code = workers[rank].process.exitcode
                    ok, answer = False, _Failure(0, "died", f"exit code {code}", trace)
                if ok:
                    outcome.results[rank] = answer
                else:
                    outcome.failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcome, sorted(waiting.values())

    def _stack(self, worker: _Worker) -> str:
        path = worker.folder / "stack"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)
        end = time.monotonic() + 2
        while time.monotonic() < end and not _complete(path):
            time.sleep(0.02)
        return path.read_text() if path.exists() else "(no stack)"


def _threads(worker: _Worker) -> int:
    try:
        return len(os.listdir(f"/proc/{worker.process.pid}/task"))
    except OSError:
        return 0


def _complete(path: Path) -> bool:
    """True once faulthandler has written the main thread, which it writes last."""
    return path.exists() and "in _serve" in path.read_text()


def _worker_error(outcome: _Outcome, silent: list[int], logs: dict[int, str], fn: Callable[..., Any]) -> WorkerError:
    # The earliest is the cause; the others are mostly peers that lost their connection to it.
    (rank, cause), *others = sorted(outcome.failures.items(), key=lambda item: item[1].when)
    text = f"{fn.__qualname__} failed on rank {rank}: {cause.type_name}: {cause.message}\n{cause.trace}"
    if outcome.results:
        text += f"\nranks {sorted(outcome.results)} returned"
    for other, failure in others:
        text += f"\nafter that rank {other}: {failure.type_name}: {failure.message[:300]}"
    if silent:
        text += f"\nranks {silent} were still waiting {GRACE_SECONDS:g} s later"
    text += f"\n--- rank {rank} printed\n{logs[rank]}"
    traces = {r: failure.trace for r, failure in outcome.failures.items()}
    return WorkerError(text, rank, cause.type_name, cause.message, traces)


class PoolEnvironment(ClusterEnvironment):
    """Tells Lightning that this process already is one of `world_size` ranks on one node."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        self._check("world size", size, self._world_size)

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        self._check("global rank", rank, self._rank)

    @override
    def local_rank(self) -> int:
        return self._rank

    @override
    def node_rank(self) -> int:
        return 0

    @staticmethod
    def _check(what: str, given: int, is_: int) -> None:
        if given != is_:
            raise ValueError(f"the trainer sets {what} {given}, but this worker was started with {is_}")


def tiny_trainer(rank: int, world_size: int, strategy: Any, **kwargs: Any) -> Trainer:
    """A CPU Trainer for a pool worker that prints, logs and saves nothing unless asked to.

    Its root folder is shared by the ranks of this run and removed afterwards.
    """
    plugins = [PoolEnvironment(rank, world_size), *kwargs.pop("plugins", [])]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": os.environ["POOL_SHARED_FOLDER"],
    }
    return Trainer(strategy=strategy, plugins=plugins, **(defaults | kwargs))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


# ---------------------------------------------------------------- in the worker


def _serve(pipe: Connection, folder: str, path: list[str]) -> None:
    sys.path[:] = path
    log = os.open(f"{folder}/log", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = open(f"{folder}/stack", "w")  # noqa: SIM115  (lives as long as the worker)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    import torch

    torch.set_num_threads(1)
    # As in a user's process: we came by a forkserver, and loader workers would each start and fill one of their own.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    warnings.simplefilter("default")
    gc.freeze()  # the libraries' million objects: collecting after each run then costs nothing
    environment = dict(os.environ)
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):  # the parent is gone or done
            os._exit(0)
        os.ftruncate(log, 0)
        try:
            answer = pickle.dumps(_call(*pickle.loads(job)))
        except BaseException as error:
            answer = pickle.dumps((False, _failure(error)))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.environ.clear()
            os.environ.update(environment)
        pipe.send_bytes(answer)


def _call(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: str,
    process_group: bool,
    port: int,
    timeout: float,
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    random.seed(0)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), POOL_SHARED_FOLDER=shared)
    if process_group:
        # The group's own timeout is the longer one: a hang is for the pool to report, with stacks.
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{shared}/rendezvous", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=2 * timeout),
        )
        dist.barrier()  # a rank that is done at once must not leave while others still connect to it
    try:
        return True, fn(rank, world_size, *args, **kwargs)
    except BaseException as error:
        return False, _failure(error)
    finally:
        _forget()


def _failure(error: BaseException) -> _Failure:
    return _Failure(time.monotonic(), type(error).__name__, str(error), traceback.format_exc())


def _forget() -> None:
    """Drop the process group and every cache that knows its meshes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # DTensor's caches are keyed on meshes and hold them. An equal mesh of the next run must not find their entries,
    # whose groups are gone; and as long as anything holds a group, its threads live.
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()  # modules in reference cycles hold groups and hooks
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # and what only they held
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
