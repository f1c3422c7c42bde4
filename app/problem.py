"""An error as status, headers and body: an RFC 9457 problem, or as the Open Inference Protocol has it; no more."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from workers.errors import PhalanxError, Unauthorized

Told = tuple[int, list[tuple[bytes, bytes]], bytes]


def told(path: str) -> Callable[[PhalanxError, str], Told]:
    """How an error is told to who asked for `path`: (error, request id) to (status, headers, body)."""
    return plain if path == "/v2" or path.startswith("/v2/") else problem


def plain(error: PhalanxError, request_id: str) -> Told:
    """`{"error": detail}`, as the Open Inference Protocol has it; a 422 is a 400 there, which its clients know."""
    return _told(error, 400 if error.status == 422 else error.status, b"application/json", {"error": _said(error)})


def problem(error: PhalanxError, request_id: str, **members: object) -> Told:
    """(status, headers, body) for `error`; `members` are added to the JSON object (`errors=[...]` for items)."""
    about = {
        "type": f"urn:phalanx:error:{error.type}",
        "title": error.title,
        "status": error.status,
        "detail": _said(error),
        "request_id": request_id,
    }
    return _told(error, error.status, b"application/problem+json", about | members)


def _said(error: PhalanxError) -> str:
    """A detail may quote what a client sent, lone surrogates included, which UTF-8 does not have."""
    return error.detail.encode(errors="replace").decode()


def _told(error: PhalanxError, status: int, media: bytes, about: dict[str, object]) -> Told:
    body = orjson.dumps(about)
    headers = [(b"content-type", media), (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, body
