"""What started the processes against what the layout needs, over made-up environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_nd.faults import Progress
from lightning_nd.launch import LocalLauncher, check_world, process_manager, resolve_devices

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
}
NOT_STARTED_BY_SRUN = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NAME": "interactive-session",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "1",
    "SLURM_PTY_PORT": "40000",
}


def test_worlds_that_fit() -> None:
    assert check_world({}, devices=4, tp=2).as_dict() == {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert check_world(TORCHRUN, devices=2).dp_shard == 2
    assert check_world(SLURM, devices=2, num_nodes=2, tp=2).data == 2
    assert check_world({}, devices=1, interactive=True).world_size == 1
    assert check_world({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, devices=2, interactive=True).world_size == 2
    # an interactive shell of SLURM, by the job names that Lightning knows, starts local processes
    assert process_manager({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}) == "local"


@pytest.mark.parametrize(
    ("environ", "asked", "error", "words"),
    [
        (TORCHRUN, {"devices": 4}, ValueError, ["started 2 processes", "devices=4", "--nproc_per_node=4"]),
        (TORCHRUN, {"devices": 1}, ValueError, ["started 2 processes", "devices=2 and num_nodes=1"]),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, {"devices": 2}, ValueError, ["started 4", "num_nodes=2"]),
        (
            {**SLURM, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
            {"devices": 2},
            ValueError,
            ["SLURM_NTASKS=1", "SLURM_NTASKS_PER_NODE=2", "never arrive"],
        ),
        (SLURM, {"devices": 4, "num_nodes": 1}, ValueError, ["4 tasks", "devices=2 and num_nodes=2"]),
        (SLURM, {"devices": 2, "num_nodes": 1}, ValueError, ["4 tasks", "num_nodes=1 = 2 processes"]),
        (NOT_STARTED_BY_SRUN, {"devices": 2}, RuntimeError, ["srun", "env -u SLURM_NTASKS"]),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "8"}, {"devices": 2}, ValueError, ["WORLD_SIZE=8", "devices=2"]),
        ({}, {"devices": 2, "interactive": True}, RuntimeError, ["one process only", "torchrun --nproc_per_node=2"]),
        # degrees
        ({}, {"devices": 3, "tp": 2}, ValueError, ["3 ranks", "tp=2", "divisors of 3"]),
        ({}, {"devices": 2, "dp_shard": 1, "tp": 2, "cp": 2}, ValueError, ["2 ranks", "cp=2", "multiply to 4"]),
        ({}, {"devices": 2, "dp_shard": 0}, ValueError, ["dp_shard", "0"]),
        ({}, {"devices": 2, "dp_shard": -2}, ValueError, ["dp_shard", "-2"]),
        ({}, {"devices": 2, "dp_replicate": -1, "dp_shard": -1}, ValueError, ["dp_replicate", "-1"]),
    ],
)
def test_refusals_say_what_was_given_and_what_to_change(
    environ: dict[str, str], asked: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        check_world(environ, **asked)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "asked", "expected"),
    [
        ({}, {"devices": 3}, 3),
        ({}, {"devices": "auto", "dp_shard": 2, "tp": 2}, 4),
        ({}, {"devices": "auto", "dp_shard": 8, "tp": 2, "num_nodes": 2}, 8),
        ({}, {"devices": "auto", "tp": 2}, 2),
        ({}, {"devices": "auto"}, 1),
        ({}, {"devices": "auto", "tp": 2, "accelerator_devices": 8}, "auto"),
        ({}, {"devices": "auto", "dp_shard": 2, "tp": 2, "accelerator_devices": 8}, 4),
        (TORCHRUN, {"devices": "auto", "tp": 2}, 2),
        (SLURM, {"devices": "auto", "num_nodes": 2}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"devices": "auto", "num_nodes": 2}, 2),
    ],
)
def test_devices_left_open(environ: dict[str, str], asked: dict[str, Any], expected: Any) -> None:
    assert resolve_devices(environ, **asked) == expected


def test_degrees_that_nodes_cannot_share() -> None:
    with pytest.raises(ValueError, match="3 ranks, which 2 nodes cannot share"):
        resolve_devices({}, devices="auto", num_nodes=2, dp_shard=3)


class _External:
    """A cluster environment whose processes run already."""

    creates_processes_externally = True

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass

    def node_rank(self) -> int:
        return 0


def test_a_failing_rank_leaves_a_report_with_step_and_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ND_REPORTS", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")

    told: list[BaseException] = []
    progress = Progress(tmp_path, 3)
    progress.mark("validation", 7)
    strategy = type("S", (), {"on_exception": staticmethod(told.append), "_progress": progress})
    trainer = type("T", (), {"strategy": strategy})

    def fail() -> None:
        raise KeyError("lost row")

    with pytest.raises(KeyError):
        LocalLauncher(_External(), 1, 1).launch(fail, trainer=trainer)  # type: ignore[arg-type]
    text = (tmp_path / "3.txt").read_text()
    assert text.startswith("Traceback")
    last = text.splitlines()[-1]
    assert last.startswith("rank 3 on ")
    assert last.endswith("failed first, at step 7 (validation): KeyError: 'lost row'")


def test_the_trainer_refuses_what_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    from lightning_nd import NDStrategy

    with pytest.raises(ValueError, match="tp=3"):
        Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(tp=3), logger=False)
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(RuntimeError, match="one process only"):
        Trainer(accelerator="cpu", devices=2, strategy=NDStrategy(tp=2), logger=False)
    alone = Trainer(accelerator="cpu", devices=1, strategy=NDStrategy(), logger=False).strategy.launcher
    assert alone is not None and alone.is_interactive_compatible  # noqa: PT018
    monkeypatch.delattr("sys.ps1")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun started 2 processes"):
        Trainer(accelerator="cpu", devices=4, strategy=NDStrategy(), logger=False)
