"""`POST /infer`: reads the body within its limits, queues it, writes the answer; it knows no model and no queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import numpy as np

from app import codecs
from app.batcher import Hold
from app.dispatcher import Dispatcher
from app.door import FILL, HANG_UP, Receive, Send
from app.metrics import Metrics
from app.problem import problem
from app.settings import Settings
from app.steps import Request
from workers.errors import BodyTimeout, InvalidItem, MalformedHeader, PhalanxError, TooLarge
from workers.ring import Block
from workers.wire import Buffer, Encoding

LONG = 64 * 1024  # bytes of a body from which shared memory is better than a socket
RUNS = 100  # of ranks in a header: proxies take no more than 4 KiB of headers in all

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, bytes]


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


class Infer:
    """The route, as a plain ASGI app: one pass over a request, with no per-request machinery around it."""

    def __init__(self, settings: Settings, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        began = time.monotonic()
        request_id: str = scope["state"]["request_id"]
        hold = self._dispatcher.account.open()
        try:
            try:
                status, headers, body = await self._answer(scope, receive, hold, began)
            except PhalanxError as error:
                error.__traceback__ = None  # it would keep the body until the next full garbage collection
                status, headers, body = problem(error, request_id)
                self._metrics.rejected.labels(error.type).inc()
            self._metrics.request_bytes.inc(hold.bytes)
            self._metrics.response_bytes.inc(len(body))
            hold.add_bytes(len(body))
            self._metrics.requests.labels(status).inc()
            self._metrics.request_seconds.observe(time.monotonic() - began)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except ClientGone as gone:
            gone.__traceback__ = None  # likewise
            self._metrics.aborted.labels(str(gone)).inc()
        finally:
            hold.release()

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, hold: Hold, began: float) -> Answer:
        headers, request_id = dict(scope["headers"]), scope["state"]["request_id"]
        accepts = codecs.request_encoding(headers.get(b"content-type"))
        returns = codecs.answer_encoding(headers.get(b"accept"), accepts)
        deadline = began + self._timeout(headers.get(b"x-request-timeout"))
        body, block = await self._read(scope, headers, receive, hold, accepts)
        cut = codecs.cut(body, accepts, returns, block)
        if len(cut.items) > self._settings.max_items:
            raise TooLarge(f"{len(cut.items)} items are over the limit of {self._settings.max_items} in one request")
        hold.take_items(len(cut.items))
        request = self._dispatcher.submit(cut, request_id, deadline)
        scope[HANG_UP] = lambda: request.end(ClientGone("wait"))  # what of it is queued is dropped
        try:
            await request.future
        finally:
            del scope[HANG_UP]  # the connection keeps the scope, and this would keep the body
        self._count(request)
        return _write(request, request_id, returns, began)

    async def _read(
        self,
        scope: MutableMapping[str, Any],
        headers: Mapping[bytes, bytes],
        receive: Receive,
        hold: Hold,
        accepts: Encoding,
    ) -> tuple[Buffer, Block | None]:
        """The whole body, and the block of the ring that it is in, if it is.

        Its bytes are accounted for before they are read: at once where its length is announced.
        """
        announced = int(headers.get(b"content-length", 0))
        hold.take_bytes(announced)
        if (fill := scope.pop(FILL, None)) is not None:
            block = self._dispatcher.block(announced) if accepts == "npy" and announced >= LONG else None
            body = block.view if block else np.empty(announced, np.uint8).data
            try:
                await fill(body, self._settings.body_timeout)
            except ConnectionResetError:
                raise ClientGone("body") from None
            return body, block
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
                return b"".join(chunks) if len(chunks) != 1 else chunks[0], None

    def _timeout(self, header: bytes | None) -> float:
        if header is None:
            return self._settings.request_timeout
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise MalformedHeader(
                f"X-Request-Timeout is {header.decode('latin-1')!r}, not a positive number of seconds"
            )
        return seconds

    def _count(self, request: Request) -> None:
        failed = len(request.failures)
        self._metrics.items.labels("ok").inc(request.size - failed)
        for error in request.failures.values():
            self._metrics.items.labels(error.type).inc()


def _write(request: Request, request_id: str, returns: Encoding, began: float) -> Answer:
    headers: Headers = [(b"server-timing", _timing(request, began)), (b"x-phalanx-ranks", _ranks(request.spans))]
    if request.size and len(request.failures) == request.size:
        return _all_failed(request.failures, request_id, headers)
    if returns == "npy" and not request.failures:
        body, media = codecs.join_npy(request.spans), codecs.MEDIA_TYPES["npy"]
        status = 200
    else:
        failures = dict(request.failures)
        body, media = codecs.join_json(request_id, request.spans, failures, returns), codecs.MEDIA_TYPES["json"]
        if failures and len(failures) == request.size:  # the last of them came to light as they took the JSON form
            return _all_failed(failures, request_id, headers)
        status = 207 if failures else 200
    headers += [(b"content-type", media.encode()), (b"content-length", b"%d" % len(body))]
    return status, headers, body


def _all_failed(failures: dict[int, PhalanxError], request_id: str, headers: Headers) -> Answer:
    """No item succeeded: 422 where every failure is the client's, else 500."""
    errors = list(failures.values())
    worst = next((error for error in errors if error.status != InvalidItem.status), errors[0])
    status, own, body = problem(worst, request_id, errors=codecs.describe(failures))
    return status, headers + own, body


