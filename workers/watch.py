"""A launcher's line to a front end on another host, where no file in a run directory reaches; it knows no process.

What a front end beside its group writes into an epoch's directory comes here as a `Fence`, and is written there; what
it reads of a death in a post-mortem goes to it as `Died`. The connection is CURVE over TCP, see `workers.curve`.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.utils.monitor

from workers import wire
from workers.curve import QUIET, REFUSED, ClusterKey
from workers.epoch import Death
from workers.errors import GroupError
from workers.hosts import FrontEnd
from workers.wire import Died, Fence, Watching

log = logging.getLogger("workers")

EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSED


class Watch:
    """Of one launcher, for all of its life."""

    def __init__(self, group: str, front_end: FrontEnd) -> None:
        """StartError where there is no key."""
        key = ClusterKey.read(front_end.key_file)
        self._group = group
        self._name = f"the front end at {front_end.host}:{front_end.port}"
        self._connected = False
        self._watched = 0  # the epoch that the front end was told of, on this connection
        self._complain_at = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"launch/{group}/{front_end.token}".encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        key.join(self._socket)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._socket.connect(front_end.address)

    def look(self, epoch: int, directory: Path) -> None:
        """Take in what has come, without waiting: what is of the running epoch goes into its directory."""
        with suppress(zmq.Again):
            while True:
                self._notice(zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
        if self._connected and self._watched != epoch:
            self._watched = epoch
            self._send(Watching(wire.WIRE, self._group, epoch))
        with suppress(zmq.Again):
            while True:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK), epoch, directory)

    def died(self, epoch: int, death: Death) -> None:
        """Tell why; a front end that is not there now hears of it when it is."""
        text = f"group {self._group} epoch {epoch} on {socket.gethostname()} died: {death.text}"
        self._send(Died(self._group, epoch, death.kind, text))

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=1000)

    def _take(self, frames: list[bytes], epoch: int, directory: Path) -> None:
        try:
            message, _ = wire.decode(frames)
        except GroupError as error:
            log.error("%s sent what cannot be read: %s", self._name, error)
            return
        if isinstance(message, Fence) and message.epoch == epoch:
            if message.in_flight:
                (directory / "in-flight").write_text(message.in_flight)
            if message.why:
                (directory / "fenced").write_text(message.why)

    def _notice(self, event: int) -> None:
        if event & REFUSED:
            if (now := time.monotonic()) >= self._complain_at:
                self._complain_at = now + QUIET
                log.error("%s does not hold this host's cluster key (PHALANX_CLUSTER_KEY_FILE)", self._name)
            return
        connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if connected != self._connected:
            log.info("%s %s", self._name, "is there" if connected else "has gone")
        self._connected, self._watched = connected, 0

    def _send(self, message: wire.Message) -> None:
        with suppress(zmq.Again):  # it is not there, and has missed more than it could use
            self._socket.send_multipart(wire.encode(message), zmq.NOBLOCK)
