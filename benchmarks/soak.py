"""Save, kill and resume, many times over random layouts: nothing may be lost.

A run saves often and is killed at random moments: SIGKILL to one rank, or to all of them. Each cycle goes on from
"last" with another layout, in the foreground, in the background, or with one file. In the end every step's rows,
learning rate and loss are compared with those of a run in one process that nobody killed.

make soak ARGS="--cycles 200 --seed 1"
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lightning.pytorch import Callback  # noqa: E402
from resuming import SaveAt, all_rows, run, write_rows  # noqa: E402

from lightning_nd.checkpoint.manifest import find_last, read_manifest  # noqa: E402

LAYOUTS: list[dict[str, int]] = [
    {},
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "cp": 2},
]
FORMATS: list[dict[str, Any]] = [{}, {"async_checkpoint": True}, {"save_distributed_checkpoint": False}]
STEPS = 10_000


class Record(Callback):
    """Writes what each step did, as it is done."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.before:
            return
        rows = all_rows(module._rows, trainer.strategy)  # before the module has put them into its story
        line = {
            "step": trainer.global_step,
            "rate": module.story.rates[-1],
            "loss": float(trainer.strategy.step_loss),
            "rows": rows,
        }
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Every(SaveAt):
    """Saves after every step, and keeps two."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, range(STEPS), save_top_k=2, monitor="step_of_save", mode="max")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        import torch

        trainer.callback_metrics["step_of_save"] = torch.tensor(float(trainer.global_step))
        super().on_train_batch_end(trainer, *args)


def start(world: int, work: Any) -> list[int]:
    """Fork the ranks of a run; their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                log = os.open(os.environ["SOAK_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                work(rank)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return children


def end(children: list[int], grace: float) -> None:
    """Wait for ranks that lost a peer, then kill those that are left."""
    deadline = time.monotonic() + grace
    left = set(children)
    while left:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0]:
                left.remove(child)
        if time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """Run the cycles and print what was found; exit code 1 if something was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["POOL_SHARED_FOLDER"], os.environ["SOAK_LOG"] = str(folder), str(folder / "log")
    rows, saved, record = write_rows(folder / "rows.jsonl"), folder / "saved", folder / "record.jsonl"
    resumed, lost, saving, kinds = 0, 0, 0, {"one": 0, "all": 0}
    began = time.monotonic()
    for cycle in range(given.cycles):
        degrees, options = draw.choice(LAYOUTS), draw.choice(FORMATS)
        world = 1
        for degree in degrees.values():
            world *= degree
        whole, _ = find_last([saved])
        before = read_manifest(whole[0]).step if whole else 0
        lines = record.read_text().splitlines() if record.exists() else []

        def work(rank: int, world: int = world, degrees: Any = degrees, options: Any = options) -> None:
            limits = {"max_steps": STEPS, "enable_checkpointing": True}
            callbacks = [Record(record), Every(str(saved))]
            run(
                rank,
                world,
                rows,
                str(saved),
                degrees,
                ckpt="last",
                trainer=limits,
                strategy=options,
                callbacks=callbacks,
            )

        children = start(world, work)
        waited = time.monotonic()
        while len((record.read_text() if record.exists() else "").splitlines()) < len(lines) + 2:  # it is under way
            time.sleep(0.02)
            if time.monotonic() - waited > 300:
                sys.exit(f"cycle {cycle}: nothing happens; see {folder / 'log'}")
        time.sleep(draw.uniform(0, 1.0))
        kind = draw.choice(("one", "all"))
        kinds[kind] += 1
        for child in children if kind == "all" else [draw.choice(children)]:
            os.kill(child, signal.SIGKILL)
        end(children, grace=15)
        saving += any(path.name.startswith(".") for path in saved.iterdir())  # what is half-written has such a name
        first = json.loads(record.read_text().splitlines()[len(lines)])["step"]
        resumed += 1
        if first != before + 1:
            lost += 1
            print(f"cycle {cycle}: went on at step {first}, the last complete checkpoint was of step {before}")
        what = f"{degrees or 'one process'!s:32}  {options!s:40}"
        print(f"{cycle + 1:4d}  {what}  killed {kind:3}  from step {before}", flush=True)
    steps: dict[int, dict[str, Any]] = {}
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        steps[entry["step"]] = entry  # the last one that did this step
    last = max(steps)
    found: dict[str, Any] = {}

    def reference(rank: int) -> None:
        story = run(rank, 1, rows, str(folder / "whole"), {}, trainer={"max_steps": last})
        (folder / "whole.json").write_text(
            json.dumps({"rows": story.rows, "rates": story.rates, "losses": story.losses})
        )

    end(start(1, reference), grace=3600)
    found = json.loads((folder / "whole.json").read_text())
    wrong = [
        step
        for step, entry in sorted(steps.items())
        if entry["rows"] != found["rows"][step - 1]
        or entry["rate"] != found["rates"][step - 1]
        or abs(entry["loss"] - found["losses"][step - 1]) > 1e-4 * abs(found["losses"][step - 1])
    ]
    took = time.monotonic() - began
    print(
        f"{resumed} cycles in {took:.0f} s ({kinds['one']} with one rank killed, {kinds['all']} with all;"
        f" {saving} in the midst of saving),"
        f" {last} steps: {lost} cycles lost a complete checkpoint,"
        f" {len(wrong)} steps differ from the run that nobody killed" + (f" (first: {wrong[0]})" if wrong else "")
    )
    missing = sorted(set(range(1, last + 1)) - set(steps))
    if missing:
        print(f"steps {missing[:5]} were never done")
    sys.exit(bool(lost or wrong or missing))


if __name__ == "__main__":
    main()
