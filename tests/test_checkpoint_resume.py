"""A run that was saved on one layout goes on with another as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from resuming import check_continues, check_equal, plain, run, write_rows

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp_shard2": {"dp_shard": 2},
    "dp_replicate2": {"dp_replicate": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "dp_shard2-tp2": {"dp_shard": 2, "tp": 2},
    "dp_replicate2-cp2": {"dp_replicate": 2, "cp": 2},
}


def size(degrees: dict[str, int]) -> int:
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    return ranks


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def whole(rows: str) -> Any:
    return plain(rows)


@pytest.fixture(scope="module")
def saved(pool: Pool, rows: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of steps 4 (in the first epoch) and 9 (at its end), of runs on three layouts."""
    folders = {}
    for name in ("one", "dp_shard2-tp2", "dp_replicate2-cp2"):
        folders[name] = tmp_path_factory.mktemp(name)
        degrees = LAYOUTS[name]
        pool.run(run, size(degrees), rows, str(folders[name]), degrees, save_at=(4, 9), trainer={"max_steps": 10})
    return folders


@pytest.mark.parametrize(
    ("here", "there", "step"),
    [
        ("one", "one", 4),
        ("one", "dp_shard2-tp2", 4),
        ("one", "dp_replicate2-cp2", 9),
        ("dp_shard2-tp2", "one", 4),
        ("dp_shard2-tp2", "dp_shard2", 9),
        ("dp_shard2-tp2", "cp2", 4),
        ("dp_replicate2-cp2", "one", 9),
        ("dp_replicate2-cp2", "tp2", 4),
        ("dp_replicate2-cp2", "dp_shard2", 4),
    ],
)
def test_any_layout_goes_on_with_any_other(
    pool: Pool, rows: str, whole: Any, saved: dict[str, Path], here: str, there: str, step: int, tmp_path: Path
) -> None:
    degrees = LAYOUTS[there]
    after = pool.run(run, size(degrees), rows, str(tmp_path), degrees, ckpt=str(saved[here] / f"step-{step}.ckpt"))
    for story in after:
        check_continues(whole, story, step)


@pytest.mark.parametrize("options", [{}, {"save_distributed_checkpoint": False}, {"async_checkpoint": True}], ids=str)
def test_the_same_layout_goes_on_bit_for_bit(pool: Pool, rows: str, options: dict[str, Any], tmp_path: Path) -> None:
    degrees = LAYOUTS["dp_shard2-tp2"]
    whole = pool.run(run, 4, rows, str(tmp_path), degrees, save_at=(4, 13), strategy=options)[0]
    for step in (4, 13):
        ckpt = str(tmp_path / f"step-{step}.ckpt")
        assert Path(ckpt).is_file() is (options.get("save_distributed_checkpoint") is False)
        for story in pool.run(run, 4, rows, str(tmp_path), degrees, ckpt=ckpt):
            check_equal(whole, story, step)
