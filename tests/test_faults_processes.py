"""A rank that is killed or hangs, in a user's own processes: the job ends, says why, and leaves nothing behind.

Reported elsewhere: E01 (others wait, the failing rank hangs at exit), E02 (nobody can tell who is behind).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCALE = float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))
TIMEOUT = 8  # s, of collectives
SCRIPT = """
import ctypes, os, signal, time
from datetime import timedelta
from pathlib import Path

def leave_alone(now):  # rank 1, while ranks start
    if now and os.environ.get("LOCAL_RANK") == "1":
        Path("fault").write_text(os.environ["MASTER_PORT"])
        os.kill(os.getppid(), signal.SIGTERM if {rank} else signal.SIGKILL)

leave_alone({fault!r} == "before the import")
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_nd import NDStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        return self.net(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(40, 8), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Fault(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == {rank}:
            Path("fault").write_text(os.environ.get("MASTER_PORT", "0"))
            exec({fault!r})

class Saves(Callback):
    def on_exception(self, trainer, *_):
        trainer.save_checkpoint("saved.ckpt")

leave_alone({fault!r} == "after the import")
trainer = Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(dp_shard=2, timeout=timedelta(seconds={timeout})),
                  max_steps=20, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False, callbacks=[Fault(), {more}])
trainer.fit(Module())
{after}
"""
FAULTS = {
    "killed": (1, "os.kill(os.getpid(), signal.SIGKILL)"),
    "rank-0-killed": (0, "os.kill(os.getpid(), signal.SIGKILL)"),
    "hangs": (1, "time.sleep(1000)"),
    "rank-0-hangs": (0, "ctypes.PyDLL(None).sleep(1000)"),  # in C, with the interpreter's lock: no thread runs
    "stops-alone": (1, "trainer.should_stop = True"),
    # and goes on to where it waits for the others, as they wait for it
    "stops-alone-and-stays": (1, "trainer.should_stop = True"),
    "rank-0-stops-alone-and-stays": (0, "trainer.should_stop = True"),
    "torchrun-hangs": (1, "time.sleep(1000)"),
    "raises-and-saves": (1, "raise ValueError('mine')"),
    # rank 0 is gone before rank 1 has met it
    "start-killed": (0, "before the import"),
    "start-ended-later": (1, "after the import"),
}


@dataclass
class Ended:
    """How a job ended."""

    code: int
    seconds: float  # after the fault
    said: str
    left: list[str]
    listens: bool


def job(folder: Path, name: str) -> Ended:
    """Run the script with one of the faults."""
    rank, fault = FAULTS[name]
    (folder / "train.py").write_text(
        SCRIPT.format(
            rank=rank,
            fault=fault,
            timeout=TIMEOUT,
            more="Saves()" if "saves" in name else "",
            after="time.sleep(1000)" if "stays" in name else "",
        )
    )
    keep = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")}
    environ = {**keep, "PYTHONPATH": os.pathsep.join([str(ROOT), keep.get("PYTHONPATH", "")]), "PYTHONHASHSEED": "0"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--monitor-interval=0.5"]
    command = [sys.executable, *(torchrun if name.startswith("torchrun") else []), str(folder / "train.py")]
    with (folder / "said").open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file)
    try:
        code = process.wait(timeout=100 * SCALE)
    except subprocess.TimeoutExpired:
        process.kill()
        code = 0
    began = (folder / "fault").stat().st_mtime if (folder / "fault").exists() else 0.0
    seconds = time.time() - began
    # children look for their parent once a second, once they have imported the package
    deadline = time.monotonic() + (30 if name.startswith("start") else 3) * SCALE
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    with socket.socket() as probe:
        listens = probe.connect_ex(("127.0.0.1", int((folder / "fault").read_text() or 0))) == 0
    return Ended(code, seconds, (folder / "said").read_text(), list(left.values()), listens)


def processes_of(folder: Path) -> dict[int, str]:
    """Command lines of the processes that run a script in a folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder) in (words := path.read_text()):
                found[int(path.parent.name)] = words
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All of them at once: most of the time they wait."""
    found: dict[str, Ended] = {}
    folders = {name: tmp_path_factory.mktemp(name) for name in FAULTS}
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: job(folders[name], name)}))  # type: ignore[misc]
        for name in FAULTS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_the_job_ends_says_why_and_leaves_nothing(ended: dict[str, Ended], name: str) -> None:
    found = ended[name]
    assert found.code != 0, found.said
    bound = 30 if "hang" not in name else TIMEOUT + 30
    assert found.seconds < bound * SCALE, found.said
    assert found.left == []
    assert not found.listens
    expected = {
        "killed": r"rank 1 on \S+ ended with signal SIGKILL \(often: out of memory\) at step 4 \(data\)\.",
        "rank-0-killed": r"^(?!.*Traceback).*rank 0 on \S+ has ended without a word, as when it is killed "
        r"\(often: out of memory\), at step 4 \(data\)\.",
        "hangs": r"Behind: rank 1 on \S+, since \d+ s at step 4, data",
        "rank-0-hangs": r"Behind: rank 0 on \S+, since \d+ s at step 4, data",
        "stops-alone": r"rank 1 on \S+ has ended (without an error.*give every data rank the same number"
        r"|its run after step 4, and rank 0 goes on with step 5)",
        "stops-alone-and-stays": r"rank 1 on \S+ has ended its run after step 4, and rank 0 goes on with step 5",
        "rank-0-stops-alone-and-stays": r"rank 0 on \S+ has ended its run after step 4, and rank 1 goes on with step 5",
        "torchrun-hangs": r"Behind: rank 1 on \S+, since \d+ s at step 4, data",
    }
    if name == "raises-and-saves":  # the first error is shown last
        assert re.search(r"rank 1 on .* failed first, at step 4 .*ValueError: mine\n+$", found.said), found.said[-3000:]
    assert re.search(expected.get(name, ""), found.said, re.DOTALL), found.said[-3000:]