def _timing(request: Request, began: float) -> bytes:
    """Server-Timing, in milliseconds (W3C Server Timing)."""
    now = time.monotonic()
    queue = (request.started or now) - (request.added or began)
    seconds = queue, request.forward, request.collect, now - began
    return b"queue;dur=%.3f, forward;dur=%.3f, collect;dur=%.3f, total;dur=%.3f" % tuple(1000 * s for s in seconds)


def _ranks(spans: Sequence[codecs.Span]) -> bytes:
    """Which rank had each item, in order: `0*32,1*32` is the first 32 and the next 32; `-` is none."""
    runs = [
        b"%s*%d" % (b"-" if rank is None else b"%d" % rank, sum(len(span.lengths) for span in run))
        for rank, run in islice(groupby(spans, attrgetter("rank")), RUNS + 1)
    ]
    return b",".join([*runs[:RUNS], b"..."] if len(runs) > RUNS else runs)


_ITEM_ERROR = {
    "type": "object",
    "required": ["index", "type", "title", "detail"],
    "properties": {
        "index": {"type": "integer", "description": "Place of the item in the request"},
        "type": {"type": "string"},
        "title": {"type": "string"},
        "detail": {"type": "string"},
    },
}
_PROBLEM = {
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail", "request_id"],
                "properties": {
                    "type": {"type": "string", "example": "urn:phalanx:error:invalid-item"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "request_id": {"type": "string"},
                    "errors": {"type": "array", "items": _ITEM_ERROR},
                },
            }
        }
    }
}
_OUTPUTS = {
    "type": "object",
    "required": ["id", "outputs"],
    "properties": {
        "id": {"type": "string", "description": "The request's id"},
        "outputs": {"type": "array", "items": {}, "description": "A result an item, in order; null where one failed"},
        "errors": {"type": "array", "items": _ITEM_ERROR, "description": "Of a 207: why items have no result"},
    },
}
_HEADERS = {
    "X-Phalanx-Ranks": {
        "schema": {"type": "string", "example": "0*32,1*32"},
        "description": "The rank that had each item, in order: here rank 0 the first 32 and rank 1 the next 32. "
        f"`-` stands for none; after {RUNS} runs `...` stands for the rest",
    },
    "Server-Timing": {
        "schema": {"type": "string", "example": "queue;dur=0.1, forward;dur=2.1, collect;dur=0.4, total;dur=3.2"},
        "description": "Milliseconds in the queue, in the forwards, in the collects, and in all",
    },
}
_NPY = {"schema": {"type": "string", "format": "binary"}}
_STATUSES = {
    400: "The body or a header is broken",
    401: "No valid API key",
    406: "No acceptable form for the answer",
    408: "The body stopped coming",
    413: "Too many bytes or items",
    415: "Unknown content type or encoding",
    422: "No item succeeded, and every failure is the client's",
    429: "No room in the queue now; see Retry-After",
    500: "No item succeeded, and some failure is not the client's",
    503: "Shutting down, or no worker group; see Retry-After",
    504: "The deadline passed",
}
OPENAPI: dict[str, Any] = {
    "post": {
        "tags": ["inference"],
        "summary": "Run a batch on every rank at once; results in order",
        "operationId": "infer",
        "parameters": [
            {"name": "X-Request-ID", "in": "header", "schema": {"type": "string"}, "description": "Echoed and logged"},
            {
                "name": "X-Request-Timeout",
                "in": "header",
                "schema": {"type": "number", "exclusiveMinimum": 0},
                "description": "Seconds the whole request may take",
            },
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["inputs"],
                        "additionalProperties": False,
                        "properties": {
                            "inputs": {"type": "array", "items": {}, "description": "The items"},
                            "parameters": {"type": ["object", "null"], "description": "Keyword arguments of predict"},
                        },
                    }
                },
                "application/x-npy": _NPY | {"description": "A NumPy array; its first axis counts the items"},
            },
        },
        "responses": {
            "200": {
                "description": "Every item has a result",
                "headers": _HEADERS,
                "content": {"application/json": {"schema": _OUTPUTS}, "application/x-npy": _NPY},
            },
            "207": {
                "description": "Some items failed; the answer is JSON",
                "headers": _HEADERS,
                "content": {"application/json": {"schema": _OUTPUTS}},
            },
            **{str(status): {"description": text} | _PROBLEM for status, text in _STATUSES.items()},
        },
    }
}
