"""Fixtures that every test can use."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before torch is imported, here and in the workers: the ranks of a test share few cores.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Not the user's: tests tokenise afresh, and leave nothing.
os.environ["LIGHTNING_ND_CACHE"] = tempfile.mkdtemp(prefix="lightning-nd-tests-")
atexit.register(shutil.rmtree, os.environ["LIGHTNING_ND_CACHE"], ignore_errors=True)

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from pool import Pool  # noqa: E402
from resuming import write_rows  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes that act as ranks: `pool.run(fn, world_size, *args)`."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 24 chats, for runs that are interrupted."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 24)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A test that leaves a process group here fails itself, and not a later one that forks this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("This test left a process group in pytest's process: run it in the pool, or destroy the group.")


@pytest.fixture
def own_group() -> Iterator[None]:
    """For a fit in pytest's own process: its group goes with it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
