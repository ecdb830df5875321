"""Where the time of a step goes: by phase, by axis and collective, and as a trace."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

#: Phases of a step, by the end of the name of Lightning's action.
_ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "run_training_batch": "other",
}
PHASES = ("data", "forward", "backward", "optimizer", "other")
Interval = tuple[float, float]


class Phases(Profiler):
    """A Lightning profiler that gives every moment of a step to one phase, the innermost that runs.

    Lightning's optimizer step has the forward and backward pass inside it: they are taken out. On CUDA the device is
    waited for where a phase begins and ends, while `measuring` is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.measuring = False
        #: Of the phases since they were cleared.
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, Any]] = []
        self._since = 0.0

    def _count(self) -> None:
        if self.measuring and torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open and self.measuring:
            self.seconds[self._open[-1][0]] += now - self._since
        self._since = now

    @override
    def start(self, action_name: str) -> None:
        if (phase := _phase(action_name)) is not None:
            self._count()
            mark = torch.profiler.record_function(f"phase {phase}")
            mark.__enter__()
            self._open.append((phase, mark))

    @override
    def stop(self, action_name: str) -> None:
        if _phase(action_name) is not None and self._open:
            self._count()
            self._open.pop()[1].__exit__(None, None, None)


def _phase(action: str) -> str | None:
    # of the two hooks of one name, the module's is inside of the strategy's
    if action.startswith("[LightningModule]") and not action.endswith(".optimizer_step"):
        return None
    return _ACTIONS.get(action.rpartition(".")[2])


@dataclass
class StepProfile:
    """What was found, for one optimizer step of one rank.

    Attributes:
        phases: seconds by phase.
        traffic: calls and bytes by axis and collective.
        communicating: seconds in which something was on its way; None where the trace does not say.
        exposed: seconds of these in which nothing was computed.
        by_axis: seconds on their way, by axis, on CUDA.
    """

    phases: dict[str, float]
    traffic: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    communicating: float | None = None
    exposed: float | None = None
    by_axis: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.phases.values())

    def words(self) -> str:
        """Tables of phases, and of collectives by axis."""
        lines = [f"{'phase':<14}{'ms a step':>12}{'share':>9}"]
        for phase in PHASES:
            seconds = self.phases.get(phase, 0.0)
            lines.append(f"{phase:<14}{1e3 * seconds:>12.1f}{seconds / max(self.seconds, 1e-9):>9.1%}")
        lines.append(f"{'step':<14}{1e3 * self.seconds:>12.1f}")
        if self.communicating is not None:
            share = self.communicating / max(self.seconds, 1e-9)
            lines.append(f"{'communication':<14}{1e3 * self.communicating:>12.1f}{share:>9.1%}  at the same time")
        if self.exposed is not None:
            lines.append(f"{'  exposed':<14}{1e3 * self.exposed:>12.1f}{self.exposed / max(self.seconds, 1e-9):>9.1%}")
        if self.traffic:
            lines += ["", f"{'axis':<14}{'collective':<24}{'calls a step':>13}{'MB a step':>12}"]
        for axis, kinds in self.traffic.items():
            for kind, (calls, size) in kinds.items():
                lines.append(f"{axis:<14}{kind:<24}{calls:>13,.0f}{size / 1e6:>12,.2f}")
            if axis in self.by_axis:
                lines.append(f"{'':<14}{'on its way':<24}{1e3 * self.by_axis[axis]:>22,.1f} ms")
        return "\n".join(lines)


