"""`POST /infer`: which model is asked, which content type is read and which is written; it knows no queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qs

from app import codecs, crowd, lines, multipart, outputs
from app.batcher import Hold
from app.dispatcher import Dispatcher
from app.door import Receive, Send
from app.intake import Answer, Fields, Intake, timing
from app.problem import problem
from app.steps import Request
from workers.errors import InvalidItem, PhalanxError, UnnamedModel
from workers.wire import Encoding

RUNS = 100  # of ranks in a header: proxies take no more than 4 KiB of headers in all


class Infer:
    """The route, as a plain ASGI app: one pass over a request, with no per-request machinery around it."""

    def __init__(self, intake: Intake, dispatcher: Dispatcher, max_items: int) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self._max_items = max_items

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await self._intake.serve(scope, receive, send, self._answer, problem)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, hold: Hold, began: float) -> Answer:
        model = _model(scope["query_string"])
        self._dispatcher.find(model)  # before the body is read, and once more after it
        headers = dict(scope["headers"])
        content_type = headers.get(b"content-type", b"")
        media = codecs.request_media(content_type)
        wanted = codecs.answer_media(headers.get(b"accept"), media)
        returns: Encoding = "npy" if wanted == "npy" else "json"
        deadline = self._intake.deadline(began, headers)
        body, block = await self._intake.body(scope, headers, receive, hold, ring=media == "npy")
        aside, size = self._intake.aside, len(body)
        if media == "multipart":
            cut = await aside(size, multipart.cut, bytes(body), content_type, returns, self._max_items)
        elif media == "ndjson":
            cut = await aside(size, codecs.cut_lines, bytes(body), returns, self._max_items)
        else:
            if media == "json" and crowd.may_be_crowded(body):
                await aside(size, crowd.check, body, self._max_items)
            cut = codecs.cut(body, media, returns, block)
            if isinstance(cut.items, codecs.Columns):
                cut = replace(cut, items=await aside(size, cut.items.in_rows))
        if wanted == "ndjson":
            return await self._stream(scope, cut, model, hold, deadline)
        request = await self._intake.results(scope, cut, model, hold, deadline)
        # rows of arrays become text where some failed; all else is joined as it is
        size = sum(span.frame.nbytes for span in request.spans) if returns == "npy" and _failed(request) else 0
        return await aside(size, _write, request, scope["state"]["request_id"], returns, began)

    async def _stream(
        self, scope: MutableMapping[str, Any], cut: codecs.Cut, model: str | None, hold: Hold, deadline: float
    ) -> Answer:
        """Begun with the first results: what fails the whole request before is its status, after that its lines'."""
        request = self._intake.submit(scope, cut, model, hold, deadline)
        request.progress = progress = asyncio.Event()
        try:
            if not request.future.done():
                await progress.wait()
            if request.future.done():
                await request.future
        except BaseException:
            self._intake.forget(scope)
            raise

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                async for piece in lines.answer(request, progress):
                    yield piece
            finally:
                self._intake.forget(scope)
            self._intake.count(request)

        return 200, [(b"content-type", codecs.MEDIA_TYPES["ndjson"].encode())], pieces()


def _model(query: bytes) -> str | None:
    """The model that a query string names, if it does; other parameters are nobody's. UnnamedModel: it names two."""
    if not query:
        return None
    names = set(parse_qs(query.decode(errors="replace"), keep_blank_values=True).get("model", []))
    if len(names) > 1:
        raise UnnamedModel(f"the query names {len(names)} models; one request is for one")
    return next(iter(names), None)


def _failed(request: Request) -> bool:
    return bool(request.failures or request.cut.broken)


def _write(request: Request, request_id: str, returns: Encoding, began: float) -> Answer:
    headers: Fields = [(b"server-timing", timing(request, began))]
    cut = request.cut
    if not cut.broken:
        headers.append((b"x-phalanx-ranks", _ranks(request.spans)))
    size = request.size + len(cut.broken)
    failures = dict(request.failures)
    if size and len(failures) + len(cut.broken) == size:
        return _all_failed(request, failures, request_id, headers)
    if returns == "npy" and not _failed(request):
        body, media = outputs.join_npy(request.spans), codecs.MEDIA_TYPES["npy"]
        status = 200
    else:
        body, media = outputs.join_json(request_id, request.spans, failures, returns, cut), codecs.MEDIA_TYPES["json"]
        if failures and len(failures) + len(cut.broken) == size:  # the last came to light as they took the JSON form
            return _all_failed(request, failures, request_id, headers)
        status = 207 if failures or cut.broken else 200
        if returns == "npy" and (dtype := outputs.common_dtype(request.spans)):
            headers.append((b"x-phalanx-dtype", dtype.encode()))
    headers += [(b"content-type", media.encode()), (b"content-length", b"%d" % len(body))]
    return status, headers, body


def _all_failed(request: Request, failed: dict[int, PhalanxError], request_id: str, headers: Fields) -> Answer:
    """No item succeeded: 422 where every failure is the client's, else 500."""
    failures = outputs.by_place(failed, request.cut)
    errors = list(failures.values())
    worst = next((error for error in errors if error.status != InvalidItem.status), errors[0])
    request.refused = worst.type
    status, own, body = problem(worst, request_id, errors=outputs.listed(failures))
    return status, headers + own, body


def _ranks(spans: Sequence[outputs.Span]) -> bytes:
    """Which rank had each item, in order: `0*32,1/0*32` is rank 0 of group 0, then that of group 1; `-` is none."""
    runs = [
        b"%s*%d" % (b"-" if rank is None else rank.encode(), sum(len(span.lengths) for span in run))
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
        "`1/0` is rank 0 of group 1, and without a group it is of group 0. "
        f"`-` stands for none; after {RUNS} runs `...` stands for the rest",
    },
    "X-Phalanx-Dtype": {
        "schema": {"type": "string", "example": "<f4"},
        "description": "Of results that would be an npy array, and are JSON since others failed: their dtype",
    },
    "Server-Timing": {
        "schema": {"type": "string", "example": "queue;dur=0.1, forward;dur=2.1, collect;dur=0.4, total;dur=3.2"},
        "description": "Milliseconds in the queue, in the forwards, in the collects, and in all",
    },
}
_NPY = {"schema": {"type": "string", "format": "binary"}}
_LINES = {"schema": {"type": "string"}}
_STATUSES = {
    400: "The body or a header is broken, or one of several models must be named",
    401: "No valid API key",
    404: "No model of that name is served",
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
            {
                "name": "model",
                "in": "query",
                "schema": {"type": "string"},
                "description": "Name of the model; only where several are served it must be there",
            },
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
                "application/x-ndjson": _LINES | {"description": "A JSON value a line: the items"},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                            "parameters": {"type": "string", "description": "JSON; keyword arguments of predict"},
                        },
                    },
                    "description": "Each part with a file name is an item, in order, whatever its field is called",
                },
            },
        },
        "responses": {
            "200": {
                "description": "Every item has a result",
                "headers": _HEADERS,
                "content": {
                    "application/json": {"schema": _OUTPUTS},
                    "application/x-npy": _NPY,
                    "application/x-ndjson": _LINES
                    | {"description": "A line an item, in order, as it comes: {index, output} or {index, error}"},
                },
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
