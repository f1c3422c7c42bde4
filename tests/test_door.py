"""`app.door`: what is refused, what is passed on, and how a connection ends; most of it without a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from app import door as module
from app.door import App, Door
from app.server import Server
from app.settings import load
from workers.errors import PhalanxError, QueueFull, TooLarge

pytestmark = pytest.mark.timeout(30)

LIMIT = 10


@dataclass
class Client:
    """The other side of one request: what it sends, what it got."""

    headers: dict[str, str] = field(default_factory=dict)
    body: list[bytes] = field(default_factory=list)  # in pieces
    path: str = "/infer"
    stays: bool = False  # sends no end of the body, and does not go away either
    sent: list[dict[str, Any]] = field(default_factory=list)
    reads: int = 0  # times the other side waited for the body

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        if self.body:
            piece = self.body.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.body) or self.stays}
        if self.stays:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))

    def visit(self, app: App, **options: Any) -> Client:
        """Passes through a door; returns itself."""
        scope = {
            "type": "http",
            "path": self.path,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()],
        }
        asyncio.run(Door(app, max_body_bytes=LIMIT, **options)(scope, self.receive, self.send))
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def got(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def answer(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def type(self) -> str:
        return str(orjson.loads(self.answer)["type"])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body and sends it back."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": ((b"content-type", b"x"),)})
    await send({"type": "http.response.body", "body": body})


async def hasty(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": orjson.dumps(scope["state"])})


def raising(error: Exception) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    return app


# The request id


@pytest.mark.parametrize("given", ["abc", "a" * 128, "with space, and {signs}"])
def test_a_request_id_of_the_clients_is_taken_and_echoed(given: str) -> None:
    client = Client({"x-request-id": given}).visit(hasty)
    assert client.got[b"x-request-id"] == given.encode()
    assert orjson.loads(client.answer) == {"request_id": given}


@pytest.mark.parametrize("given", ["", "a" * 129, "caf\xe9", "tab\there"])
def test_a_request_id_that_is_long_or_not_printable_is_replaced(given: str) -> None:
    client = Client({"x-request-id": given}).visit(hasty)
    made = client.got[b"x-request-id"].decode()
    assert made != given
    assert orjson.loads(client.answer) == {"request_id": made}


def test_requests_without_an_id_get_different_ones() -> None:
    assert Client().visit(hasty).got != Client().visit(hasty).got


def test_what_the_app_answers_is_passed_on_with_its_headers() -> None:
    client = Client({"content-length": "5"}, [b"he", b"llo"]).visit(echo)
    assert client.answer == b"hello"
    assert client.got.keys() == {b"content-type", b"x-request-id"}


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer second"},
        {"authorization": "bearer first"},
        {"x-api-key": "first"},
        {"authorization": "Basic Zm9v", "x-api-key": "second"},
    ],
)
def test_a_known_key_opens_the_door(headers: dict[str, str]) -> None:
    assert Client(headers).visit(hasty, keys=[b"first", b"second"]).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "third"},
        {"x-api-key": "firs"},
        {"authorization": "Bearer"},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"authorization": "Bearer caf\xe9"},
    ],
)
def test_without_a_known_key_it_is_401_and_says_what_to_do(headers: dict[str, str]) -> None:
    client = Client(headers).visit(echo, keys=[b"first", b"second"])
    assert client.status == 401
    assert client.got[b"www-authenticate"] == b"Bearer"
    assert client.got[b"content-type"] == b"application/problem+json"
    assert orjson.loads(client.answer)["request_id"].encode() == client.got[b"x-request-id"]


@pytest.mark.parametrize(("path", "status"), [("/livez", 200), ("/readyz", 200), ("/metrics", 401), ("/livez/", 401)])
def test_only_the_probes_are_open(path: str, status: int) -> None:
    assert Client(path=path).visit(hasty, keys=[b"first"]).status == status


def test_a_stranger_does_not_learn_the_limits() -> None:
    assert Client({"content-length": "999", "content-encoding": "gzip"}).visit(echo, keys=[b"k"]).status == 401


# Sizes


def test_a_body_of_just_the_limit_is_taken() -> None:
    assert Client({"content-length": f"{LIMIT}"}, [bytes(LIMIT)]).visit(echo).status == 200


def test_a_declared_body_over_the_limit_is_413_before_a_byte_of_it_is_read() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        pytest.fail("the app was called")

    client = Client({"content-length": f"{LIMIT + 1}"}).visit(never)
    assert (client.status, client.type) == (413, "urn:phalanx:error:too-large")
    assert client.got[b"connection"] == b"close"


def test_a_chunked_body_is_413_when_it_grows_over_the_limit() -> None:
    client = Client({"transfer-encoding": "chunked"}, [bytes(6)] * 3).visit(echo)
    assert (client.status, client.type) == (413, "urn:phalanx:error:too-large")
    assert client.got[b"connection"] == b"close"


def test_the_app_may_answer_a_body_that_grows_over_the_limit_itself() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(TooLarge):
            await echo(scope, receive, send)
        await hasty(scope, receive, send)

    client = Client({"transfer-encoding": "chunked"}, [bytes(6)] * 3).visit(app)
    assert (client.status, client.got[b"connection"]) == (200, b"close")


# Encodings


@pytest.mark.parametrize("encoding", ["identity", "Identity", "", "gzip"])
def test_a_body_that_is_not_encoded_is_taken(encoding: str) -> None:
    assert Client({"content-encoding": encoding}).visit(hasty).status == 200


@pytest.mark.parametrize("encoding", ["br", "identity, gzip", "caf\xe9"])
def test_an_encoded_body_is_415_and_is_told_what_is_taken(encoding: str) -> None:
    client = Client({"content-encoding": encoding, "content-length": "3"}, [b"abc"]).visit(echo)
    assert (client.status, client.type) == (415, "urn:phalanx:error:unsupported-media-type")
    assert client.got[b"accept-encoding"] == b"gzip, identity"


# Errors and the end of a connection


def test_an_error_that_leaves_the_app_is_answered_as_a_problem() -> None:
    client = Client().visit(raising(QueueFull("no room")))
    assert (client.status, client.type, client.got[b"retry-after"]) == (429, "urn:phalanx:error:queue-full", b"1")


def test_an_error_of_another_kind_is_logged_and_answered_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    client = Client().visit(raising(ZeroDivisionError("secret")))
    assert (client.status, client.type) == (500, "urn:phalanx:error:internal-error")
    assert b"secret" not in client.answer
    assert "secret" in caplog.text


def test_an_error_after_the_answer_began_is_left_to_the_server() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise QueueFull("too late")

    with pytest.raises(PhalanxError, match="too late"):
        Client().visit(app)


@pytest.mark.parametrize("headers", [{}, {"content-length": "0"}])
def test_a_request_without_a_body_keeps_its_connection(headers: dict[str, str]) -> None:
    assert b"connection" not in Client(headers).visit(hasty).got


def test_an_answer_before_the_body_was_read_closes_the_connection() -> None:
    client = Client({"content-length": "3"}, [b"abc"]).visit(hasty)
    assert client.got[b"connection"] == b"close"


def test_the_rest_of_the_body_is_read_on_after_the_answer_and_only_then_the_answer_ends() -> None:
    client = Client({"content-length": "9"}, [b"abc", b"def", b"ghi"]).visit(hasty)
    assert client.reads == 3
    assert [message.get("more_body") for message in client.sent] == [None, True, False]


def test_a_client_that_stops_in_the_middle_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE", 0.05)
    client = Client({"content-length": "9"}, [b"abc"], stays=True).visit(hasty)
    assert client.sent[-1]["more_body"] is False


def test_a_client_that_never_stops_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER", 0.1)

    class Endless(Client):
        async def receive(self) -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"x", "more_body": True}

    assert Endless({"transfer-encoding": "chunked"}).visit(hasty).sent[-1]["more_body"] is False


def test_a_lifespan_passes_untouched() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    client, scope = Client(), {"type": "lifespan"}
    asyncio.run(Door(app, max_body_bytes=LIMIT)(scope, client.receive, client.send))
    assert seen == [(scope, client.receive, client.send)]


# Behind a real server


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            return await (echo if scope["path"] == "/echo" else hasty)(scope, receive, send)
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})
        return None

    async def drain(_: float) -> None:
        pass

    server = Server(Door(app, max_body_bytes=2**20), load({"port": 0}), drain=drain)
    yielded = server.bind()
    thread = threading.Thread(target=server.run)
    thread.start()
    yield yielded
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def ask(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Sends all pieces before it reads, as simple clients do; what the server sends until it closes."""
    with socket.create_connection(address, timeout=10) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_client_that_sends_all_of_a_body_that_is_too_large_still_reads_its_413(address: tuple[str, int]) -> None:
    size = 32 * 2**20
    got = ask(address, b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size, bytes(size))
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in got


