"""What each rank is doing, and what to say when one fails, runs out of memory, or keeps the others waiting."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

#: The order of a step; a rank that is earlier in it is behind.
PHASES = ("setup", "loading", "data", "forward", "backward", "optimizer", "validation", "saving")
_OF_A_STEP = ("data", "forward", "backward", "optimizer")
_RECORD = 256  # bytes: one short write, seen whole or not at all
_runs = itertools.count()  # of this process: what is told of one run says nothing of the next


class Progress:
    """The place of this rank in the run, written to a small file that the other ranks can read.

    Args:
        folder: shared by the ranks of a node, or of the job if it is on a shared file system.
        rank: the global rank.
        remember: leave a note in the folder of where the run ended; for folders that end with the job.
    """

    def __init__(self, folder: Path, rank: int, remember: bool = False) -> None:
        self.folder = folder
        self.rank = rank
        self.remember = remember
        self.step = self.done = 0
        self.phase = "setup"
        self.rows = 0
        self.longest = 0
        self.keep = False
        #: The connection on which other ranks' failures are heard; a `lightning_nd.nodes.Line`.
        self.line: Any = None
        self._started = time.time()
        self._run = next(_runs)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)

    def mark(self, phase: str, done: int) -> None:
        """Note that this rank enters a phase, with ``done`` optimizer steps behind it.

        Steps are told from 1 on: the one that is worked on, or the last one for what comes after it.
        """
        self.phase, self.step, self.done = phase, done + (phase in _OF_A_STEP), done
        if phase == "data":
            self.rows = self.longest = 0  # of the batch before
        self._write(time=time.time())

    def _write(self, **more: Any) -> None:
        record = {"rank": self.rank, "host": socket.gethostname(), "step": self.step, "phase": self.phase, **more}
        record |= {"done": self.done, "run": self._run}
        os.pwrite(self._file, json.dumps(record).ljust(_RECORD).encode(), 0)

    def see(self, batch: Any) -> None:
        """Note the shape of the batch that is worked on."""
        ids = batch.get("input_ids") if isinstance(batch, dict) else None
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            self.rows, self.longest = int(ids.shape[0]), int(ids.shape[1])

    def close(self) -> None:
        """Remove this rank's file, unless it is to be kept, and say goodbye to the others."""
        if self.line is not None:
            self.line.close()
            self.line = None
        if self._file >= 0:
            if not self.keep:
                self._write(time=time.time())
                with contextlib.suppress(OSError):
                    if self.remember:
                        self._path(self.rank).rename(_left(self.folder, self.rank))
                    else:
                        self._path(self.rank).unlink()
            os.close(self._file)
            self._file = -1

    def explain(self, error: BaseException, module: Any = None) -> str:
        """Words that belong under an error of this rank: where it happened, and what to do about it.

        Args:
            error: that this rank has met.
            module: the LightningModule, to plan its memory where that ran out.
        """
        lines = [f"rank {self.rank} on {socket.gethostname()}, step {self.step}, {self.phase}"]
        if self.rows:
            lines[0] += f"; micro-batch of {self.rows} rows, the longest of {self.longest} tokens"
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            lines += self._out_of_memory(module)
        elif "data is not allocated yet" in str(error):
            lines.append(
                "Gradients and weights are DTensors here. For norms use self.trainer.strategy.grad_norm() (Lightning's"
                " grad_norm reads tensors that have no data of their own), for values tensor.full_tensor()."
            )
        elif re.search(r"tim(ed|e) ?-?out", str(error), re.IGNORECASE):
            lines += self._who_is_behind()
        return "\n".join(lines)

    def _out_of_memory(self, module: Any) -> list[str]:
        planned: list[str] = []
        try:
            from lightning_nd.planner.of_run import out_of_memory_words

            if module is not None and self.rows:
                planned = out_of_memory_words(module, self.rows, self.longest)
        except Exception:  # the error itself is what counts
            planned = []
        if planned:
            return ["Out of memory.", *planned]
        return [
            "Out of memory. Most likely to help: activation_checkpointing='full' (one activation a block is kept),"
            " and a smaller micro_batch_size with a larger accumulate_grad_batches (same result). Then: a shorter"
            " max_length, more ranks on dp_shard or tp."
        ]

    def _who_is_behind(self) -> list[str]:
        # Others that wait in vain will find out in this moment too; those that say nothing are the ones waited for.
        self._write(time=time.time(), waits=True)
        if self.line is not None:
            self.line.wait_in_vain()
        time.sleep(1)
        # Not those that an earlier run has left here.
        by_rank = {r["rank"]: r for r in read_all(self.folder) if r["time"] > self._started - 120}
        for heard in self.line.records() if self.line is not None else []:
            by_rank.setdefault(heard["rank"], heard)  # of hosts that do not share the folder
        if len(by_rank) < 2:
            return ["A collective timed out; only this rank's progress can be seen from here."]
        return ["A collective timed out: some rank did not join it.", *who_is_behind(list(by_rank.values()))]

    def _path(self, rank: int) -> Path:
        return _file_of(self.folder, rank)


