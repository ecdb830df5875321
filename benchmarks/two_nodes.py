"""Two nodes on one machine: train over both, lose one, and go on; every number is compared with one process's.

A node is a network namespace with a host name of its own, joined to the other by one cable (a veth pair), and nothing
else: names of hosts do not resolve, and loopback leads nowhere else. Needs root and iproute2 on Linux.

python benchmarks/two_nodes.py [--only torchrun-hsdp ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

PER_NODE = 2
PORT = 29517
LAYOUTS: dict[str, dict[str, int]] = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "cp": {"dp_shard": 1, "cp": 2, "tp": 2},
}
STEPS, SAVE_AT = 8, (2, 4)


# -- the network ------------------------------------------------------------------------------------------------------


class NoNamespaces(RuntimeError):
    """This machine makes no network namespaces; says why."""


def _ip(*words: str, check: bool = True) -> str:
    try:
        made = subprocess.run(["ip", *words], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoNamespaces("iproute2 is not installed") from error
    if check and made.returncode:
        raise NoNamespaces(f"ip {' '.join(words)}: {made.stderr.strip()}")
    return made.stdout


@dataclass
class Node:
    """One of the two: a namespace, its address, and the processes that were started in it."""

    number: int
    namespace: str
    cable: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.177.0.{self.number + 1}"

    def start(self, command: list[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Run a command on this node, its output in a file of its own (``output`` of the process)."""
        there = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {self.host}; exec "$@"',
        ]
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "LIGHTNING_ND_CACHE", "OMP_NUM_THREADS")
        environ = {name: os.environ[name] for name in kept if name in os.environ}
        environ |= {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **variables}
        log = folder / f"{self.host}-{len(self.processes)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [*there, "sh", *command], cwd=folder, env=environ, stdout=file, stderr=file, text=True
            )
        process.output = log  # type: ignore[attr-defined]
        self.processes.append(process)
        return process

    def living(self) -> list[int]:
        """Process ids of all that runs on this node, whoever started it."""
        return [int(word) for word in _ip("netns", "pids", self.namespace, check=False).split()]

    def kill(self) -> None:
        """SIGKILL to every process of this node."""
        for process in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for started in self.processes:
            started.wait()

    def pull_the_cable(self) -> None:
        """The node goes away without a word: its peers get no sign that a connection has ended."""
        _ip("-n", self.namespace, "link", "set", self.cable, "down")

    def listening(self) -> list[str]:
        """Ports of this node on which something listens."""
        table = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True,
            text=True,
        ).stdout
        rows = [line.split() for line in table.splitlines()]
        return [row[1] for row in rows if len(row) > 3 and row[3] == "0A"]


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Make the namespaces; whatever happens, end what runs in them and remove them.

    Raises:
        NoNamespaces: not root, no iproute2, or a kernel that does not allow it.
    """
    if os.name != "posix" or os.geteuid() != 0:
        raise NoNamespaces("making network namespaces needs root")
    token = uuid.uuid4().hex[:6]
    nodes = Node(0, f"nd-{token}-0", f"nd{token}a"), Node(1, f"nd-{token}-1", f"nd{token}b")
    try:
        for node in nodes:
            _ip("netns", "add", node.namespace)
            _ip("-n", node.namespace, "link", "set", "lo", "up")
        a, b = nodes
        _ip("link", "add", a.cable, "netns", a.namespace, "type", "veth", "peer", "name", b.cable, "netns", b.namespace)
        for node in nodes:
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", node.cable)
            _ip("-n", node.namespace, "link", "set", node.cable, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            _ip("netns", "delete", node.namespace, check=False)


# -- the job ----------------------------------------------------------------------------------------------------------


def train(layout: str, folder: Path) -> None:
    """What each process runs: a tiny model, checkpoints, and each step's rows, rate and loss in ``record.jsonl``."""
    import torch
    from lightning.pytorch import Trainer
    from resuming import SaveAt, Trained, make_data
    from soak import Record

    from lightning_nd import NDStrategy

    class Slow(Record):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_start(trainer, *args)
            time.sleep(float(os.environ.get("STEP_TAKES", "0")))

    degrees = LAYOUTS[layout]
    torch.manual_seed(7)
    trainer = Trainer(
        accelerator="cpu",
        devices=PER_NODE,
        num_nodes=2,
        strategy=NDStrategy(**degrees),
        max_steps=STEPS,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SaveAt(str(folder / "saved"), SAVE_AT), Slow(folder / "record.jsonl")],
    )
    ranks = degrees.get("dp_replicate", 1) * degrees["dp_shard"]
    trainer.fit(Trained(), make_data(str(folder / "rows.jsonl"), ranks, 1), ckpt_path="last")


