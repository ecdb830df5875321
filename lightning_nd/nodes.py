"""More than one node: which network to use, and a line on which ranks hear of one that fails or is gone.

Collectives tell that a peer has gone, if they tell anything: not which, nor why, and nothing at all when a machine
vanishes without closing its connections. So each rank keeps one connection to rank 0. The kernel of its host answers
for it (TCP keep-alive), so that a rank that computes for long is not taken for dead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lightning_nd.faults import Progress, goes_on_without, read_progress, stopped_alone

log = logging.getLogger(__name__)

_INTERFACE = "GLOO_SOCKET_IFNAME"
_IDLE, _BETWEEN, _TRIES = 5, 3, 4  # s, s, probes: a host that is gone is noticed after 17 s
_LISTEN = 0.5  # s between two looks at what this rank is doing
_GRACE = 5.0  # s that a rank gets to fail by itself once it has heard that another has failed
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


# -- which network ----------------------------------------------------------------------------------------------------


def choose_interface(environment: ClusterEnvironment, num_nodes: int) -> None:
    """On several nodes, let gloo use the network on which rank 0 is reached, unless the user has said which.

    Gloo takes the address to which the host's name resolves, which often is loopback, or nothing.
    """
    if num_nodes > 1 and not os.environ.get(_INTERFACE) and (name := interface_towards(environment.main_address)):
        log.debug("%s=%s", _INTERFACE, name)
        os.environ[_INTERFACE] = name  # gloo has no argument for it


def interface_towards(address: str) -> str | None:
    """The name of the network interface by which this host reaches an address; None if it cannot be told (IPv4 only).

    Where the address is this host's own, the interface that has it; for a name that stands for loopback here, the
    interface of the default route, else the first that is no loopback.
    """
    names = {own: name for _, name in reversed(socket.if_nameindex()) if (own := _address_of(name)) is not None}
    for target in (address, "192.0.2.1"):  # one of the addresses kept for documentation: nothing is sent to it
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                own = probe.getsockname()[0]
        except OSError:
            continue
        if not own.startswith("127."):
            return names.get(own)
    return next((name for own, name in names.items() if not own.startswith("127.")), None)


def _address_of(interface: str) -> str | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None


# -- torchrun's restarts ----------------------------------------------------------------------------------------------


def meet_again(environ: MutableMapping[str, str], timeout: timedelta) -> dist.Store | None:
    """Under ``torchrun --max-restarts``, a store without what ranks of earlier attempts have left; collective.

    Torchrun keeps one store over its restarts, and a new rank would connect to addresses of ranks that are gone. So
    each rank asks rank 0 under a name that it has just made up, and the answer is the name of this attempt. All learn
    the number of attempts too (``TORCHELASTIC_RESTART_COUNT``): nodes count their own restarts only.

    Args:
        environ: of the process; the count in it is corrected.
        timeout: for the other ranks to come.
    """
    if int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) < 1 or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    shared = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), ranks, is_master=False, timeout=timeout)
    if rank == 0:
        attempt = f"{shared.add('nd/attempts', 1)}-{uuid.uuid4().hex[:8]}"
        answered: set[bytes] = set()
        deadline = time.monotonic() + timeout.total_seconds()
        while shared.add(f"nd/{attempt}/here", 0) < ranks - 1:
            for other in range(1, ranks):
                if shared.check([f"nd/asks/{other}"]) and (name := shared.get(f"nd/asks/{other}")) not in answered:
                    answered.add(name)
                    shared.set(f"nd/answer/{name.decode()}", attempt)
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0: not all of {ranks} ranks have come within {timeout}")
            time.sleep(0.05)
    else:
        own = uuid.uuid4().hex
        shared.set(f"nd/asks/{rank}", own)
        attempt = shared.get(f"nd/answer/{own}").decode()
        shared.add(f"nd/{attempt}/here", 1)
    environ["TORCHELASTIC_RESTART_COUNT"] = str(int(attempt.split("-")[0]) - 1)
    return dist.PrefixStore(f"nd/{attempt}", shared)


# -- who has failed ---------------------------------------------------------------------------------------------------


class Line:
    """This rank's connection to rank 0, or rank 0's to all.

    Lines of JSON: ``{"rank", "host"}`` first; ``{"at": [step, phase]}`` as it changes; ``{"failed": words}`` once, and
    rank 0 passes it on; ``{"bye": steps done}`` before it is closed.

    Args:
        progress: of this rank.
        peers: sockets; of rank 0 all others', else the one to rank 0.
        on_silence: called with the words of another rank's failure if this one does not fail by itself; it does not
            return.
    """

    def __init__(
        self, progress: Progress, peers: list[socket.socket], on_silence: Callable[[str], None] | None
    ) -> None:
        self.progress, self._on_silence = progress, on_silence
        self.first = progress.rank == 0
        self.story: str | None = None
        self._known: dict[socket.socket, dict[str, Any]] = {}
        self._rest: dict[socket.socket, bytes] = {}
        self._left: dict[str, Any] | None = None
        self._closing, self._told, self._sent = False, threading.Event(), ("", -1)
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        for peer in peers:
            self._known[peer], self._rest[peer] = {"rank": 0, "host": _name(peer)}, b""
            self._selector.register(peer, selectors.EVENT_READ)
        if not self.first:
            self._send({"rank": progress.rank, "host": socket.gethostname()})
        self._thread = threading.Thread(target=self._listen, daemon=True, name="line-to-ranks")
        self._thread.start()

    def records(self) -> list[dict[str, Any]]:
        """What the other ranks were last known to be doing, as `Progress` writes it; on rank 0 only."""
        return [known for known in list(self._known.values()) if self.first and "step" in known]

    def fail(self, words: str, consequence: bool) -> str | None:
        """Tell the others that this rank has failed; returns the words of one that failed before it, if there is.

        Args:
            words: of this rank's failure.
            consequence: it may be that of a peer that has gone; wait a moment for its words.
        """
        if consequence:
            self._told.wait(_GRACE - 1)
        with self._lock:
            told, self._closing = self.story, True
            self.story = self.story or words
        self._send({"failed": self.story})
        return told

    def wait_in_vain(self) -> None:
        """Tell that this rank has waited for others for too long."""
        self._send({"waits": True})

    def close(self) -> None:
        """At the end of a run: what ends from now on is no failure."""
        self._closing = True
        self._send({"bye": self.progress.done})
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _LISTEN)

    def _send(self, message: dict[str, Any], *, but: socket.socket | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        for peer in list(self._known):
            if peer is not but:
                with contextlib.suppress(OSError):
                    peer.sendall(data)

    def _listen(self) -> None:
        while not self._closing and (self._known or self._left):
            for key, _ in self._selector.select(_LISTEN):
                self._receive(key.fileobj)  # type: ignore[arg-type]
            here = (self.progress.phase, self.progress.step)
            if not self.first and here != self._sent:
                self._sent = here
                self._send({"at": [self.progress.step, self.progress.phase]})
            self._check_left()
            if self.story is not None and not self._closing and self._on_silence is not None:
                time.sleep(_GRACE)
                if not self._closing:  # it waits in a collective, or computes
                    self._on_silence(self.story)
        for peer in list(self._known):
            peer.close()
        self._selector.close()

    def _receive(self, peer: socket.socket) -> None:
        try:
            data, how = peer.recv(65536), "its process has ended without a word"
        except OSError as error:
            data, how = b"", f"its host does not answer any more ({error.strerror})"
        if not data:
            self._lose(peer, how)
            return
        *lines, self._rest[peer] = (self._rest[peer] + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "bye" in message:
                self._left = {**self._known[peer], "done": message["bye"]}
                self._forget(peer)
                return  # what it says after that is of no interest
            elif "failed" in message:
                self._hear(message["failed"], peer)
            elif "at" in message:
                step, phase = message["at"]
                self._known[peer].update(step=step, phase=phase, time=time.time())
            else:
                self._known[peer].update(message)

    def _check_left(self) -> None:
        """Fail if a rank has left the run whose steps this one goes on with: it will wait for that rank for ever."""
        left, here = self._left, self.progress
        if left is not None and goes_on_without(here.phase, here.step, left["done"]):
            self._left = None
            self._hear(stopped_alone(left, here.rank, here.step), None)

    def _lose(self, peer: socket.socket, how: str) -> None:
        known = self._known[peer]
        self._forget(peer)
        if found := read_progress(self.progress.folder, known["rank"]):  # its last word, where the folder is shared
            known.update(found)
        where = f", step {known['step']}, {known['phase']}" if "step" in known else ""
        self._hear(f"rank {known['rank']} on {known['host']}{where}: {how}.", peer)

    def _hear(self, words: str, peer: socket.socket | None) -> None:
        with self._lock:
            if self.story is not None or self._closing:
                return
            self.story = words
        self._told.set()
        if self.first:
            self._send({"failed": words}, but=peer)

    def _forget(self, peer: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer)
        self._known.pop(peer, None)
        peer.close()


def connect(
    progress: Progress,
    environment: ClusterEnvironment,
    broadcast: Callable[[Any], Any],
    on_silence: Callable[[str], None] | None,
) -> Line | None:
    """Connect every rank with rank 0; collective. None if some rank cannot, which a log line tells.

    Args:
        broadcast: of an object of rank 0.
        on_silence: see `Line`.
    """
    ranks = dist.get_world_size()
    if progress.rank == 0:
        with socket.create_server(("", 0), backlog=ranks) as server:
            token = os.urandom(8).hex()
            broadcast((server.getsockname()[1], token))
            peers = _accept(server, ranks - 1, token)
    else:
        port, token = broadcast(None)
        peers = []
        with contextlib.suppress(OSError):
            peers = [socket.create_connection((environment.main_address, port), timeout=10)]
            peers[0].sendall(token.encode())
            peers[0].settimeout(None)
    if broadcast(len(peers) == ranks - 1) and peers:
        for peer in peers:
            _keep_alive(peer)
        return Line(progress, peers, on_silence)
    for peer in peers:
        peer.close()
    log.warning("NDStrategy: not all ranks reach %s; one that dies is noticed late.", environment.main_address)
    return None


def _accept(server: socket.socket, wanted: int, token: str) -> list[socket.socket]:
    peers: list[socket.socket] = []
    deadline = time.monotonic() + 10
    while len(peers) < wanted and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(OSError):
            peer, _ = server.accept()
            peer.settimeout(left)
            if peer.recv(len(token), socket.MSG_WAITALL) == token.encode():
                peer.settimeout(None)
                peers.append(peer)
            else:
                peer.close()
    return peers


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _BETWEEN, "TCP_KEEPCNT": _TRIES}
    wanted["TCP_USER_TIMEOUT"] = 1000 * (_IDLE + _BETWEEN * _TRIES)  # ms; of what was sent and is not answered
    for name, value in wanted.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _name(peer: socket.socket) -> str:
    try:
        return str(peer.getpeername()[0])
    except (OSError, IndexError):
        return "an unknown host"
