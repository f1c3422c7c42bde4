"""`POST /infer`: which content type is read and which is written; it knows no model and no queue."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from app import codecs
from app.batcher import Hold
from app.door import Receive, Send
from app.intake import Answer, Fields, Intake, timing
from app.problem import problem
from app.steps import Request
from workers.errors import InvalidItem, PhalanxError
from workers.wire import Encoding


class Infer:
    """The route, as a plain ASGI app: one pass over a request, with no per-request machinery around it."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await self._intake.serve(scope, receive, send, self._answer, problem)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, hold: Hold, began: float) -> Answer:
        headers, request_id = dict(scope["headers"]), scope["state"]["request_id"]
        accepts = codecs.request_encoding(headers.get(b"content-type"))
        returns = codecs.answer_encoding(headers.get(b"accept"), accepts)
        deadline = self._intake.deadline(began, headers)
        body, block = await self._intake.body(scope, headers, receive, hold, ring=accepts == "npy")
        request = await self._intake.results(scope, codecs.cut(body, accepts, returns, block), hold, deadline)
        return _write(request, request_id, returns, began)


def _write(request: Request, request_id: str, returns: Encoding, began: float) -> Answer:
    headers: Fields = [(b"server-timing", timing(request, began))]
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


def _all_failed(failures: dict[int, PhalanxError], request_id: str, headers: Fields) -> Answer:
    """No item succeeded: 422 where every failure is the client's, else 500."""
    errors = list(failures.values())
    worst = next((error for error in errors if error.status != InvalidItem.status), errors[0])
    status, own, body = problem(worst, request_id, errors=codecs.describe(failures))
    return status, headers + own, body


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
                "content": {"application/json": {"schema": _OUTPUTS}, "application/x-npy": _NPY},
            },
            "207": {
                "description": "Some items failed; the answer is JSON",
                "content": {"application/json": {"schema": _OUTPUTS}},
            },
            **{str(status): {"description": text} | _PROBLEM for status, text in _STATUSES.items()},
        },
    }
}