def who_is_behind(records: list[dict[str, Any]]) -> list[str]:
    """One line for each of the ranks that have come least far, at most eight; not of those that wait for others."""
    if all(r.get("waits") for r in records) and (words := _saves_alone(records)):
        return [words]
    records = [r for r in records if not r.get("waits")] or records

    def place(record: dict[str, Any]) -> tuple[int, int]:
        return int(record["step"]), PHASES.index(record["phase"])

    last = min(map(place, records))
    lines = []
    for record in [r for r in records if place(r) == last][:8]:
        age = time.time() - record["time"]
        lines.append(
            f"Behind: rank {record['rank']} on {record['host']}, since {age:.0f} s at step {record['step']},"
            f" {record['phase']}"
        )
    return lines


def _saves_alone(records: list[dict[str, Any]]) -> str | None:
    saving = [f"rank {r['rank']} on {r['host']}" for r in records if r["phase"] == "saving"]
    others = [
        f"rank {r['rank']} on {r['host']}, at step {r['step']}, {r['phase']}" for r in records if r["phase"] != "saving"
    ]
    if not saving or not others:
        return None
    return (
        f"{' and '.join(saving[:8])} waited in a save for all ranks to join it, and these did not come:"
        f" {'; '.join(others[:8])}. Call trainer.save_checkpoint on every rank."
    )


def left_alone(folder: Path) -> str | None:
    """Words for ranks that work on a step without one that has ended the same run before it; None if there are none."""
    gone = [found for path in folder.glob("left-*.json") if (found := _read(path)) is not None]
    for here in read_all(folder) if gone else []:
        for left in gone:
            if left["run"] == here["run"] and goes_on_without(here["phase"], here["step"], left["done"]):
                return stopped_alone(left, here["rank"], here["step"])
    return None


def goes_on_without(phase: str, step: int, last: int) -> bool:
    """Whether a rank at this place works on a step that comes after the last one of another rank."""
    return phase in _OF_A_STEP[1:] and step > last


def stopped_alone(left: Mapping[str, Any], rank: int, step: int) -> str:
    """Words for a rank that has ended its run (``rank``, ``host``, ``done``) while another goes on."""
    return (
        f"rank {left['rank']} on {left['host']} has ended its run after step {left['done']}, and rank {rank} goes on"
        f" with step {step}. All ranks must stop together: where a callback sets trainer.should_stop, let all decide"
        " (trainer.strategy.reduce_boolean_decision(stop, all=False))."
    )


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error may be the consequence of another rank's: words of the libraries that move tensors."""
    words = r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket|tim(ed|e) ?-?out"
    return isinstance(error, RuntimeError) and re.search(words, str(error), re.IGNORECASE) is not None


def read_progress(folder: Path, rank: int) -> dict[str, Any] | None:
    """What a rank is doing (``rank``, ``host``, ``step``, ``phase``, ``time``); None once its run is over."""
    return _read(_file_of(folder, rank))


def last_seen(folder: Path, rank: int) -> dict[str, Any] | None:
    """The same, and where it was when its run was over."""
    return read_progress(folder, rank) or _read(_left(folder, rank))


def read_all(folder: Path) -> list[dict[str, Any]]:
    """What all ranks are doing that write into a folder, in their order."""
    return [found for path in sorted(folder.glob("progress-*.json")) if (found := _read(path)) is not None]


def _left(folder: Path, rank: int) -> Path:
    return folder / f"left-{rank:05d}.json"


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"progress-{rank:05d}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
