"""Starting the local processes, checking what started them, and ending them together when one fails."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_nd import watch
from lightning_nd.callbacks.foreign import check_callbacks
from lightning_nd.checkpoint.last import settle
from lightning_nd.devices import tasks_per_node
from lightning_nd.faults import Progress, last_seen, left_alone, lost_a_peer, read_all, read_progress, who_is_behind
from lightning_nd.mesh import Degree, ParallelDims
from lightning_nd.nodes import choose_interface, connect, meet_again
from lightning_nd.watch import PARENT, REPORTS, STARTED_BY

log = logging.getLogger(__name__)

_STARTED_AT = "LIGHTNING_ND_STARTED_AT"
#: 128 + SIGTERM, what a shell reports of a process that the signal has ended.
PREEMPTED = 143
_EQUAL = (
    "Where ranks take different numbers of batches, the one with more waits for the others: give every data rank the"
    " same number, and set trainer.should_stop on all ranks or on none."
)
_GRACE = 8.0  # seconds that the other ranks get to fail on their own before they are killed


def process_manager(environ: Mapping[str, str]) -> Literal["torchrun", "slurm", "local"]:
    """Who starts the processes of this job, by the rules that Lightning's environments use."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return "slurm"
    return "local"


def resolve_devices(
    environ: Mapping[str, str],
    *,
    devices: int | str | list[int],
    num_nodes: int = 1,
    dp_replicate: Degree = 1,
    dp_shard: Degree = "auto",
    cp: Degree = 1,
    tp: Degree = 1,
    accelerator_devices: int | None = None,
) -> int | str | list[int]:
    """The number of processes per node when ``devices`` is left at ``"auto"``; anything else is returned as it is.

    Under torchrun and SLURM it is what they started. From one terminal it is the product of the degrees; when one of
    them is ``"auto"`` it is every visible accelerator, or on CPU the product of the other degrees.

    Args:
        environ: the process environment.
        accelerator_devices: visible GPUs, or None on CPU.

    Raises:
        ValueError: if a degree is not positive, or their product cannot be spread over ``num_nodes``.
    """
    if devices not in ("auto", -1, "-1"):
        return devices
    manager = process_manager(environ)
    if manager == "torchrun":
        return int(environ["LOCAL_WORLD_SIZE"])
    if manager == "slurm":
        return tasks_per_node(environ, num_nodes)
    given = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    product = ParallelDims(**{axis: 1 if degree == "auto" else degree for axis, degree in given.items()}).world_size
    if "auto" in given.values() and accelerator_devices is not None:
        return devices
    if product % num_nodes and "auto" not in given.values():
        picture = " × ".join(f"{axis}={degree}" for axis, degree in given.items())
        raise ValueError(
            f"{picture} gives {product} ranks, which {num_nodes} nodes cannot share equally."
            " Change a degree or num_nodes, or set devices."
        )
    return max(1, product // num_nodes)


def check_world(
    environ: Mapping[str, str],
    *,
    devices: int,
    num_nodes: int = 1,
    dp_replicate: Degree = 1,
    dp_shard: Degree = "auto",
    cp: Degree = 1,
    tp: Degree = 1,
    interactive: bool = False,
) -> ParallelDims:
    """Refuse a layout that the started processes cannot form; returns the resolved degrees.

    `NDStrategy.set_world_ranks` calls it before any process group exists, so that a mismatch ends in a message and not
    in ranks that wait for each other.

    Args:
        environ: the process environment.
        devices: processes per node that the Trainer was asked for.
        interactive: True in a notebook or a Python prompt, where no processes can be started.

    Raises:
        ValueError: if torchrun, SLURM or the environment started another number of processes than
            ``devices × num_nodes``, or the degrees do not multiply to it.
        RuntimeError: in interactive use with more than one process, or in a SLURM allocation without srun.
    """
    wanted = devices * num_nodes
    asked = f"devices={devices} × num_nodes={num_nodes} = {wanted} processes"
    manager = process_manager(environ)
    if manager == "torchrun":
        world, local = int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_WORLD_SIZE", devices))
        if world != wanted or local != devices:
            raise ValueError(
                f"torchrun started {world} processes ({local} on this node), but the Trainer is set to {asked}."
                f" Start torchrun with --nproc_per_node={devices} --nnodes={num_nodes}, or set devices={local} and"
                f" num_nodes={max(1, world // local)}."
            )
    elif manager == "slurm":
        _check_slurm(environ, devices=devices, num_nodes=num_nodes, asked=asked)
    elif "LOCAL_RANK" in environ and environ.get("WORLD_SIZE", str(wanted)) != str(wanted):
        raise ValueError(
            f"The environment has WORLD_SIZE={environ['WORLD_SIZE']} and LOCAL_RANK={environ['LOCAL_RANK']}, but the"
            f" Trainer is set to {asked}. Change devices or num_nodes, or unset these variables to start the"
            " processes from here."
        )
    elif interactive and wanted > 1 and "LOCAL_RANK" not in environ:
        raise RuntimeError(
            f"A notebook or Python prompt can train with one process only and this layout needs {wanted}: put the code"
            f" in a file and run `torchrun --nproc_per_node={devices} train.py`, or use"
            f" `lightning-nd fit --config recipe.yaml --trainer.devices {devices}`."
        )
    return ParallelDims.resolve(world_size=wanted, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)


def _check_slurm(environ: Mapping[str, str], *, devices: int, num_nodes: int, asked: str) -> None:
    tasks = int(environ["SLURM_NTASKS"])
    if "SLURM_PROCID" not in environ:
        raise RuntimeError(
            f"This shell is inside a SLURM allocation (SLURM_NTASKS={tasks}) but the command was not started by srun."
            f" Prefix it with `srun`, or start local processes with `env -u SLURM_NTASKS {_command()}`."
        )
    per_node, nodes = environ.get("SLURM_NTASKS_PER_NODE"), environ.get("SLURM_NNODES")
    started = f"SLURM_NTASKS={tasks}, SLURM_NTASKS_PER_NODE={per_node}, SLURM_NNODES={nodes}"
    if per_node and nodes and int(per_node) * int(nodes) != tasks:
        raise ValueError(
            f"SLURM started {tasks} tasks, but {per_node} tasks on each of {nodes} nodes are"
            f" {int(per_node) * int(nodes)} ({started}): the missing ranks would never arrive."
            " Give sbatch or srun --ntasks-per-node and --nodes,"
            " and no other --ntasks."
        )
    if tasks != devices * num_nodes or (per_node and int(per_node) != devices):
        raise ValueError(
            f"SLURM started {tasks} tasks ({started}), but the Trainer is set to {asked}."
            f" Set devices={per_node or tasks} and num_nodes={nodes or 1}, or change --ntasks-per-node and --nodes."
        )


def is_interactive() -> bool:
    """True in a notebook, IPython or a Python prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def is_child() -> bool:
    """True in a process that `LocalLauncher` started: its parent tells the user about failures."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and os.environ.get(PARENT) == str(os.getppid())


def _command() -> str:
    if not sys.argv[0]:
        return "python train.py"
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    return shlex.join(["python", *words] if words[0].endswith(".py") else words)


class RankFailedError(RuntimeError):
    """A rank failed; the message holds its rank, host, step, phase and traceback."""


class InProcess(_Launcher):
    """Calls the Trainer's function in this process, the only one."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None:
            check_callbacks(trainer, peers=1)
            args, kwargs = settle(trainer, function, args, kwargs)
        return function(*args, **kwargs)

    def listen(self, progress: Progress, strategy: Any) -> None:
        """There is no other rank."""

    @override
    def kill(self, signum: Any) -> None:
        pass


class LocalLauncher(_SubprocessScriptLauncher):
    """Starts one process per device of this node, and ends all of them when one fails.

    Every rank that fails leaves a report. Rank 0 waits a moment for the others, kills those that hang, and shows the
    report that came first; the errors that ranks raise because a peer went away are not repeated. A child whose parent
    died ends itself. Under torchrun and SLURM no process is started and they do the ending.

    Args:
        cluster_environment, num_processes, num_nodes: as in Lightning's launcher.
        preflight: called with the Trainer and its data module, if any, before any process is started; what it raises
            ends the job.
    """

    _launches = 0  # of this process, its Trainers' together
    #: The ranks have agreed to stop, and end with this exit code.
    preempted = False
    interrupted = False
    #: By which the processes are to be connected, if not by that of torchrun.
    store: dist.Store | None = None

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        preflight: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._preflight = preflight

    @override
    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        environment, child = self.cluster_environment, is_child()
        if process_manager(os.environ) == "torchrun" and LocalLauncher.store is None:
            LocalLauncher.store = meet_again(os.environ, default_pg_timeout)
        if trainer is not None:
            args, kwargs = settle(trainer, function, args, kwargs)
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        LocalLauncher._launches += 1
        # A child comes by the launches that its parent refused before there were children; it must refuse them too.
        refused = child and LocalLauncher._launches < int(os.environ.get(_STARTED_AT, "0"))
        if self._preflight is not None and trainer is not None and (refused or not child):
            data = next((a for a in (*args, *kwargs.values()) if isinstance(a, LightningDataModule)), None)
            # Where others start the processes, all of them come by here, and one a node is to read the data: in setup.
            self._preflight(trainer, data if refused or not environment.creates_processes_externally else None)
        if refused:
            raise RuntimeError("The process that started this one refused to run here; see its message.")
        if not environment.creates_processes_externally:
            os.environ[REPORTS] = tempfile.mkdtemp(prefix="lightning-nd-")
            atexit.register(shutil.rmtree, os.environ[REPORTS], ignore_errors=True)
            os.environ[PARENT] = str(os.getpid())
            os.environ[_STARTED_AT] = str(LocalLauncher._launches)
            os.environ[STARTED_BY] = str(self._first_rank())
            self._call_children_scripts()
            del os.environ[STARTED_BY]
            atexit.register(self._wait_for_children)
            threading.Thread(target=self._watch_children, daemon=True, name="watch-children").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        choose_interface(environment, self.num_nodes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
                self.interrupted = isinstance(error, KeyboardInterrupt)
                raise
            if trainer is not None:
                trainer.strategy.on_exception(error)  # adds what the strategy knows, for the report
            elsewhere = self._report(error, trainer)
            if child and lost_a_peer(error):
                watch.end_hung_parent()
                if watch.parent_is_gone():
                    watch.tell_of_parent(self._first_rank())
                    raise SystemExit(1) from None
            if elsewhere is not None:
                self._end_children()
                if child:
                    raise SystemExit(1) from None
                raise RankFailedError(elsewhere) from None
            if self.procs:
                silent = self._end_children(lost_a_peer(error))
                report = watch.first_report()
                if silent is not None:
                    raise RankFailedError(silent) from None
                if report is not None and report != _own_report() and not _same_error(error, report.read_text()):
                    raise RankFailedError(report.read_text()) from None
            raise

    def listen(self, progress: Progress, strategy: Any) -> None:
        """On several nodes, or where others start the ranks: hear of ranks that fail or are gone; collective."""
        if strategy.world_size > 1 and (self.num_nodes > 1 or process_manager(os.environ) != "local"):
            on_silence = None if is_child() else _end_now  # children are ended by their parent
            progress.line = connect(progress, self.cluster_environment, strategy.broadcast, on_silence)

    def _report(self, error: BaseException, trainer: Any) -> str | None:
        """Leave a report for the others; returns what a rank of another launcher has told, if it failed before."""
        progress: Progress | None = getattr(getattr(trainer, "strategy", None), "_progress", None)
        step, phase = (progress.step, progress.phase) if progress is not None else (0, "setup")
        text = "".join(traceback.format_exception(error))
        rank = self._first_rank() + int(os.environ.get("LOCAL_RANK", "0"))
        summary = f"rank {rank} on {socket.gethostname()} failed first, at step {step} ({phase}): "
        summary += traceback.format_exception_only(error)[0].strip()
        elsewhere = None
        if progress is not None and progress.line is not None and isinstance(error, Exception):
            elsewhere = progress.line.fail(summary, consequence=lost_a_peer(error))
        _tell_torchrun(error if elsewhere is None else RankFailedError(elsewhere))
        path = _own_report()
        if path is not None and not path.exists():
            try:
                path.write_text(f"{text}\n{summary}")
            except OSError:  # the directory went away with a parent that already ended
                log.debug("could not write %s", path)
        return elsewhere

    def _end_children(self, lost_a_peer: bool = False) -> str | None:
        """Wait for the children, kill those that hang; words for one that died, or left early, without a report."""
        deadline, silent = time.monotonic() + _GRACE, None
        for rank, process in enumerate(self.procs, 1):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                continue
            report = Path(os.environ[REPORTS]) / f"{rank}.txt"
            if process.returncode and not report.exists() and silent is None:
                silent = self._ended(rank, process.returncode)
            elif process.returncode == 0 and lost_a_peer and silent is None:
                silent = (
                    f"rank {self._first_rank() + rank} on {socket.gethostname()} has ended without an error while rank"
                    f" 0 goes on. {_EQUAL}"
                )
        return silent

    def _wait_for_children(self) -> None:
        """When this process is done: a rank that fails or waits at its end must not be lost behind our exit code 0."""
        own = _own_report()
        if self.interrupted:
            for process in self.procs:
                process.kill()
        if self.interrupted or (own is not None and own.exists()):
            return
        deadline = time.monotonic() + _GRACE
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        found = []
        for i, process in enumerate(self.procs, 1):
            if self.preempted and process.returncode == PREEMPTED:
                continue
            record = read_progress(Path(os.environ[REPORTS]), self._first_rank() + i)
            if process.returncode:
                found.append(self._ended(i, process.returncode))
            elif process.returncode is None and record is not None:  # it is gone once the run is over
                found.append(
                    f"rank {record['rank']} on {record['host']} is still at step {record['step']}, {record['phase']}."
                )
        if not found:
            return
        for process in self.procs:
            process.kill()
        first = watch.first_report()
        sys.stdout.flush()
        print(
            (f"\n{first.read_text()}" if first else "") + "\nrank 0 has ended without an error, but "
            f"{' '.join(found)}\n{_EQUAL}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _ended(self, child: int, code: int | None) -> str:
        """Words for a rank that died without a report: how, and where it was."""
        record = last_seen(Path(os.environ[REPORTS]), self._first_rank() + child)
        where = f" at step {record['step']} ({record['phase']})" if record is not None else ""
        rank = self._first_rank() + child
        words = f"rank {rank} on {socket.gethostname()} ended with {_exit_words(code)}{where}."
        if code == -signal.SIGABRT and len(records := read_all(Path(os.environ[REPORTS]))) > 1:
            words += "\n" + "\n".join(who_is_behind(records))  # how NCCL ends a rank that has waited for too long
        return words

    def _first_rank(self) -> int:
        return int(self.cluster_environment.node_rank()) * self.num_processes

    def _watch_children(self) -> None:
        """End the job when a child is gone and rank 0 does not notice, because it waits in a collective."""
        while True:
            watch.beat(0.5)
            codes = [process.poll() for process in self.procs]
            if self.preempted:
                codes = [0 if code == PREEMPTED else code for code in codes]
            if all(code == 0 for code in codes):
                return
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is None:
                if (words := left_alone(Path(os.environ[REPORTS]))) is not None:
                    self._end_all(words)
                continue
            watch.beat(_GRACE + 2)  # rank 0 normally fails by itself now and reports
            first = watch.first_report()
            self._end_all(first.read_text() if first else self._ended(failed + 1, codes[failed]))

    def _end_all(self, words: str) -> None:
        for process in self.procs:
            process.kill()
        sys.stdout.flush()
        print(f"\n{words}", file=sys.stderr, flush=True)
        shutil.rmtree(os.environ[REPORTS], ignore_errors=True)
        os._exit(1)


def _end_now(words: str) -> None:
    """End this process, which waits for a rank that is gone, with the words of that rank's failure."""
    _tell_torchrun(RankFailedError(words))
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once a node
        sys.stdout.flush()
        print(f"\n{words}", file=sys.stderr, flush=True)
    if folder := os.environ.get(REPORTS):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _tell_torchrun(error: BaseException) -> None:
    """It reads a file and prints the first failure of all ranks."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE") and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"signal {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")
    return f"exit code {code}"


def _same_error(error: BaseException, report: str) -> bool:
    """Whether another rank's report tells of the same refusal: it says no more than our own error."""
    return bool(str(error)) and traceback.format_exception_only(error)[0].strip() in report


def _own_report() -> Path | None:
    folder = os.environ.get(REPORTS)
    return Path(folder) / f"{os.environ.get('LOCAL_RANK', '0')}.txt" if folder else None
