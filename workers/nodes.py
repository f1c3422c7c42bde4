"""The launchers of one group on several hosts: who is there, which epoch begins, and that all end it; no processes.

"Node" is torchrun's word for a host. The launcher of node 0 leads. It waits until every node says `Here`, which means
that nothing of an earlier epoch is left on it, counts the epoch up and says `Start`. A node whose ranks are dying says
`Dying`, so that all others end theirs at once, and `Ended` when they have gone. Their connections are CURVE over TCP,
see `workers.curve`; the messages are msgpack.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq
import zmq.utils.monitor

from workers import wire
from workers.curve import QUIET, REFUSED, ClusterKey, Connections, Guard
from workers.epoch import NODE, Death
from workers.errors import ModelLoadError, StartError
from workers.hosts import Hosts, Meeting, News, Next, place
from workers.rendezvous import (
    PROTOCOL,
    Dying,
    Ended,
    Here,
    Leave,
    Message,
    Over,
    Ping,
    Refused,
    Start,
    decode,
    encode,
)

log = logging.getLogger("workers")

LARGEST = 1 << 16  # bytes of a message
LOST = 1.0  # seconds after a disconnect in which the nodes are asked whether they can be reached
PATIENCE = 15.0  # seconds node 0 waits for the last node to end an epoch, before it decides why the epoch died
AGAIN = 3.0  # seconds after which a node says again that it is there: it may have been refused, or not heard
# Of one death each node tells another story; what comes first here is the cause, and what comes last its echo.
CAUSES = ("fenced", "model", "deadline", "rank", "peer", "supervisor", "exception", "lost", "told")


class _Node(ABC):
    """What both kinds of node need: a socket, and what is known of the running epoch."""

    def __init__(self, hosts: Hosts, kind: int) -> None:
        self._hosts = hosts
        self._key = ClusterKey.read(hosts.key_file)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        self._epoch = 0
        self._told = False  # the others know that it is dying, or leaving
        self._news = News()

    def news(self) -> News:
        self._take()
        return self._news

    def dying(self) -> None:
        if not self._told:
            self._told = True
            self._say(Dying(self._epoch))

    def leave(self) -> None:
        if not self._news.leave:
            self._news.leave = True
            self._say(Leave(self._epoch))

    @abstractmethod
    def _take(self) -> None:
        """All that has come, without waiting."""

    @abstractmethod
    def _say(self, message: Message) -> None:
        """To whoever must hear it; what is not connected does not."""

    def _begin(self, epoch: int) -> None:
        self._epoch, self._told, self._news = epoch, False, News()

    def _end(self, kind: str, text: str) -> None:
        if self._news.ended is None:
            self._news.ended = Death(kind, text, None)


class Leader(_Node):
    """Node 0's launcher among the others."""

    def __init__(self, hosts: Hosts, count: Callable[[], int]) -> None:
        """`count` gives the next epoch's number. Raises StartError where the endpoint cannot be listened on."""
        self._address, self._interface = place(hosts)
        super().__init__(hosts, zmq.ROUTER)
        self._count = count
        self._guard = Guard(self._context, self._key)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a node that connects anew is not held up by its own past
        self._key.serve(self._socket, LARGEST)
        self._connections = Connections(self._socket, "the launcher of node 0")
        if ipaddress.ip_address(self._address).is_loopback:
            log.warning("%s is this host's alone: nodes on other hosts cannot reach node 0 there", self._address)
        try:
            self._socket.bind(f"tcp://{_bracketed(self._address)}:{hosts.port}")
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"{self._address}:{hosts.port} cannot be listened on: {error.strerror}") from None
        self.fds = (_fd(self._socket), _fd(self._connections.monitor))
        self._identities: dict[int, bytes] = {}  # by node, of those that have come and can be reached
        self._idle: set[int] = set()
        self._session = secrets.token_hex(8)
        self._start: Start | None = None  # of the running epoch, or the latest
        self._running = False
        self._served = False
        self._deaths: dict[int, Death | None] = {}  # by node, of the running epoch, in the order of their coming
        self._dismissed: dict[bytes, Over] = {}  # by identity, of those that are to end
        self._probe_until = 0.0

    def next(self) -> Next | None:
        self._take()
        if len(self._idle) < self._hosts.nodes - 1:
            return None
        meeting = Meeting(self._address, _free_port(self._address), self._address, self._interface)
        self._running = True
        self._begin(self._count())
        self._deaths.clear()
        self._idle.clear()
        self._start = Start(self._session, self._epoch, meeting.port)
        for node, identity in list(self._identities.items()):
            if not self._tell(identity, self._start):
                self._lost(node)
        return Next(self._epoch, meeting)

    def wait(self) -> str:
        missing = [f"node {node}" for node in range(1, self._hosts.nodes) if node not in self._idle]
        return f"node 0 of {self._hosts.nodes} waits for {', '.join(missing)}"

    def settle(self, death: Death | None) -> Death | None:
        if death is None:
            self._running = False
            return None
        self.dying()
        patience = time.monotonic() + PATIENCE
        while self._identities.keys() - self._deaths.keys() - self._idle and time.monotonic() < patience:
            select.select(self.fds, [], [], 0.1)
            self._take()
        ends = [death, *(one for one in self._deaths.values() if one is not None)]
        self._running = False
        self._served = self._served or death.ready_for is not None
        mistaken = {node: one for node, one in self._deaths.items() if one is not None and one.kind == "model"}
        if mistaken and death.kind != "model" and not self._served:
            for node, one in mistaken.items():  # they end, and this one waits for others with the right model
                self._dismiss(node, Over(ModelLoadError.exit_code, one.text))
            return Death(NODE, "; ".join(one.text for one in mistaken.values()), None)
        cause = min(ends, key=lambda one: CAUSES.index(one.kind) if one.kind in CAUSES else len(CAUSES))
        return Death(cause.kind, cause.text, death.ready_for)

    def over(self, error: StartError) -> None:
        self._say(Over(error.exit_code, str(error)))

    def close(self) -> None:
        self._connections.close()
        self._socket.close()
        self._guard.close()
        self._context.term()

    def _take(self) -> None:
        """All that has come, without waiting."""
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._heard(identity, decode(frames[0]))
            except (msgspec.MsgspecError, IndexError) as error:
                log.error("a node sent what cannot be read: %s", error)
        now = time.monotonic()
        if self._connections.read():
            self._probe_until = now + LOST
        if now < self._probe_until:
            for node, identity in list(self._identities.items()):
                if not self._tell(identity, Ping()):
                    self._lost(node)

    def _heard(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Here):
            self._came(identity, message)
            return
        node = next((node for node, one in self._identities.items() if one == identity), None)
        if node is None or not isinstance(message, Dying | Leave | Ended) or message.epoch != self._epoch:
            return
        if isinstance(message, Leave):
            self.leave()
        else:
            if isinstance(message, Ended):
                text = f"node {node}: {message.text}"
                self._deaths[node] = Death(message.kind, text, message.ready_for) if message.kind else None
            if isinstance(message, Dying) or message.kind:
                self._end("told", f"the ranks of node {node} died")
                self.dying()

    def _came(self, identity: bytes, here: Here) -> None:
        if identity in self._dismissed:  # it had not heard it yet
            self._tell(identity, self._dismissed[identity])
            return
        before = self._identities.get(here.node)
        refusal = None
        if here.protocol != PROTOCOL:
            refusal = f"node {here.node} ({here.host}) speaks version {here.protocol}, node 0 version {PROTOCOL}"
        elif here.group != self._hosts.group:
            refusal = f"{here.host} has ranks of group {here.group!r}, node 0 those of group {self._hosts.group!r}"
        elif here.nodes != self._hosts.nodes or not 0 < here.node < here.nodes:
            refusal = f"{here.host} says it is node {here.node} of {here.nodes}, node 0 has {self._hosts.nodes} nodes"
        elif before is not None and before != identity and self._tell(before, Ping()):
            refusal = f"{here.host} says it is node {here.node}, which is here already"
        if refusal is not None:
            log.error("refused: %s", refusal)
            self._tell(identity, Refused(refusal))
            return
        if before is not None and before != identity:
            self._lost(here.node)
        if here.node not in self._identities:
            log.info("node %d is here: %s", here.node, here.host)
        self._identities[here.node] = identity
        if not self._running or here.node in self._deaths or self._start is None:
            self._idle.add(here.node)
        elif here.last != (self._session, self._epoch):
            self._tell(identity, self._start)  # it has not come there yet
        elif not self._news.leave:
            self._idle.add(here.node)
            self._end("lost", f"node {here.node} had lost the connection")
            self.dying()

    def _dismiss(self, node: int, over: Over) -> None:
        self._idle.discard(node)
        if (identity := self._identities.pop(node, None)) is not None:
            self._dismissed[identity] = over
            self._tell(identity, over)

    def _lost(self, node: int) -> None:
        log.warning("node %d has gone", node)
        del self._identities[node]
        self._idle.discard(node)
        if not self._news.leave:
            self._end("lost", f"node {node} cannot be reached")
            self.dying()

    def _say(self, message: Message) -> None:
        for identity in self._identities.values():
            self._tell(identity, message)

    def _tell(self, identity: bytes, message: Message) -> bool:
        with suppress(zmq.Again):
            try:
                self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False
        return True


