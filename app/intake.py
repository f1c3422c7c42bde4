"""What every request for inference passes: account, body, queue, hang-up, the numbers; it knows no content type.

`/infer` and the Open Inference Protocol are two ways to write what goes in here and comes out.
"""

from __future__ import annotations

import asyncio
import gzip
import math
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

import numpy as np

from app.batcher import Hold
from app.codecs import Cut
from app.dispatcher import Dispatcher
from app.door import FILL, HANG_UP, Receive, Send
from app.log import CLIENT_GONE, Entry, RequestLog
from app.metrics import Metrics
from app.settings import Settings
from app.steps import Request
from app.tracing import Tracing
from workers.errors import BodyTimeout, InternalError, MalformedBody, MalformedHeader, PhalanxError, TooLarge
from workers.ring import Block
from workers.wire import Buffer

LONG = 64 * 1024  # bytes of a body from which shared memory is better than a socket, and a thread than the event loop
REQUEST = "phalanx.request"  # in a scope, until the request is logged
SMALL = 256  # bytes of an answer that stay as they are
WINDOW, EXPANDED = 64 * 1024, 1 << 20  # bytes of a compressed body taken, and at most made of it, in one go
MEMBERS = 1000  # that a gzip body may have: each costs as much as 100 KB
GZIP = zlib.MAX_WBITS + 16  # the format (RFC 1952), as zlib names it

T = TypeVar("T")
Scope: TypeAlias = MutableMapping[str, Any]
Headers: TypeAlias = Mapping[bytes, bytes]
Fields: TypeAlias = list[tuple[bytes, bytes]]
Answer: TypeAlias = tuple[int, Fields, bytes | AsyncGenerator[bytes, None]]  # status, headers, and a body or its pieces


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


