"""Rank 0's end of the queue: a DEALER that finds the front end again and again; it knows no model and no peer."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
import zmq.utils.monitor

from workers import wire
from workers.curve import ClusterKey
from workers.wire import Buffer, Goodbye, Hello, Leaving, Step

log = logging.getLogger("workers")

ALONE = 5.0, 60.0  # seconds without a front end after which that is said, and said again
POLL_MS = 100  # between two looks for the `leave` file
GOODBYE_SECONDS = 2.0  # for a front end to answer Leaving


class Place(NamedTuple):
    """Where the front end is: beside the group, or on another host, with which it shares a key."""

    address: str
    launcher: str = ""  # tells groups of other hosts apart that have the same name
    key: ClusterKey | None = None


class Queue:
    """Rank 0's end of the queue: says HELLO on every connect, hands out steps, sends results.

    `left` becomes true when the group has been asked to leave and no further step will come.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        place: Place,
        hello: Hello,
        leave: Path,
        holds: Callable[[], int],
    ) -> None:
        """`holds` says how many steps the ranks have begun and not answered."""
        self._holds = holds
        self._hello = hello
        self._leave = leave
        self._leaving_until = 0.0
        self.left = False
        self._connected = False
        self._address = place.address
        self._complain_at = time.monotonic() + ALONE[0]
        self._socket = context.socket(zmq.DEALER)
        identity = f"{hello.group}/{hello.epoch}/{place.launcher}".rstrip("/")
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.set_hwm(wire.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if place.key is not None:
            place.key.join(self._socket)
        self._socket.connect(place.address)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)

    def next(self, wake: int) -> tuple[Step, list[Buffer]] | None:
        """The next step and its payload frames; None if the file descriptor `wake` is readable before, or at `left`."""
        self._poller.register(wake, zmq.POLLIN)
        if self.left:
            select.select([wake], [], [])
        while not self.left:
            ready = dict(self._poller.poll(POLL_MS))
            if self._monitor in ready:
                self._greet()
            if self._socket in ready:
                message, payload = wire.decode([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
                if isinstance(message, Step) and message.epoch == self._hello.epoch:
                    return message, payload
                self.left = isinstance(message, Goodbye)
            if not self._connected and time.monotonic() >= self._complain_at:
                self._complain_at = time.monotonic() + ALONE[1]
                log.warning("no front end at %s: the group waits for it", self._address)
            if wake in ready:
                break
            self.left = self.left or self._has_left()
        return None

    def send(self, message: wire.Message, payload: Sequence[Buffer] = ()) -> None:
        """Never waits: only a front end that is gone leaves the socket full, and it needs no answer."""
        try:
            self._socket.send_multipart(wire.encode(message, payload), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            log.warning("no front end takes a %s", type(message).__name__)

    def _greet(self) -> None:
        event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._complain_at = time.monotonic() + ALONE[0]
        if self._connected:
            self.send(msgspec.structs.replace(self._hello, held=self._holds()))

    def _has_left(self) -> bool:
        if self._leaving_until:
            return time.monotonic() > self._leaving_until
        if self._leave.exists():
            if not self._connected:
                return True
            self._leaving_until = time.monotonic() + GOODBYE_SECONDS
            self.send(Leaving(self._hello.epoch))
        return False
