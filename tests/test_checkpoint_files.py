"""Checkpoints on disk: whole or not there, checked byte by byte, and nothing in them is run or followed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from pool import Pool, WorkerError
from resuming import SaveAt, check_equal, run

from lightning_nd.checkpoint import files
from lightning_nd.checkpoint.inspect import Contents, differences
from lightning_nd.checkpoint.manifest import (
    FORMAT,
    CheckpointError,
    Manifest,
    _checksum,
    damage,
    find_last,
    read_manifest,
)
from lightning_nd.cli.main import main

SHORT: dict[str, Any] = {"max_steps": 6}


@pytest.fixture(scope="module")
def made(pool: Pool, rows: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``step-2.ckpt`` and ``step-4.ckpt`` of a run on two ranks, and a one-file ``one/step-4.ckpt``."""
    folder = tmp_path_factory.mktemp("made")
    pool.run(run, 2, rows, str(folder), {"dp_shard": 2}, save_at=(2, 4), trainer=SHORT)
    one = {"save_distributed_checkpoint": False}
    pool.run(run, 1, rows, str(folder / "one"), {}, save_at=(4,), trainer=SHORT, strategy=one)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


# -- killed while saving ----------------------------------------------------------------------------------------------


def in_child(work: Callable[[], Any]) -> Any:
    """What a forked process returns; the signal or code with which it ended, if it did not."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer = pickle.dumps(work())
            with open(writing, "wb") as pipe:
                pipe.write(answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return pickle.loads(answer) if status == 0 else status


def kill_at(phase: str) -> None:
    """End this process at a phase of the second save."""
    seen: list[str] = []

    def hook(name: str) -> None:
        seen.append(name)
        if name == phase and seen.count("staged") == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    files._phase_hook = hook


def killed_at_each_phase(
    rank: int, world: int, rows: str, folder: str, phases: tuple[str, ...], options: dict[str, Any]
) -> list[tuple[str, int, list[str]]]:
    """Die while ``same.ckpt`` is replaced, go on from "last"; the step gone on from, and what is left, by phase."""
    limits = {**SHORT, "enable_checkpointing": True}
    whole = in_child(lambda: run(rank, world, rows, f"{folder}/whole", {}, trainer=SHORT))
    found = []
    for phase in phases:
        place = f"{folder}/{phase}"

        def train(ckpt: str | None, place: str = place, strategy: dict[str, Any] | None = None) -> Any:
            save = SaveAt(place, (2, 4), filename="same", save_top_k=1, enable_version_counter=False)
            return run(rank, world, rows, place, {}, ckpt=ckpt, trainer=limits, callbacks=[save], strategy=strategy)

        def die(phase: str = phase, train: Any = train) -> None:
            kill_at(phase)
            train(None, strategy=options)

        assert in_child(die) == -signal.SIGKILL
        after = in_child(lambda train=train: train("last"))
        step = 6 - len(after.losses)
        check_equal(whole, after, step)
        found.append((phase, step, [path.name for path in Path(place).iterdir() if path.name.startswith(".")]))
    return found


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        ({}, files.PHASES),
        ({"async_checkpoint": True}, ("shard", "manifest", "replaced")),
        ({"save_distributed_checkpoint": False}, ("staged", "shards", "published")),
    ],
    ids=["sync", "async", "one-file"],
)
def test_killed_at_any_moment_of_saving_a_run_goes_on(
    pool: Pool, rows: str, options: dict[str, Any], phases: tuple[str, ...], tmp_path: Path
) -> None:
    found = pool.run(killed_at_each_phase, 1, rows, str(tmp_path), phases, options, timeout=240, process_group=False)[0]
    # complete once its manifest is there, whatever its name is then
    complete = ("manifest", "replaced", "published")
    assert [(phase, step) for phase, step, _ in found] == [(p, 4 if p in complete else 2) for p in phases]
    assert not [left for _, _, left in found if left]


# -- damaged ----------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "meta.pt"])
def test_damage_is_found(copy: Path, name: str, harm: Any) -> None:
    harm(copy / "step-4.ckpt" / name)
    (words,) = damage(copy / "step-4.ckpt")
    assert words.startswith(name)
    assert damage(copy / "step-2.ckpt") == []


@pytest.mark.parametrize("harm", [flip, cut])
def test_damage_of_one_file_is_found(copy: Path, harm: Any) -> None:
    path = copy / "one" / "step-4.ckpt"
    assert damage(path) == []
    harm(path)
    assert damage(path)


def going_on(rank: int, world: int, rows: str, folder: str, ckpt: str) -> int:
    callback = SaveAt(folder, ())
    limits = {**SHORT, "enable_checkpointing": True}
    after = run(rank, world, rows, folder, {"dp_shard": 2}, ckpt=ckpt, trainer=limits, callbacks=[callback])
    return 6 - len(after.losses)


def test_the_one_before_is_used_and_the_reason_said(pool: Pool, rows: str, copy: Path) -> None:
    flip(copy / "step-4.ckpt" / "__1_0.distcp")
    assert pool.run(going_on, 2, rows, str(copy), "last") == [2, 2]
    said = pool.output(0)
    assert "step-4.ckpt is damaged: __1_0.distcp is not as it was written" in said
    assert "step-2.ckpt" in said
    with pytest.raises(WorkerError, match=r"damaged: __1_0.distcp .* newest complete one beside it is .*step-2.ckpt"):
        pool.run(going_on, 2, rows, str(copy), str(copy / "step-4.ckpt"))


def test_nothing_whole_is_no_reason_to_start_anew(pool: Pool, rows: str, copy: Path) -> None:
    for step in (2, 4):
        (copy / f"step-{step}.ckpt" / "manifest.json").unlink()
    with pytest.raises(WorkerError, match="none is whole"):
        pool.run(going_on, 2, rows, str(copy), "last")


def test_last_is_the_newest_complete_one(copy: Path) -> None:
    whole, skipped = find_last([copy, copy / "missing"])
    assert [path.name for path in whole] == ["step-4.ckpt", "step-2.ckpt"]
    assert not skipped
    cut(copy / "step-4.ckpt" / "__0_0.distcp")
    whole, skipped = find_last([copy])
    assert [path.name for path in whole] == ["step-2.ckpt"]
    assert "step-4.ckpt: __0_0.distcp has" in skipped[0]


# -- of others --------------------------------------------------------------------------------------------------------


def change(folder: Path, **values: Any) -> Path:
    file = folder / "manifest.json"
    changed = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({**changed, "sha256": _checksum(changed)}))
    return folder


def test_a_bit_of_the_manifest_that_has_changed_is_found(copy: Path) -> None:
    file = copy / "step-4.ckpt" / "manifest.json"
    whole = file.read_bytes()
    random = Random(0)
    places = [*sorted(random.sample(range(len(whole)), 400)), whole.index(b'"files"') + 2]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << random.randrange(8)]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            read_manifest(copy / "step-4.ckpt")
    assert [path.name for path in find_last([copy])[0]] == ["step-2.ckpt"]


def test_manifests_without_a_checksum_of_their_own_are_read(copy: Path) -> None:
    file = copy / "step-4.ckpt" / "manifest.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({name: v for name, v in values.items() if name != "sha256"} | {"format": 1}))
    assert read_manifest(copy / "step-4.ckpt").step == 4


@pytest.mark.parametrize("place", [0, 200, -1])
def test_a_bit_of_the_metadata_that_has_changed_is_found(
    copy: Path, tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy / "step-4.ckpt" / ".metadata"
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)
    assert main(["export", "--checkpoint", str(copy / "step-4.ckpt"), "--output", str(tmp_path / "out")]) == 2
    assert "step-4.ckpt is damaged: .metadata" in capsys.readouterr().err


def test_a_newer_format_is_refused_by_name(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint format {FORMAT + 1}; this lightning-nd reads .* Update"):
        read_manifest(change(copy / "step-4.ckpt", format=FORMAT + 1))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_names_that_lead_out_are_refused(copy: Path, name: str) -> None:
    entry = {"size": 1, "sha256": "0"}
    with pytest.raises(CheckpointError, match="not inside it"):
        read_manifest(change(copy / "step-4.ckpt", files={name: entry}))


def test_links_that_lead_out_are_not_followed(copy: Path, tmp_path: Path) -> None:
    file = copy / "step-4.ckpt" / "__1_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "outside the checkpoint" in damage(copy / "step-4.ckpt")[0]


class Harm:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("harmed",))


def test_no_code_in_a_checkpoint_is_run(copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (copy / "step-4.ckpt" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CheckpointError, match="mkdir has no place"):
        Contents.of(copy / "step-4.ckpt")
    torch.save({"state_dict": {}, "x": Harm()}, copy / "one.ckpt")
    with pytest.raises(CheckpointError):
        read_manifest(copy / "one.ckpt")
    torch.save(Harm(), copy / "step-2.ckpt" / "meta.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        Contents.of(copy / "step-2.ckpt").rest()
    assert not Path("harmed").exists()


def test_metadata_that_leads_out_is_refused(copy: Path) -> None:
    folder = copy / "step-4.ckpt"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../one/step-4.ckpt"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of it"):
        Contents.of(folder)


# -- the command line -------------------------------------------------------------------------------------------------


def test_ls_verify_and_diff(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(copy)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4
    assert "dp_shard=2" in table[1]
    assert "complete" in table[1]
    assert main(["checkpoint", "verify", str(copy)]) == 0
    flip(copy / "step-4.ckpt" / "__0_0.distcp")
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(copy)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("DAMAGED") == 1
    assert "its checksum differs" in captured.err
    assert main(["checkpoint", "verify", str(copy / "step-2.ckpt")]) == 0
    assert main(["checkpoint", "diff", str(copy / "step-2.ckpt"), str(copy / "step-2.ckpt")]) == 0
    assert main(["checkpoint", "ls", str(copy / "nothing")]) == 2


def test_a_reader_that_goes_away_is_no_error(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        assert main(["checkpoint", "ls", str(copy)]) == 141
    assert capsys.readouterr().err == ""


def test_differences_are_those_of_training(made: Path) -> None:
    lines = differences(Contents.of(made / "step-2.ckpt"), Contents.of(made / "step-4.ckpt"))
    assert lines[0] == "step: 2 | 4"
    names = {line.split(":")[0] for line in lines}
    assert "state_dict.model.model.layers.0.mlp.up_proj.weight" in names
    assert "optimizer_0.state.model.lm_head.weight.exp_avg" in names
    # saved on two ranks and on one: the same run
    two, one = Contents.of(made / "step-4.ckpt"), Contents.of(made / "one" / "step-4.ckpt")
    for name in one.weights():
        assert (one.weight(name) - two.weight(name)).abs().max() <= 1e-5 * one.weight(name).abs().max(), name


def test_a_manifest_survives_its_way_through_json() -> None:
    manifest = Manifest(3, 1, {"tp": 2}, 2, 1.5, files={"a": {"size": 1, "sha256": "0"}})
    assert Manifest.parse(Path("x"), json.loads(json.dumps(manifest.as_dict()))) == manifest
