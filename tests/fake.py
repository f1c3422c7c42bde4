"""A worker group that is no process: a rank 0 that says HELLO, echoes its items, and dies as it is told."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from workers import wire
from workers.curve import ClusterKey
from workers.wire import Goodbye, Hello, Leaving, ModelInfo, RankStats, Result, Step


def info(name: str = "Echo", **fields: object) -> ModelInfo:
    return ModelInfo(
        **{"name": name, "max_batch_size": 4, "dtype": None, "shape": None, "example": b"0", "has_example": True}
        | fields
    )


class FakeGroup:
    """One rank; its result is the item, as `[group, item]`. Items that hold `poison` kill it, unanswered."""

    far: tuple[int, ClusterKey, str] | None = None  # port, key and launcher's name, of one on another host

    def __init__(
        self,
        run_dir: Path,
        name: str = "0",
        epoch: int = 1,
        model: ModelInfo | None = None,
        lies: dict[str, object] | None = None,
    ) -> None:
        """`lies` are fields that its results have in place of the true ones."""
        self._lies = lies or {}
        self.name, self.epoch = name, epoch
        self.run_dir = run_dir
        self.items: list[bytes] = []
        self.steps = 0
        self.held: list[tuple[Step, list]] = []
        self.dead = threading.Event()
        self.died = 0.0  # monotonic
        self.hold = threading.Event()  # while it is set steps are taken in, and not answered
        self._model = model or info()
        self._send: queue.SimpleQueue[list] = queue.SimpleQueue()
        self._end = threading.Event()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._live, daemon=True)
        (run_dir / "epochs" / f"{name}-{epoch}").mkdir(parents=True, exist_ok=True)
        self._thread.start()

    @property
    def fenced(self) -> str:
        """Why the front end wants it dead; "" where it does not."""
        path = self.run_dir / "epochs" / f"{self.name}-{self.epoch}" / "fenced"
        return path.read_text() if path.exists() else ""

    @property
    def holds(self) -> bool:
        """Whether it has a step that is no canary."""
        return any(not step.canary for step, _ in self.held)

    def leave(self) -> None:
        """In an orderly way, with what it holds answered."""
        self._send.put(wire.encode(Leaving(self.epoch)))
        self._thread.join()

    def send(self, frames: list) -> None:
        """Anything, as it is."""
        self._send.put(frames)

    def kill(self) -> None:
        self._end.set()
        self._thread.join()

    def _live(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if self.far is None:
            socket.setsockopt(zmq.IDENTITY, f"{self.name}/{self.epoch}".encode())
            socket.connect(f"ipc://{self.run_dir}/queue.sock")
        else:
            port, key, token = self.far
            socket.setsockopt(zmq.IDENTITY, f"{self.name}/{self.epoch}/{token}".encode())
            key.join(socket)
            socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart(
            wire.encode(Hello(wire.WIRE, self.name, self.epoch, 1, self._model, ["cpu"], ["here"], [1], 0.01))
        )
        while not self._end.is_set():
            while not self._send.empty():
                socket.send_multipart(self._send.get())
            if socket.poll(5):
                message, payload = wire.decode(socket.recv_multipart())
                if isinstance(message, Step):
                    self.held.append((message, payload))
                elif isinstance(message, Goodbye):
                    self._end.set()
            while self.held and not self.hold.is_set():
                if not self._answer(socket, *self.held.pop(0)):
                    self._end.set()
                    break
        self.died = time.monotonic()
        self.dead.set()
        self._context.destroy(linger=0)

    def _answer(self, socket: zmq.Socket, step: Step, payload: list) -> bool:
        lengths = [] if step.canary else step.lengths[0]
        starts = wire.offsets(lengths, "json")
        items = [bytes(payload[0][at : at + size]) for at, size in zip(starts, lengths, strict=True)]
        if any(b"poison" in item for item in items):
            return False
        self.items += items
        self.steps += not step.canary
        results = [b'["%b",%b]' % (self.name.encode(), item) for item in items]
        done = Result(
            step.session,
            step.epoch,
            step.step,
            [[len(one) for one in results]],
            [],
            [[]],
            [RankStats(0, len(items), 0.001, 1, 0.0)],
            0.0,
        )
        if not step.canary:
            done = msgspec.structs.replace(done, **self._lies)
        socket.send_multipart(wire.encode(done, [b",".join(results)]))
        return True


@contextmanager
def groups(*given: FakeGroup) -> Iterator[None]:
    try:
        yield
    finally:
        for group in given:
            group.kill()