class Intake:
    """What every kind of request for inference passes on its way in."""

    def __init__(self, settings: Settings, dispatcher: Dispatcher, metrics: Metrics, tracing: Tracing) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tracing = tracing
        self._log = RequestLog() if settings.log_requests else None

    def refused(self, error: PhalanxError, scope: Scope) -> None:
        """What the door answers before or for a route: counted, and a line in the log."""
        self._metrics.refused(error)
        if self._log is not None:
            now = time.monotonic()
            request_id = scope["state"]["request_id"]
            self._log.write(Entry(request_id, scope["path"], error.status, error.type, 0, 0, now, now, None, None))

    def close(self) -> None:
        """Write what of the log is not written."""
        if self._log is not None:
            self._log.flush()

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        answer: Callable[[Scope, Receive, Hold, float], Awaitable[Answer]],
        refuse: Callable[[PhalanxError, str], Answer],
    ) -> None:
        """One request from its head to its answer: what `answer` makes, or `refuse` of the PhalanxError it raises.

        `answer` is given what the request holds of the account, and when it began (time.monotonic()).
        """
        began = time.monotonic()
        hold = self._dispatcher.account.open()
        trace = self._tracing.begin(scope["path"], self._traceparent(scope["headers"]))
        status, failed, sent, size_in, request = CLIENT_GONE, None, 0, 0, None
        try:
            try:
                status, fields, body = await answer(scope, receive, hold, began)
            except PhalanxError as error:
                error.__traceback__ = None  # it would keep the body until the next full garbage collection
                status, fields, body = refuse(error, scope["state"]["request_id"])
                failed = error.type
                self._metrics.rejected.labels(failed).inc()
            request = scope.pop(REQUEST, None)
            if request is not None and request.refused is not None:
                failed = request.refused
                self._metrics.rejected.labels(failed).inc()
            size_in = hold.bytes
            self._metrics.requests.labels(status).inc()
            if trace is not None:
                fields = [*fields, (b"traceparent", trace.traceparent)]
            if isinstance(body, bytes):
                if len(body) >= SMALL and self._compresses(scope["headers"], len(body)):
                    body = await self.aside(len(body), _gzip, body)
                    fields = [field for field in fields if field[0] != b"content-length"]
                    fields += [(b"content-length", b"%d" % len(body)), (b"content-encoding", b"gzip")]
                    fields.append((b"vary", b"Accept-Encoding"))
                hold.add_bytes(sent := len(body))
                await send({"type": "http.response.start", "status": status, "headers": fields})
                await send({"type": "http.response.body", "body": body})
            else:
                await send({"type": "http.response.start", "status": status, "headers": fields})
                async with aclosing(body):
                    async for piece in body:
                        hold.add_bytes(len(piece))
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                        sent += len(piece)
                await send({"type": "http.response.body", "body": b""})
        except ClientGone as gone:
            gone.__traceback__ = None  # likewise
            status, failed = CLIENT_GONE, "client-gone"
            self._metrics.aborted.labels(str(gone)).inc()
        except Exception:  # the door answers
            status, failed = InternalError.status, InternalError.type
            raise
        finally:
            hold.release()
            ended = time.monotonic()
            self._metrics.request_seconds.observe(ended - began)
            self._metrics.request_bytes.inc(size_in)
            self._metrics.response_bytes.inc(sent)
            request, request_id = request or scope.pop(REQUEST, None), scope["state"]["request_id"]
            trace_id = trace and trace.trace_id
            entry = Entry(request_id, scope["path"], status, failed, size_in, sent, began, ended, request, trace_id)
            if self._log is not None:
                self._log.write(entry)
            if trace is not None:
                self._tracing.end(trace, entry)

    @staticmethod
    def _traceparent(headers: Fields) -> bytes | None:
        return next((value for name, value in headers if name == b"traceparent"), None)

    def deadline(self, began: float, headers: Headers) -> float:
        """When the request must be answered, on the clock of `began`. MalformedHeader: an X-Request-Timeout is none."""
        header = headers.get(b"x-request-timeout")
        if header is None:
            return began + self._settings.request_timeout
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise MalformedHeader(
                f"X-Request-Timeout is {header.decode('latin-1')!r}, not a positive number of seconds"
            )
        return began + seconds

    async def body(
        self, scope: Scope, headers: Headers, receive: Receive, hold: Hold, ring: bool
    ) -> tuple[Buffer, Block | None]:
        """The whole body, expanded, and with `ring` the block of the ring that it is in, if it is.

        Its bytes are accounted for before they are read: at once where its length is announced.
        """
        announced = int(headers.get(b"content-length", 0))
        compressed = headers.get(b"content-encoding", b"").strip().lower() in (b"gzip", b"x-gzip")
        hold.take_bytes(announced)
        block = None
        if (fill := scope.pop(FILL, None)) is not None:
            block = self._dispatcher.block(announced) if ring and announced >= LONG and not compressed else None
            body: Buffer = block.view if block else np.empty(announced, np.uint8).data
            try:
                await fill(body, self._settings.body_timeout)
            except ConnectionResetError:
                raise ClientGone("body") from None
        else:
            body = await self._pieces(receive, hold, announced)
        return (await self._expand(body, hold) if compressed else body), block

    async def aside(self, size: int, work: Callable[..., T], *given: Any) -> T:
        """`work(*given)`, which takes long where it is on many bytes: then in a thread."""
        return work(*given) if size < LONG else await asyncio.to_thread(work, *given)

    async def results(self, scope: Scope, cut: Cut, model: str | None, hold: Hold, deadline: float) -> Request:
        """The request, answered. Raises the RequestError that is the answer to all of it."""
        request = self.submit(scope, cut, model, hold, deadline)
        try:
            await request.future
        finally:
            self.forget(scope)
        self.count(request)
        return request

    def submit(self, scope: Scope, cut: Cut, model: str | None, hold: Hold, deadline: float) -> Request:
        """The request, queued; whoever has its `future` in the end calls `forget`."""
        count = len(cut.items) + len(cut.broken)
        if count > self._settings.max_items:
            raise TooLarge(f"{count} items are over the limit of {self._settings.max_items} in one request")
        hold.take_items(count)
        request = self._dispatcher.submit(cut, model, scope["state"]["request_id"], deadline)
        scope[REQUEST] = request
        scope[HANG_UP] = lambda: request.end(ClientGone("wait"))  # what of it is queued is dropped
        return request

    def forget(self, scope: Scope) -> None:
        """The connection keeps the scope, and the way to hang up would keep the body."""
        del scope[HANG_UP]

    def count(self, request: Request) -> None:
        """Its items, by outcome."""
        self._metrics.items.labels("ok").inc(request.size - len(request.failures))
        for error in (*request.failures.values(), *request.cut.broken.values()):
            self._metrics.items.labels(error.type).inc()

    def _compresses(self, headers: Fields, size: int) -> bool:
        """Whether the answer is gzipped. Most clients take gzip without need, on a network faster than it."""
        given = dict(headers)
        wanted = self._settings.compress_from
        sent = b"gzip" in given.get(b"content-encoding", b"").lower()
        return (sent or (wanted is not None and size >= wanted)) and _takes_gzip(given.get(b"accept-encoding", b""))

    async def _pieces(self, receive: Receive, hold: Hold, announced: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(self._settings.body_timeout):
                    message = await receive()
            except TimeoutError:
                waited = f"no byte came for {self._settings.body_timeout:g} s"
                raise BodyTimeout(f"{waited}; {size} of {announced or 'unknown'} bytes are here") from None
            if message["type"] == "http.disconnect":
                raise ClientGone("body")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > hold.bytes:
                hold.take_bytes(size - hold.bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks) if len(chunks) != 1 else chunks[0]

    async def _expand(self, body: Buffer, hold: Hold) -> bytes:
        expanded = await self.aside(len(body), _expanded, memoryview(body), self._settings.max_body_bytes)
        hold.take_bytes(len(expanded))
        return expanded


def _expanded(body: memoryview, limit: int) -> bytes:
    """What a gzip body holds. MalformedBody; TooLarge as soon as it is more than `limit` bytes."""
    pieces: list[bytes] = []
    at, size = 0, 0
    for _ in range(MEMBERS):
        member = zlib.decompressobj(GZIP)
        while not member.eof:
            window = body[at : at + WINDOW]  # what is not used of it is copied
            try:
                piece = member.decompress(window, EXPANDED)
            except zlib.error as error:
                raise MalformedBody(f"the body is not what gzip writes: {error}") from error
            at += len(window) - len(member.unused_data) - len(member.unconsumed_tail)
            size += len(piece)
            if size > limit:
                raise TooLarge(f"the expanded body is over the limit of {limit} bytes")
            if not window and not piece and not member.eof:
                raise MalformedBody("the gzip body ends too early")
            pieces.append(piece)
        if at == len(body):
            return b"".join(pieces)
    raise MalformedBody(f"the gzip body has more than {MEMBERS} members")


def timing(request: Request, began: float) -> bytes:
    """The value of Server-Timing, in milliseconds (W3C Server Timing)."""
    now = time.monotonic()
    queue = (request.started or now) - (request.added or began)
    seconds = queue, request.forward, request.collect, now - began
    return b"queue;dur=%.3f, forward;dur=%.3f, collect;dur=%.3f, total;dur=%.3f" % tuple(1000 * s for s in seconds)


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, 1, mtime=0)


def _takes_gzip(accept: bytes) -> bool:
    """Accept-Encoding as RFC 9110 has it in 12.5.3, as far as it concerns gzip."""
    for choice in accept.lower().split(b","):
        coding, _, quality = choice.replace(b" ", b"").partition(b";q=")
        if coding in (b"gzip", b"x-gzip", b"*"):
            return quality.strip(b"0.") != b"" or not quality
    return False
