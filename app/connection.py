"""One client's HTTP connection, with limits that uvicorn's does not have; it knows nothing of what requests mean."""

from __future__ import annotations

import asyncio
import functools
import http
from dataclasses import dataclass
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.body import Fill
from app.door import FILL, HANG_UP

LINGER = 1.0  # seconds a refused client may go on sending before its connection is closed


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take; times in seconds."""

    connections: int = 1024
    head_bytes: int = 32 * 1024  # request line and headers; trailers likewise
    head_time: float = 10.0  # for the whole head, from connecting or from its first byte
    stall_time: float = 30.0  # in which a client takes no byte of its answer


class Connection(HttpToolsProtocol):
    """One client's connection, with the limits that uvicorn does not have.

    The costs fall on those who come near a limit: a head that comes in one piece meets no timer and no sum.
    """

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._head: int | None = 0  # bytes of the head that is not complete yet; None after it
        self._beyond = 0  # bytes since the last one of a body: chunk sizes, trailers
        self._whole = False  # the latest request has come with all of its body
        self._in_head = False  # what comes as a header is one, and no trailer
        self._behind = False  # the latest head began in the same piece as the request before it ended, uncounted
        self._refused = False
        self._replay = False  # the parser is fed a head that is not the client's
        self._running: RequestResponseCycle | None = None  # the request in work; `cycle` is the latest
        self._deadline: asyncio.TimerHandle | None = None  # of the head, later of a refused client
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        present = len(self.connections)
        super().connection_made(transport)
        limit = self._limits.connections
        if present >= 2 * limit:  # even to refuse takes an open file for a while
            transport.close()
        elif present >= limit and self._served_others() >= limit:
            self._refuse(503, "Too many connections.", b"retry-after: 1\r\n")
        else:
            self._deadline = self.loop.call_later(self._limits.head_time, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        if running is not None:
            if HANG_UP in running.scope:
                cast("dict[str, Any]", running.scope)[HANG_UP]()
            if not running.response_complete:  # uvicorn tells the latest one only
                running.disconnected = True
            running.message_event.set()
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._head is not None:
            self._head += len(data)
        else:
            self._beyond += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")
        if self._head is None:
            if self._whole:
                self._head = 0
            elif self._beyond > self._limits.head_bytes:  # the parser would gather trailers without end
                self._refuse(431, "The request's trailers are too large.")
        elif self._head > self._limits.head_bytes:
            self._refuse(431, "The request's head is too large.")
        elif self._deadline is None and not self._refused:
            self._deadline = self.loop.call_later(self._limits.head_time, self._head_is_late)

    def _feed(self, data: bytes) -> None:
        """Parses; a request that asks for another protocol (Java's client does, for h2c) is taken as it is.

        The parser ends such a request at its head, so a head of what frames the body is put in before the body.
        """
        rest = memoryview(data)
        while True:
            try:
                return self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            framing = [field for field in self.headers if field[0] in (b"content-length", b"transfer-encoding")]
            self._replay = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % field for field in framing))
            self._replay = False

    def on_message_begin(self) -> None:
        self._behind, self._in_head = self._head is None, True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which nobody asked for and which must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._replay:
            return
        # The count includes what came in the same piece behind the head, and misses what came of it behind another.
        limit = self._limits.head_bytes
        if (self._behind or cast("int", self._head) > limit) and self._measure() > limit:
            self._refuse(431, "The request's head is too large.")
            raise ValueError("the head is too large")  # stops the parser
        self._head = None
        self._beyond = 0
        self._whole = False
        self._cancel_deadline()
        super().on_headers_complete()
        if any(name == b"content-length" for name, _ in self.headers):
            cast("dict[str, Any]", self.scope)[FILL] = functools.partial(self._fill, self.cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._beyond = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._whole = True
            super().on_message_complete()
            if not self.pipeline:  # a large body may have paused it, and only who reads learns of a hang-up
                self.flow.resume_reading()

    async def _fill(self, cycle: RequestResponseCycle, target: memoryview, silence: float) -> None:
        """What `FILL` offers. After BodyTimeout the connection takes nothing more and closes behind the answer."""
        if cycle.disconnected:
            raise ConnectionResetError("the client has gone")
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        here, cycle.body = cycle.body, bytearray()
        target[: len(here)] = here
        if cycle.more_body:
            fill = Fill(self, target, len(here), silence)
            self._read_with(fill)
            try:
                await fill.done
            except BaseException:
                self._refused = True
                cycle.keep_alive = False
                self._read_with(self)
                raise

    def body_is_here(self) -> None:
        """The rest of a body came past the parser, which a new one succeeds."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._head, self._beyond, self._whole = 0, 0, True
        self.cycle.more_body = False
        self._read_with(self)

    def _read_with(self, protocol: asyncio.BaseProtocol) -> None:
        if not self.transport.is_closing():
            self.flow.pause_reading()  # the loop looks at the kind of a protocol when reading begins
            self.transport.set_protocol(protocol)
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _watch_writing(self) -> None:
        self._stall = self.loop.call_later(
            self._limits.stall_time, self._still_writing, self.transport.get_write_buffer_size()
        )

    def _still_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()  # close() would wait for the bytes nobody takes
        else:
            self._watch_writing()

    def _served_others(self) -> int:
        return sum(1 for other in self.connections if other is not self and not getattr(other, "_refused", False))

    def _measure(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        self._deadline = None
        if self._head:
            self._refuse(408, "The request's head did not come in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str, header: bytes = b"") -> None:
        """Answers without the app and closes, once the client has closed too or `LINGER` has passed.

        To close at once, with bytes unread, would send a reset, which can take the answer with it.
        """
        if self._refused:
            return
        self._refused = True
        self._cancel_deadline()
        if self.pipeline:  # the fault is behind requests that came whole: they are answered, and then it closes
            if self.pipeline[0][0].more_body:
                self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else self._running
            assert last is not None
            last.keep_alive = False
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:  # it came whole, and this fault came behind it: its answer goes out first
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        body = text.encode()
        header += b"".join(b"%s: %s\r\n" % field for field in self.server_state.default_headers)
        self.transport.write(
            b"HTTP/1.1 %d %s\r\n%scontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (status, http.HTTPStatus(status).phrase.encode(), header, len(body), body)
        )
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER, self.transport.close)