def launch(how: str, nodes: tuple[Node, Node], layout: str, folder: Path, **variables: str) -> list[Any]:
    """Start the job on both nodes; the processes that a user would have started, node by node.

    Args:
        how: ``torchrun``; ``restarts``, the same with ``--max-restarts``; ``lightning``, which starts a node's ranks
            from one process; or ``hand``, rank by rank.
    """
    script = [str(Path(__file__).resolve()), "--train", layout, "--folder", str(folder)]
    main = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(PORT), **variables}
    started: list[Any] = []
    for node in nodes:
        if how == "torchrun":
            options = f"--nnodes=2 --nproc_per_node={PER_NODE} --node_rank={node.number}".split()
            options += [f"--master_addr={nodes[0].address}", f"--master_port={PORT}"]
            started.append(
                node.start([sys.executable, "-m", "torch.distributed.run", *options, *script], folder, variables)
            )
        elif how == "restarts":
            options = f"--nnodes=2 --nproc_per_node={PER_NODE} --max-restarts=2 --monitor-interval=0.5".split()
            options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes[0].address}:{PORT}", "--rdzv-id=job"]
            # it would look up the name of the host to see whose store it is
            options += [f"--local-addr={node.address}", f"--rdzv-conf=is_host={int(node.number == 0)}"]
            started.append(
                node.start([sys.executable, "-m", "torch.distributed.run", *options, *script], folder, variables)
            )
        elif how == "lightning":
            place = {"NODE_RANK": str(node.number)}
            started.append(node.start([sys.executable, *script], folder, {**main, **place}))
        else:
            for local in range(PER_NODE):
                place = {"NODE_RANK": str(node.number), "LOCAL_RANK": str(local), "WORLD_SIZE": str(2 * PER_NODE)}
                started.append(node.start([sys.executable, *script], folder, {**main, **place}))
    return started


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> float:
    """Seconds until something is true.

    Raises:
        TimeoutError: it does not become so in time.
    """
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"after {seconds:.0f} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def steps_done(folder: Path) -> dict[int, dict[str, Any]]:
    """What was recorded of each step; of one that was done twice, the last."""
    file = folder / "record.jsonl"
    lines = [json.loads(line) for line in (file.read_text() if file.exists() else "").splitlines()]
    return {line["step"]: line for line in lines}


def said(processes: list[Any]) -> str:
    """All that processes have printed."""
    return "\n".join(process.output.read_text(errors="replace") for process in processes)


@dataclass
class Loss:
    """How a job ended after it had lost a node."""

    seconds: float
    codes: list[int]
    words: str
    left: list[int]
    ports: list[str]


