"""The front end's end of the local queue: a bound ROUTER on the event loop; it knows no step, group or request.

Nothing here waits: a message that cannot be sent now is the caller's to keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

import zmq
import zmq.utils.monitor

from workers import wire
from workers.errors import GroupError
from workers.launch import claim, prepare_run_dir
from workers.wire import Buffer, Message

log = logging.getLogger("app")


class Sent(Enum):
    """What became of a message."""

    YES = "sent"
    FULL = "the peer's queue is full"
    GONE = "the peer cannot be reached"


class Queue:
    """`on_message(identity, message, payload)` for what comes in, `on_disconnect()` when some peer has gone."""

    def __init__(
        self,
        run_dir: Path,
        on_message: Callable[[bytes, Message, list[Buffer]], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._run_dir = run_dir
        self._path = run_dir / "queue.sock"
        self._on_message = on_message
        self._on_disconnect = on_disconnect

    def open(self) -> None:
        """Claim the run directory and bind. RunDirectoryError where another front end has it."""
        self._loop = asyncio.get_running_loop()
        prepare_run_dir(self._run_dir)
        self._lock = claim(self._run_dir / "lock")
        self._path.unlink(missing_ok=True)  # it survives its owner's death, and the lock says that the owner is dead
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank 0 that connects anew is not held up by its own past
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(wire.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        umask = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{self._path}")
        finally:
            os.umask(umask)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.add_reader(self._monitor.fileno(), self._notice)
        # a socket's descriptor wakes nobody before its events were asked for once
        self._receive()
        self._notice()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def send(self, identity: bytes, message: Message, payload: Sequence[Buffer] = ()) -> Sent:
        if self._socket.closed:
            return Sent.GONE
        try:
            self._socket.send_multipart([identity, *wire.encode(message, payload)], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            self._loop.call_soon(self._receive)  # sending may have swallowed the edge that the reader waits for
        return Sent.YES

    def _receive(self) -> None:
        """Everything that has come: the descriptor is edge-triggered."""
        while not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                message, payload = wire.decode([frame.buffer for frame in frames])
            except GroupError as error:
                log.error("from %r: %s", identity.bytes, error)
            else:
                self._on_message(identity.bytes, message, payload)

    def _notice(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            with contextlib.suppress(zmq.Again):
                zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._on_disconnect()
