"""Several nodes: the network that is used, and one that fails or vanishes is told of on the others."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from resuming import write_rows

from lightning_nd.faults import Progress, lost_a_peer
from lightning_nd.nodes import Line, interface_towards

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import two_nodes


def test_train_on_two_nodes_lose_one_and_go_on(tmp_path: Path) -> None:
    """HSDP under torchrun until a node is killed; then cp across nodes, started by hand; against one process."""
    write_rows(tmp_path / "rows.jsonl")
    try:
        with two_nodes.two_nodes() as nodes:
            lost = two_nodes.lose_a_node("torchrun", nodes, "hsdp", tmp_path)
        with two_nodes.two_nodes() as nodes:
            two_nodes.finish("lightning", nodes, "cp", tmp_path)
    except two_nodes.NoNamespaces as why:
        pytest.skip(f"no network namespaces: {why}")
    assert all(lost.codes)
    assert "on node1, step " in lost.words
    assert "its process has ended without a word" in lost.words
    assert not lost.left
    assert not lost.ports
    done, whole = two_nodes.steps_done(tmp_path), two_nodes.one_process(tmp_path)
    assert two_nodes.largest_difference(done, whole) <= 1e-5


def test_the_interface_is_no_loopback_where_there_is_another() -> None:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    assert interface_towards("127.0.0.1") in (*others, None)
    assert interface_towards("no.such.host.invalid") in (*others, None)


class Ranks:
    """Three ranks in one process, connected by sockets."""

    def __init__(self, folder: Path) -> None:
        self.pairs = [socket.socketpair() for _ in (1, 2)]
        self.silent: dict[int, str] = {}
        ends = [[a for a, _ in self.pairs], *([b] for _, b in self.pairs)]
        self.progress = [Progress(folder, rank) for rank in range(3)]
        self.lines = [
            Line(self.progress[rank], peers, lambda words, rank=rank: self.silent.update({rank: words}))  # type: ignore[misc]
            for rank, peers in enumerate(ends)
        ]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("lightning_nd.nodes._GRACE", 1.5)
    made = Ranks(tmp_path)
    yield made
    for line in made.lines:
        line.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_first_failure_is_told_everywhere(ranks: Ranks) -> None:
    assert ranks.lines[2].fail("rank 2: row 17 is odd", consequence=False) is None
    assert ranks.lines[0].fail("rank 0: gloo: connection closed", consequence=True) == "rank 2: row 17 is odd"
    assert ranks.lines[1].fail("rank 1: gloo: connection closed", consequence=True) == "rank 2: row 17 is odd"
    assert not ranks.silent


def test_a_rank_that_waits_for_one_that_is_gone_is_ended(ranks: Ranks) -> None:
    ranks.progress[2].mark("backward", 6)  # of steps done: it is in the seventh
    until(lambda: any(record["step"] == 7 for record in ranks.lines[0].records()))
    ranks.pairs[1][1].shutdown(socket.SHUT_RDWR)
    until(lambda: {0, 1} <= ranks.silent.keys())
    for rank in (0, 1):
        assert ranks.silent[rank].startswith("rank 2 on ")
        assert ranks.silent[rank].endswith(", step 7, backward: its process has ended without a word.")


def test_ranks_that_are_done_are_not_missed(ranks: Ranks) -> None:
    for line in ranks.lines[1:]:
        line.close()
    time.sleep(1)
    assert ranks.lines[0].story is None
    ranks.lines[0].close()
    time.sleep(2)
    assert not ranks.silent


def test_an_error_of_ones_own_is_not_taken_for_a_consequence() -> None:
    assert lost_a_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234"))
    assert lost_a_peer(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_a_peer(ValueError("timed out"))
