"""The front end's end of the queues: bound ROUTERs on the event loop; it knows no step, group or request.

Groups of this host come through a socket file in the run directory; those of other hosts, where there may be any,
through a TCP port, which only holders of the cluster key can use. Nothing here waits: a message that cannot be sent now
is the caller's to keep.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import zmq

from app.settings import Settings, endpoint
from workers import wire
from workers.curve import ClusterKey, Connections, Guard
from workers.errors import GroupError, StartError
from workers.launch import claim, prepare_run_dir
from workers.wire import Buffer, Message

log = logging.getLogger("app")


class Sent(Enum):
    """What became of a message."""

    YES = "sent"
    FULL = "the peer's queue is full"
    GONE = "the peer cannot be reached"


class Peer(NamedTuple):
    """Who is at the other end."""

    identity: bytes
    remote: bool = False  # on another host

    @property
    def place(self) -> bytes:
        """Tells groups of one name apart: those beside the front end, and those of each launcher elsewhere."""
        return self.identity.rpartition(b"/")[2] if self.remote else b""


@dataclass(frozen=True)
class Listen:
    """Where groups of other hosts come to."""

    host: str
    port: int
    key_file: Path
    largest: int = 1 << 30  # bytes of a message

    @classmethod
    def of(cls, settings: Settings) -> Listen | None:
        """None where there are none."""
        if settings.queue_listen is None:
            return None
        assert settings.cluster_key_file is not None  # says Settings, with queue_listen
        return cls(*endpoint(settings.queue_listen), settings.cluster_key_file, max(settings.queue_bytes, 1 << 30))


class Queue:
    """`on_message(peer, message, payload)` for what comes in, `on_disconnect()` when some peer has gone."""

    def __init__(
        self,
        run_dir: Path,
        on_message: Callable[[Peer, Message, list[Buffer]], None],
        on_disconnect: Callable[[], None],
        listen: Listen | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._path = run_dir / "queue.sock"
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._listen = listen
        self._guard: Guard | None = None
        self._sockets: dict[bool, zmq.Socket[bytes]] = {}  # by whether those there are remote
        self._connections: dict[bool, Connections] = {}

    def open(self) -> None:
        """Claim the run directory and bind. RunDirectoryError where another front end has it, StartError for a port."""
        self._loop = asyncio.get_running_loop()
        prepare_run_dir(self._run_dir)
        self._lock = claim(self._run_dir / "lock")
        self._path.unlink(missing_ok=True)  # it survives its owner's death, and the lock says that the owner is dead
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        umask = os.umask(0o177)
        try:
            self._bind(f"ipc://{self._path}", None)
        finally:
            os.umask(umask)
        if self._listen is not None:
            where = f"{self._listen.host}:{self._listen.port}"
            try:
                key = ClusterKey.read(self._listen.key_file)
                self._guard = Guard(self._context, key)
                self._bind(_tcp(self._listen), key)
            except (zmq.ZMQError, OSError, StartError) as error:
                self.close()
                if isinstance(error, StartError):
                    raise
                raise StartError(f"{where} cannot be listened on (PHALANX_QUEUE_LISTEN): {error.strerror}") from None
            log.info("groups of other hosts are taken at %s", where)

    def close(self) -> None:
        for remote, router in self._sockets.items():
            self._loop.remove_reader(router.fileno())
            self._loop.remove_reader(self._connections[remote].monitor.fileno())
            self._connections[remote].close()
            router.close(linger=0)
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def send(self, peer: Peer, message: Message, payload: Sequence[Buffer] = ()) -> Sent:
        router = self._sockets[peer.remote]
        if router.closed:
            return Sent.GONE
        try:
            router.send_multipart([peer.identity, *wire.encode(message, payload)], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            # sending may have swallowed the edge that the reader waits for
            self._loop.call_soon(self._receive, peer.remote)
        return Sent.YES

    def _bind(self, address: str, key: ClusterKey | None) -> None:
        remote = key is not None
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank 0 that connects anew is not held up by its own past
        router.setsockopt(zmq.LINGER, 0)
        router.set_hwm(wire.HIGH_WATER_MARK)
        router.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        if key is not None:
            assert self._listen is not None
            key.serve(router, self._listen.largest)
        self._sockets[remote] = router
        self._connections[remote] = Connections(router, "the queue")
        router.bind(address)
        self._loop.add_reader(router.fileno(), self._receive, remote)
        self._loop.add_reader(self._connections[remote].monitor.fileno(), self._notice, remote)
        # a socket's descriptor wakes nobody before its events were asked for once
        self._receive(remote)
        self._notice(remote)

    def _receive(self, remote: bool) -> None:
        """Everything that has come: the descriptor is edge-triggered."""
        router = self._sockets[remote]
        while not router.closed and int(router.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                message, payload = wire.decode([frame.buffer for frame in frames])
                self._on_message(Peer(identity.bytes, remote), message, payload)
            except GroupError as error:
                log.error("from %r: %s", identity.bytes, error)
            except Exception:  # the next message is somebody else's
                log.exception("a message from %r is dropped", identity.bytes)

    def _notice(self, remote: bool) -> None:
        connections = self._connections[remote]
        while not connections.monitor.closed and int(connections.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            if connections.read():
                self._on_disconnect()


def _tcp(listen: Listen) -> str:
    """For libzmq, which looks no names up when it binds."""
    _, _, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
    host = str(address[0])
    return f"tcp://{f'[{host}]' if ':' in host else host}:{listen.port}"
