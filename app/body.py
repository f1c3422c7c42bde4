"""A body straight from the socket into one buffer, past the parser; it knows no limit but the silence it bears.

The way through the parser and the app's `receive` copies a body five times, a piece at a time; this one does not copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from workers.errors import BodyTimeout

FillBody = Callable[[memoryview, float], Awaitable[None]]
"""The whole body into a buffer of just its length, with at most so many seconds without a byte."""


class Connection(Protocol):
    """What a body comes from, and who goes on behind it."""

    def body_is_here(self) -> None: ...

    def eof_received(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class Fill(asyncio.BufferedProtocol):
    """Takes the place of a connection's own protocol while the rest of a body is read.

    `done` gives what `target` still lacked; BodyTimeout after `silence` seconds without a byte, ConnectionResetError
    where the client has gone.
    """

    def __init__(self, connection: Connection, target: memoryview, at: int, silence: float) -> None:
        self._connection = connection
        self._target = target
        self._at = at
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(silence, self._listen)
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.done.add_done_callback(lambda _: self._timer.cancel())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        self._heard = self._loop.time()
        if self._at == len(self._target):
            self._connection.body_is_here()
            if not self.done.done():
                self.done.set_result(None)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionResetError("the client has gone"))
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _listen(self) -> None:
        """No timer a piece: this one looks, when it fires, how long ago the latest was."""
        left = self._heard + self._silence - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._listen)
        elif not self.done.done():
            here = f"{self._at} of {len(self._target)} bytes are here"
            self.done.set_exception(BodyTimeout(f"no byte came for {self._silence:g} s; {here}"))
