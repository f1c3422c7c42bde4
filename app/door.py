"""What a request passes before a route sees it: request id, key, size, encoding; knows nothing of routes or items."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import random
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from app.body import FillBody
from app.problem import told
from workers.errors import InternalError, PhalanxError, TooLarge, Unauthorized, UnsupportedMediaType

log = logging.getLogger("app")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HANG_UP = "phalanx.hang_up"
"""In a request's scope the app may leave what the server calls if the client goes: that costs a fraction of a task that
waits for `receive` to say so."""
FILL = "phalanx.fill"
"""In the scope of a request that announces its length the server may leave a FillBody, for use instead of `receive`."""
OPEN_PATHS = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})  # probes carry no key
ENCODINGS = frozenset({b"", b"identity", b"gzip", b"x-gzip"})  # of bodies; routes expand them
LINGER = 10.0  # seconds an unread body is read on for after the answer
SILENCE = 1.0  # seconds without a byte of it that end the wait

_READ = frozenset(
    (b"x-request-id", b"content-length", b"transfer-encoding", b"content-encoding", b"authorization", b"x-api-key")
)
_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}")


class Door:
    """ASGI middleware, to be put around everything else so that every answer carries the request's id.

    An error that leaves the app before its answer began is answered: what is no PhalanxError is logged.
    """

    def __init__(
        self,
        app: App,
        *,
        max_body_bytes: int,
        keys: Collection[bytes] = (),
        open_paths: Collection[str] = OPEN_PATHS,
        refused: Callable[[PhalanxError, MutableMapping[str, Any]], None] = lambda *_: None,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """`open_paths` need no key; `refused` is called with what the door answers for the app, and the scope.

        While the service is `leaving`, every answer closes its connection: what would come next on it, it would take
        with it, and on a new one the client sees that nobody is there.
        """
        self.app = app
        self.leaving = leaving
        self.refused = refused
        self.max_body_bytes = max_body_bytes
        self.keys = tuple(keys)
        self.open_paths = frozenset(open_paths)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan; WebSockets are off in app.server
            return await self.app(scope, receive, send)
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else b"%032x" % random.getrandbits(128)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        visit = _Visit(receive, send, request_id, self.max_body_bytes, self.leaving)
        # A request without a body has nothing to be left unread, so its receive needs no watching.
        visit.unread = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        if FILL in scope:
            scope[FILL] = functools.partial(visit.fill, scope[FILL])
        try:
            self._admit(scope["path"], headers)
            await self.app(scope, visit.receive if visit.unread else receive, visit.send)
        except Exception as error:
            if visit.answering:
                raise
            if not isinstance(error, PhalanxError):
                log.exception("request %s: the front end failed", request_id.decode())
                error = InternalError("the front end failed; its log has the stack")
            self.refused(error, scope)
            await visit.refuse(error, scope["path"])

    def _admit(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self.keys and path not in self.open_paths and not self._known(headers):
            raise Unauthorized("the request needs a known API key, as Authorization: Bearer or X-API-Key")
        if int(headers.get(b"content-length", 0)) > self.max_body_bytes:
            raise _too_large(self.max_body_bytes)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in ENCODINGS:
            raise UnsupportedMediaType(
                f"the body has Content-Encoding {encoding.decode('latin-1')}; gzip and identity are taken"
            )

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b"")]
        if scheme.lower() == b"bearer":
            given.append(token.strip())
        # Every pair is compared, so that the time taken does not tell which key was nearly right.
        known = False
        for one in given:
            for key in self.keys:
                known |= hmac.compare_digest(one, key)
        return known


class _Visit:
    """One request: how much of its body came, and whether its answer has begun."""

    __slots__ = ("_leaving", "_limit", "_receive", "_request_id", "_send", "answering", "closing", "received", "unread")

    def __init__(
        self, receive: Receive, send: Send, request_id: bytes, limit: int, leaving: Callable[[], bool]
    ) -> None:
        self._leaving = leaving
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self._limit = limit
        self.received = 0
        self.unread = True
        self.answering = False
        self.closing = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.received += len(message.get("body", b""))
            if self.received > self._limit:
                raise _too_large(self._limit)
            self.unread = message.get("more_body", False)
        return message

    async def fill(self, fill: FillBody, target: memoryview, silence: float) -> None:
        await fill(target, silence)
        self.unread = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answering = True
            self.closing = self.unread
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            if self.closing or self._leaving():
                headers.append((b"connection", b"close"))
            await self._send({**message, "headers": headers})
        elif self.closing and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._read_on()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self._send(message)

    async def refuse(self, error: PhalanxError, path: str) -> None:
        status, headers, body = told(path)(error, self._request_id.decode())
        if isinstance(error, UnsupportedMediaType):
            headers.append((b"accept-encoding", b"gzip, identity"))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _read_on(self) -> None:
        """Reads and drops the rest of the body for a while after the answer.

        The server closes next, and to close on unread bytes sends a reset, which can take the answer with it before
        the client has read it.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + LINGER
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE) as silence:
                while loop.time() < end:
                    message = await self._receive()
                    if not message.get("more_body", False):
                        break
                    silence.reschedule(loop.time() + SILENCE)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is over the limit of {limit} bytes")