def lose_a_node(
    how: str, nodes: tuple[Node, Node], layout: str, folder: Path, by: str = "kill", patience: float = 120
) -> Loss:
    """Train, take the second node away once a checkpoint is there, and wait for the first to end."""
    started = launch(how, nodes, layout, folder, STEP_TAKES="0.5")
    here = started[: len(started) // 2]

    def under_way() -> bool:
        if any(process.poll() not in (None, 0) for process in started):
            raise RuntimeError(f"the job has ended:\n{said(started)[-6000:]}")
        return len(steps_done(folder)) >= SAVE_AT[0] + 1 and (folder / "saved" / f"step-{SAVE_AT[0]}.ckpt").exists()

    wait_until(under_way, 240, "the job is not under way")
    nodes[1].kill() if by == "kill" else nodes[1].pull_the_cable()
    seconds = wait_until(lambda: all(p.poll() is not None for p in here), patience, "the first node goes on waiting")
    with contextlib.suppress(TimeoutError):  # children look for their parent once a second
        wait_until(lambda: not nodes[0].living() and not nodes[0].listening(), 5, "processes or ports are left")
    return Loss(seconds, [p.returncode for p in here], said(here), nodes[0].living(), nodes[0].listening())


def finish(how: str, nodes: tuple[Node, Node], layout: str, folder: Path) -> None:
    """Go on from "last" on both nodes to the end.

    Raises:
        RuntimeError: a process has ended with an error.
    """
    started = launch(how, nodes, layout, folder)
    wait_until(lambda: all(process.poll() is not None for process in started), 240, "the resumed job does not end")
    if any(process.returncode for process in started):
        raise RuntimeError(f"the resumed job failed:\n{said(started)[-6000:]}")


def lose_a_rank(nodes: tuple[Node, Node], layout: str, folder: Path) -> float:
    """Kill one rank of the second node under ``--max-restarts``; the job starts anew on both and ends well.

    Returns:
        Seconds until a step is done again.

    Raises:
        RuntimeError: it ended with an error, or nothing was lost.
    """
    started = launch("restarts", nodes, layout, folder, STEP_TAKES="0.5")
    saved = folder / "saved" / f"step-{SAVE_AT[0]}.ckpt"

    def under_way() -> bool:
        if any(process.poll() is not None for process in started):
            raise RuntimeError(f"the job has ended:\n{said(started)[-6000:]}")
        return len(steps_done(folder)) >= SAVE_AT[0] + 1 and saved.exists()

    wait_until(under_way, 240, "the job is not under way")
    victim = next(p for p in nodes[1].living() if b"LOCAL_RANK=1" in Path(f"/proc/{p}/environ").read_bytes())
    file = folder / "record.jsonl"
    os.kill(victim, signal.SIGKILL)
    lines = len(file.read_text().splitlines())
    again = wait_until(lambda: len(file.read_text().splitlines()) > lines + 1, 240, "it does not go on")
    wait_until(lambda: all(process.poll() is not None for process in started), 240, "the job does not end")
    if any(process.returncode for process in started):
        raise RuntimeError(f"the restarted job failed:\n{said(started)[-6000:]}")
    if len(file.read_text().splitlines()) == STEPS:
        raise RuntimeError("no step was done twice: the rank was killed too late")
    return again


def one_process(folder: Path) -> dict[int, dict[str, Any]]:
    """The same steps in one process of plain Lightning."""
    from resuming import plain

    story = plain(str(folder / "rows.jsonl"), max_steps=STEPS)
    told = zip(story.rows, story.rates, story.losses, strict=True)
    return {i: {"rows": rows, "rate": rate, "loss": loss} for i, (rows, rate, loss) in enumerate(told, 1)}


def largest_difference(done: Mapping[int, Mapping[str, Any]], whole: Mapping[int, Mapping[str, Any]]) -> float:
    """Of the losses, relative.

    Raises:
        AssertionError: other steps, rows or learning rates.
    """
    assert sorted(done) == sorted(whole), f"steps {sorted(done)}"
    for step, told in whole.items():
        assert done[step]["rows"] == told["rows"], f"other rows in step {step}"
        assert done[step]["rate"] == told["rate"], f"another rate in step {step}"
    return max(abs(done[step]["loss"] - told["loss"]) / abs(told["loss"]) for step, told in whole.items())


def main() -> None:
    """Print one line for each case; exit code 1 if one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", choices=LAYOUTS, help="what the processes run")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, say torchrun-hsdp-kill")
    given = parser.parse_args()
    if given.train:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        train(given.train, given.folder)
        return
    from resuming import write_rows

    failed = False
    for how in ("torchrun", "lightning", "hand"):
        for layout in LAYOUTS:
            for by in ("kill", "cable"):
                name = f"{how}-{layout}-{by}"
                if given.only and name not in given.only:
                    continue
                folder = Path(tempfile.mkdtemp(prefix="nodes-"))
                write_rows(folder / "rows.jsonl")
                try:
                    with two_nodes() as nodes:
                        lost = lose_a_node(how, nodes, layout, folder, by)
                    with two_nodes() as nodes:
                        finish(how, nodes, layout, folder)
                    worst = largest_difference(steps_done(folder), one_process(folder))
                    ok = lost.seconds <= 30 and all(lost.codes) and not lost.left and not lost.ports and worst <= 1e-5
                    print(
                        f"{name}: node 0 ended after {lost.seconds:.1f} s with {lost.codes}; {len(lost.left)} processes"
                        f" and {len(lost.ports)} ports left; resumed: losses differ by {worst:.1e}"
                        f"{'' if ok else '  FAILED'}",
                        flush=True,
                    )
                    if os.environ.get("SHOW"):
                        print(lost.words[-5000:])
                    failed |= not ok
                    shutil.rmtree(folder)
                except (RuntimeError, TimeoutError, AssertionError) as error:
                    print(f"{name}: {error}  FAILED; logs in {folder}", flush=True)
                    failed = True
    for layout in LAYOUTS:
        name = f"restarts-{layout}"
        if given.only and name not in given.only:
            continue
        folder = Path(tempfile.mkdtemp(prefix="nodes-"))
        write_rows(folder / "rows.jsonl")
        try:
            with two_nodes() as nodes:
                again = lose_a_rank(nodes, layout, folder)
            worst = largest_difference(steps_done(folder), one_process(folder))
            print(
                f"{name}: one rank killed; a step was done again after {again:.1f} s; losses differ by {worst:.1e}"
                f"{'' if worst <= 1e-5 else '  FAILED'}",
                flush=True,
            )
            failed |= worst > 1e-5
            shutil.rmtree(folder)
        except (RuntimeError, TimeoutError, AssertionError) as error:
            print(f"{name}: {error}  FAILED; logs in {folder}", flush=True)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
