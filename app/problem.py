"""An error as an RFC 9457 problem: status, headers and body; it knows nothing of ASGI or of who sends it."""

from __future__ import annotations

import orjson

from workers.errors import PhalanxError, Unauthorized


def problem(error: PhalanxError, request_id: str, **members: object) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """(status, headers, body) for `error`; `members` are added to the JSON object (`errors=[...]` for items)."""
    body = orjson.dumps(
        {
            "type": f"urn:phalanx:error:{error.type}",
            "title": error.title,
            "status": error.status,
            # A detail may quote what a client sent, lone surrogates included, which UTF-8 does not have.
            "detail": error.detail.encode(errors="replace").decode(),
            "request_id": request_id,
            **members,
        }
    )
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return error.status, headers, body