class ProfileSteps(Callback):
    """Profiles optimizer steps: some to warm up, some that are timed, one whose bytes are counted, one that is traced.

    Args:
        phases: the Trainer's profiler.
        warmup: optimizer steps before.
        steps: optimizer steps that are timed.
        folder: gets ``trace.json`` and ``profile.json``; rank 0's.
    """

    def __init__(self, phases: Phases, warmup: int, steps: int, folder: Path) -> None:
        self.phases, self.warmup, self.steps, self.folder = phases, warmup, steps, folder
        self.found: StepProfile | None = None
        self._stage = ""
        self._running: Any = None
        self._axes: dict[str, str] = {}
        self._traffic: dict[str, dict[str, tuple[float, float]]] = {}

    @property
    def trace(self) -> Path:
        """The file of the trace."""
        return self.folder / "trace.json"

    @property
    def length(self) -> int:
        """Optimizer steps of the whole run."""
        return self.warmup + self.steps + 2

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from lightning_nd.planner.play import axes_of

        meshes = getattr(trainer.strategy, "meshes", None)
        self._axes = axes_of(meshes) if meshes is not None else {}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step - self.warmup
        stage = "" if step < 0 else "timed" if step < self.steps else "counted" if step == self.steps else "traced"
        if stage == self._stage:
            return
        self._close()
        self._stage = stage
        self.phases.measuring = stage == "timed"
        if not trainer.is_global_zero:
            return
        if stage == "counted":
            from lightning_nd.planner.tracker import Traffic

            self._running = Traffic(self._axes)
        elif stage == "traced":
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if pl_module.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=kinds)
        if self._running is not None:
            self._running.__enter__()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self.phases.measuring = False
        if not trainer.is_global_zero:
            return
        self.found = StepProfile({k: s / self.steps for k, s in self.phases.seconds.items()}, self._traffic)
        if self.trace.is_file():
            read_trace(json.loads(self.trace.read_text())["traceEvents"], self._axes, self.found)
        (self.folder / "profile.json").write_text(json.dumps(asdict(self.found), indent=2) + "\n")

    def _close(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.__exit__(None, None, None)
        if self._stage == "traced":
            self.folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.trace))
            return
        for (axis, kind), (calls, size) in sorted(running.found.items()):
            self._traffic.setdefault(axis, {})[kind] = (float(calls), float(size))


@dataclass
class Spans:
    """When something was on its way between ranks, and when something was computed, of one rank.

    gloo's operations are marked on its own threads; NCCL's are kernels. Where there are no kernels, torch's operations
    on the host are what is computed.
    """

    travelling: list[Interval] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)
    on_host: list[Interval] = field(default_factory=list)

    def add(self, name: str, is_kernel: bool, span: Interval) -> bool:
        """Note an event of torch's profiler; returns whether it is something on its way."""
        travels = "nccl" in name.lower() if is_kernel else name.startswith("gloo:")
        if travels:
            self.travelling.append(span)
        elif is_kernel:
            self.kernels.append(span)
        elif name.startswith("aten::"):
            self.on_host.append(span)
        return travels

    @property
    def exposed(self) -> float:
        """How long something was on its way and nothing was computed, in the unit of the spans."""
        computing = self.kernels or self.on_host
        return covered([*self.travelling, *computing]) - covered(computing)


class TracedStep:
    """Traces what this rank does between its making and `exposed_share`."""

    def __init__(self, device: torch.device) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._device, self._trace = device, torch.profiler.profile(activities=kinds)
        self._trace.__enter__()
        self._since = time.perf_counter()

    def exposed_share(self) -> float:
        """End the trace; the share of its time in which something was on its way and nothing was computed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._since
        self._trace.__exit__(None, None, None)
        spans = Spans()
        for event in self._trace.profiler.kineto_results.events():  # type: ignore[union-attr]
            is_kernel = event.device_type() == torch.autograd.DeviceType.CUDA
            if not (is_kernel and event.name().startswith(("Memcpy", "Memset"))):
                spans.add(event.name(), is_kernel, (event.start_ns(), event.start_ns() + event.duration_ns()))
        return spans.exposed / 1e9 / seconds


def read_trace(events: Iterable[dict[str, Any]], axes: dict[str, str], into: StepProfile) -> None:
    """Add what a trace of one step says of communication; NCCL's kernels name their process group."""
    spans = Spans()
    by_axis: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if spans.add(str(event.get("name", "")), event.get("cat") == "kernel", span):
            group = str((event.get("args") or {}).get("Process Group Name", ""))
            if group in axes:
                by_axis[axes[group]].append(span)
    if spans.travelling:
        into.communicating = covered(spans.travelling) / 1e6
        into.exposed = spans.exposed / 1e6
    into.by_axis = {axis: covered(found) / 1e6 for axis, found in by_axis.items()}


def covered(spans: Iterable[Interval]) -> float:
    """The length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
