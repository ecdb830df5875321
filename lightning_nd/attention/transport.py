"""Moving key/value rows and their gradients between the ranks of a context-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_nd.attention.layout import Interval


@dataclass
class Traffic:
    """What one or more attention calls sent, received and computed, for tests, benchmarks and logs.

    `received` and `sent` are bytes; `events` holds `("post", step)`, `("wait", step)` and `("compute", step)` in
    the order in which they happened, with `"grad post"` and `"grad wait"` for gradients on their way home.
    """

    received: int = 0
    sent: int = 0
    messages: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)

    def note(self, what: str, step: int) -> None:
        """Append an event."""
        self.events.append((what, step))

    def overlapped(self) -> tuple[int, int]:
        """How many transfers had computation between their post and their wait, and how many transfers there were."""
        hidden = total = 0
        for i, (what, step) in enumerate(self.events):
            if what not in ("post", "grad post"):
                continue
            total += 1
            wait = (what.replace("post", "wait"), step)
            for later in self.events[i + 1 :]:
                if later[0] == "compute":
                    hidden += 1
                    break
                if later == wait:
                    break
        return hidden, total


class Transfer:
    """Messages in flight; `wait` makes the received tensors readable and lets go of the sent ones."""

    def __init__(self, works: Sequence[dist.Work], keep: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self._works = list(works)
        self._keep = list(keep)
        self._received = list(received)

    def finish(self) -> None:
        """Block until everything has arrived and left."""
        for work in self._works:
            work.wait()
        self._works, self._keep = [], []

    def wait(self) -> list[Tensor]:
        """`finish`, and the received tensors."""
        self.finish()
        received, self._received = self._received, []
        return received


class Exchange:
    """Point-to-point transfers in one process group; every rank posts them in the same order of steps."""

    def __init__(self, group: ProcessGroup, traffic: Traffic | None = None) -> None:
        self.group = group
        self.traffic = traffic if traffic is not None else Traffic()
        self._global = dist.get_process_group_ranks(group)

    def post(self, send: Sequence[Tensor], to: int, receive: Sequence[Tensor], source: int) -> Transfer:
        """Send tensors to group rank `to` and fill others from group rank `source`; either may be empty."""
        ops = [dist.P2POp(dist.isend, x, self._global[to], self.group) for x in send if x.numel()]
        ops += [dist.P2POp(dist.irecv, x, self._global[source], self.group) for x in receive if x.numel()]
        self.traffic.messages += len(ops)
        self.traffic.sent += sum(x.numel() * x.element_size() for x in send)
        self.traffic.received += sum(x.numel() * x.element_size() for x in receive)
        return Transfer(dist.batch_isend_irecv(ops) if ops else [], send, receive)


def take(x: Tensor, rows: Sequence[Interval]) -> Tensor:
    """Rows of a contiguous token-major tensor as one contiguous tensor; a view when they are a single interval."""
    if len(rows) == 1:
        return x[rows[0][0] : rows[0][1]]
    return torch.cat([x[a:b] for a, b in rows]) if rows else x[:0]


def add_rows(home: Tensor, rows: Sequence[Interval], block: Tensor) -> None:
    """Add the rows of `block`, in order, to the intervals `rows` of `home`."""
    at = 0
    for a, b in rows:
        home[a:b] += block[at : at + b - a]
        at += b - a
