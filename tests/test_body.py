"""`app.body`: bodies past the parser, seen from raw client sockets."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from app.door import FILL, Door
from tests.test_server import GET, Connect, answer, hello, one_answer, serving

pytestmark = pytest.mark.timeout(30)

SILENCE = 0.4  # seconds
SHORT = 65536  # bytes
BODY = bytes(range(256)) * 4096  # 1 MiB
DIGEST = hashlib.sha256(BODY).hexdigest().encode()
ways: list[str] = []  # what became of each body


async def digest(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the digest of a long body; every other request is `hello`'s."""
    fill = scope.pop(FILL, None)
    if fill is None:
        await hello(scope, receive, send)
        return
    target = bytearray(int(dict(scope["headers"])[b"content-length"]))
    try:
        await fill(memoryview(target), SILENCE)
    except Exception as error:
        ways.append(type(error).__name__)
        raise
    ways.append("whole")
    found = hashlib.sha256(target).hexdigest().encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"64")]})
    await send({"type": "http.response.body", "body": found})


@pytest.fixture(scope="module")
def filling() -> Iterator[Connect]:
    with serving(Door(digest, max_body_bytes=2**24)) as connect:
        yield connect


@pytest.fixture(autouse=True)
def _forget() -> None:
    ways.clear()


def head(size: int, more: bytes = b"") -> bytes:
    return b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%s\r\n" % (size, more)


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("piece", [len(BODY), 65536, 9999])
def test_a_long_body_arrives_as_it_was_and_the_connection_serves_on(filling: Connect, piece: int) -> None:
    client = filling()
    for _ in range(3):
        client.sendall(head(len(BODY)))
        for at in range(0, len(BODY), piece):
            client.sendall(BODY[at : at + piece])
        assert one_answer(client, DIGEST)
        client.sendall(GET)
        assert one_answer(client, b"\r\n\r\n0")
    assert ways == ["whole"] * 3


def test_requests_behind_a_long_body_in_the_same_piece_are_answered_in_turn(filling: Connect) -> None:
    client = filling()
    client.sendall(GET + head(len(BODY)) + BODY + GET + head(len(BODY)) + BODY + GET)
    got = b""
    while got.count(b"HTTP/1.1 200") < 5 or not got.endswith(b"\r\n\r\n0"):
        got += client.recv(65536)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in got.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"0", DIGEST, b"0", DIGEST, b"0"]


def test_a_client_that_waits_for_100_continue_gets_it(filling: Connect) -> None:
    client = filling()
    client.sendall(head(len(BODY), b"expect: 100-continue\r\n"))
    assert one_answer(client, b"HTTP/1.1 100 Continue\r\n\r\n")
    client.sendall(BODY)
    assert one_answer(client, DIGEST)


def test_a_client_that_asks_for_another_protocol_has_its_long_body_read(filling: Connect) -> None:
    client = filling()
    for _ in range(2):
        client.sendall(
            head(len(BODY), b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n")
        )
        client.sendall(BODY)
        assert one_answer(client, DIGEST)


def test_a_chunked_body_takes_the_usual_way_and_bodies_of_any_length_this_one(filling: Connect) -> None:
    client = filling()
    client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    client.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert one_answer(client, b"%d" % len(BODY))
    assert not ways
    for size in (0, 1, 65535, 65536):
        client.sendall(head(size) + BODY[:size])
        assert one_answer(client, hashlib.sha256(BODY[:size]).hexdigest().encode())
    assert ways == ["whole"] * 4


def test_a_body_that_stops_is_408_with_what_is_here_and_the_connection_closes(filling: Connect) -> None:
    client = filling()
    client.sendall(head(len(BODY)) + BODY[:100_000])
    began = time.monotonic()
    got = answer(client)
    assert got.startswith(b"HTTP/1.1 408")
    assert b"100000 of 1048576 bytes are here" in got
    assert b"connection: close" in got.lower()
    assert SILENCE <= time.monotonic() - began < SILENCE + 3
    assert ways == ["BodyTimeout"]


def test_a_body_that_trickles_is_waited_for(filling: Connect) -> None:
    client = filling()
    client.sendall(head(SHORT))
    for at in range(0, SHORT, SHORT // 8):
        time.sleep(SILENCE / 3)  # the client's own slowness is what is tested
        client.sendall(BODY[at : at + SHORT // 8])
    assert one_answer(client, hashlib.sha256(BODY[:SHORT]).hexdigest().encode())


def test_a_client_that_goes_inside_its_body_is_noticed_at_once(filling: Connect) -> None:
    client = filling()
    client.sendall(head(len(BODY)) + BODY[:100_000])
    time.sleep(SILENCE / 4)  # the body's reading has begun, or it has not: either is right
    client.close()
    until(lambda: ways)
    assert ways == ["ConnectionResetError"]


def test_many_clients_at_once_get_each_their_own(filling: Connect) -> None:
    wrong: list[bytes] = []

    def post(number: int) -> None:
        client = clients[number]
        for round_ in range(10):
            body = BODY[number * 7 + round_ :]
            client.sendall(head(len(body)) + body)
            want = hashlib.sha256(body).hexdigest().encode()
            got = b""
            while got.count(b"\r\n\r\n") < 1 or len(got.partition(b"\r\n\r\n")[2]) < 64:
                got += client.recv(65536)
            if not got.endswith(want):
                wrong.append(got)

    with ExitStack():
        clients = [filling() for _ in range(8)]
        threads = [threading.Thread(target=post, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