def test_so_does_one_that_sends_it_in_chunks(address: tuple[str, int]) -> None:
    chunk = b"10000\r\n" + bytes(2**16) + b"\r\n"
    got = ask(address, b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", *[chunk] * 64, b"0\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_asks_before_it_sends_is_refused_without_the_body(address: tuple[str, int]) -> None:
    got = ask(address, b"POST /echo HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in got


def test_an_early_answer_reaches_a_client_that_has_not_sent_its_body(address: tuple[str, int]) -> None:
    assert ask(address, b"POST /hasty HTTP/1.1\r\ncontent-length: 1000\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_body_that_was_read_leaves_the_connection_open_for_the_next(address: tuple[str, int]) -> None:
    request = b"POST /echo HTTP/1.1\r\ncontent-length: 3\r\n%s\r\nabc"
    got = ask(address, request % b"", request % b"connection: close\r\n")
    assert got.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize(
    "body", [[b""], [b"12345"], [b"12345678901"]], ids=["no body", "a body", "a body that is refused"]
)
def test_while_the_service_leaves_every_answer_closes_its_connection_once(body: list[bytes]) -> None:
    headers = {"content-length": str(sum(map(len, body)))}
    for leaving in (True, False):
        client = Client(headers, list(body)).visit(echo, leaving=lambda leaving=leaving: leaving)
        refused = len(b"".join(body)) > LIMIT
        assert [name for name, _ in client.sent[0]["headers"]].count(b"connection") == (leaving or refused)
