"""`lightning-nd doctor`: what it finds, and what it says of it."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_nd import doctor
from lightning_nd.cli import main
from lightning_nd.mesh import ParallelDims


def words(found: Any) -> dict[str, str]:
    return {f.about: f"{f.state}: {f.words} {f.remedy}".strip() for f in found}


def test_every_axis_is_measured_and_nothing_is_wrong_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tp", "2", "--folder", str(tmp_path / "not" / "yet")]) == 0
    out = capsys.readouterr().out
    assert "axis tp: 2 ranks over gloo" in out
    assert "axis dp_shard" not in out
    assert out.rstrip().endswith("Nothing is wrong.")


def test_a_package_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=99.0", "surely-not-installed>=1", "not-for-us; extra == 'lora'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    found = words(doctor.versions())
    assert found["torch"].startswith("bad: ")
    assert ">=99.0 pip install" in found["torch"]
    assert found["surely-not-installed"] == "bad: is not installed pip install 'surely-not-installed>=1'"
    assert "not-for-us" not in found


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    found = words(doctor.disk(tmp_path))["disk"]
    assert found.startswith("bad: ")
    assert "Read-only file system" in found
    assert "default_root_dir" in found


def test_a_driver_without_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert words(doctor.devices())["devices"].startswith("bad: nvidia-smi is here, but torch")


def test_ranks_that_cannot_meet_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "surely-no-network")
    found = words(doctor.links(ParallelDims(dp_shard=2), seconds=20))
    assert found["process group"].startswith("bad: 2 ranks over gloo: ")


@pytest.mark.parametrize(
    ("args", "text"), [("--tp 0", "tp must be"), ("--tp x", "--tp"), ("--config no.yaml", "no.yaml")]
)
def test_what_cannot_be_asked(args: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dp-shard", "1", *args.split()]) == 2
    assert text in capsys.readouterr().err