class Follower(_Node):
    """Any other node's launcher."""

    def __init__(self, hosts: Hosts) -> None:
        if hosts.local_address is not None or hosts.interface is not None:
            place(hosts)  # which a mistake would else come out of only when node 0 is there
        super().__init__(hosts, zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{hosts.node}/{secrets.token_hex(8)}".encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # what was meant for a connection that is over goes nowhere
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._key.join(self._socket)
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(f"tcp://{_bracketed(hosts.host)}:{hosts.port}")
        self.fds = (_fd(self._socket), _fd(self._monitor))
        self._idle = True
        self._connected = False
        self._said = False  # that it is here, on this connection and since the last epoch
        self._start: Start | None = None
        self._last = "", 0  # session and number of the latest epoch
        self._over: Over | None = None
        self._ask_at = 0.0  # when to say Here again
        self._complain_at = 0.0

    def next(self) -> Next | None:
        self._take()
        if self._over is not None:
            kind = ModelLoadError if self._over.exit_code == ModelLoadError.exit_code else StartError
            raise kind(f"node 0 begins no further epoch: {self._over.text}")
        if self._connected and self._idle and (not self._said or time.monotonic() >= self._ask_at):
            self._ask_at = time.monotonic() + AGAIN
            self._said = True
            hosts = self._hosts
            self._say(Here(PROTOCOL, hosts.group, hosts.nodes, hosts.node, socket.gethostname(), self._last))
        if self._start is None:
            return None
        start, self._start = self._start, None
        return Next(start.epoch, Meeting(self._hosts.host, start.port, *place(self._hosts)))

    def wait(self) -> str:
        hosts = self._hosts
        whom = "the other nodes" if self._connected else f"node 0 at {hosts.host}:{hosts.port}"
        return f"node {hosts.node} of {hosts.nodes} waits for {whom}"

    def settle(self, death: Death | None) -> Death | None:
        end = Death("", "", None) if death is None else death
        self._say(Ended(self._epoch, end.kind, end.text, end.ready_for))
        self._idle, self._said = True, False
        return death

    def over(self, error: StartError) -> None:
        """Node 0 alone says so."""

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _take(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._noticed(zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                message = decode(self._socket.recv(zmq.NOBLOCK))
            except msgspec.MsgspecError as error:
                log.error("node 0 sent what cannot be read: %s", error)
                continue
            if isinstance(message, Start) and self._idle and self._last != (message.session, message.epoch):
                self._start, self._idle, self._last = message, False, (message.session, message.epoch)
                self._begin(message.epoch)
            elif isinstance(message, Over):
                self._over = message
            elif isinstance(message, Refused):
                log.error("node 0 refused this node: %s", message.text)
            elif isinstance(message, Dying) and message.epoch == self._epoch:
                self._end("told", "node 0 ended the epoch")
            elif isinstance(message, Leave) and message.epoch == self._epoch:
                self._news.leave = True

    def _noticed(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            log.info("node 0 is there")
            self._connected, self._said = True, False
        elif event == zmq.EVENT_DISCONNECTED and self._connected:
            log.warning("the connection to node 0 closed")
            self._connected = False
            if not self._idle and not self._news.leave:
                self._end("lost", "the connection to node 0 closed")
        elif event & REFUSED and (now := time.monotonic()) >= self._complain_at:
            self._complain_at = now + QUIET
            where = f"{self._hosts.host}:{self._hosts.port}"
            log.error("%s does not talk to this node: it holds another cluster key, or none", where)

    def _say(self, message: Message) -> None:
        with suppress(zmq.Again):  # with no connection: `Here` is said on the next
            self._socket.send(encode(message), zmq.NOBLOCK)


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _fd(one: zmq.Socket[bytes]) -> int:
    return int(one.get(zmq.FD))
