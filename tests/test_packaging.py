"""The wheel has everything that a run needs, and says what it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from lightning_nd import NDStrategy, __version__

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer is needed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "lightning_nd", tmp_path / "lightning_nd", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / "dist" / done.stdout.split()[-1]) as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read(next(n for n in names if n.endswith("/METADATA"))).decode())
    files = [path.relative_to(tmp_path) for path in (tmp_path / "lightning_nd").rglob("*") if path.is_file()]
    assert {str(path) for path in files} <= names
    assert "lightning_nd/py.typed" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)
    assert metadata["Version"] == __version__
    assert {"lora", "cuda", "docs", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["License-Expression"] == "Apache-2.0"


def test_what_is_pinned_is_what_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {name.lower().replace("_", "-") for name in pins}
    optional = project["optional-dependencies"]
    asked = [*project["dependencies"], *optional["lora"], *optional["docs"], *optional["dev"]]
    names = {spec.partition("[")[0].partition(">")[0].strip().lower() for spec in asked}
    assert names - {"setuptools"} <= pinned


def test_the_other_package_of_lightning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.warns(UserWarning, match=r"import lightning\.pytorch as pl"):
        NDStrategy()
