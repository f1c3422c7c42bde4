"""How shards reach the ranks: over sockets of the host, or CURVE over TCP between hosts; it runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from workers import wire
from workers.curve import ClusterKey, Connections, Guard
from workers.ring import Reader
from workers.wire import Buffer, Message, Shard

LARGEST = 1 << 30  # bytes of a shard; more the front end would never have admitted
Context = zmq.Context[zmq.Socket[bytes]]


class Inbox:
    """Where the shards of one rank arrive; `address` is for rank 0."""

    def __init__(self, context: Context, name: str, place: Path | str, key: ClusterKey | None) -> None:
        """`place` is a socket's path or, for a rank on another host than rank 0, an address of this host."""
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(wire.HIGH_WATER_MARK)
        self._guard: Guard | None = None
        self._connections: Connections | None = None
        if isinstance(place, Path):
            self._socket.bind(f"ipc://{place}")
        else:
            assert key is not None  # says app.settings
            self._guard = Guard(context, key)
            key.serve(self._socket, LARGEST)
            self._connections = Connections(self._socket, name)
            self._socket.bind(f"tcp://{f'[{place}]' if ':' in place else place}:*")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._connections is not None:
            self._poller.register(self._connections.monitor, zmq.POLLIN)
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def wait(self, wake: int | None = None, seconds: float | None = None) -> bool:
        """Whether there is a message; False once `wake` is readable or the time is over."""
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)  # once more changes nothing
        while True:
            ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1000)))
            if self._connections is not None and self._connections.monitor in ready:
                self._connections.read()
            if self._socket in ready:
                return True
            if not ready or wake in ready:
                return False

    def take(self) -> tuple[Message, list[Buffer]]:
        """The next message; GroupError if it is none."""
        return wire.decode([frame.buffer for frame in self._socket.recv_multipart(copy=False)])

    def close(self) -> None:
        if self._connections is not None and self._guard is not None:
            self._connections.close()
            self._guard.close()
        self._socket.close(linger=0)


class Outboxes:
    """Rank 0's way to the others: the addresses of their inboxes, by rank."""

    def __init__(self, context: Context, addresses: dict[int, str], ring: Reader, key: ClusterKey | None) -> None:
        """`ring` is for the thread that sends alone."""
        self._ring = ring
        self._far = {rank for rank, address in addresses.items() if not address.startswith("ipc:")}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        for rank, address in addresses.items():
            self._sockets[rank] = context.socket(zmq.PUSH)
            self._sockets[rank].set_hwm(wire.HIGH_WATER_MARK)
            self._sockets[rank].setsockopt(zmq.LINGER, 1000)
            if rank in self._far and key is not None:
                key.join(self._sockets[rank])
            self._sockets[rank].connect(address)

    def send(self, shards: Sequence[Shard], payload: Sequence[Buffer]) -> None:
        """To each rank but 0 its own."""
        for rank, outbox in self._sockets.items():
            shard, frame = shards[rank], payload[rank]
            if rank in self._far and shard.place is not None:  # other hosts do not see the ring
                with suppress(OSError):  # gone with its front end: nobody waits for the results
                    frame = self._ring.view(shard.place.ring, shard.place.start, shard.place.size)
                shard = msgspec.structs.replace(shard, place=None)
            outbox.send_multipart(wire.encode(shard, [frame]), copy=False)

    def tell(self, message: Message) -> None:
        """To all of them."""
        for outbox in self._sockets.values():
            outbox.send_multipart(wire.encode(message))
