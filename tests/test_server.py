"""`app.server` and `app.connection`, seen from raw client sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.connection import Limits
from app.server import Server
from app.settings import load
from workers.errors import RunDirectoryError, StartError

pytestmark = pytest.mark.timeout(30)

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ROOT = Path(__file__).parent.parent


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body to its end and answers with its length; `/early` answers first, `/big` with 64 MiB."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    body = b"%d" % size if scope["path"] != "/big" else bytes(2**26)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def no_drain(timeout: float) -> None:
    pass


Connect = Callable[[], socket.socket]


@contextlib.contextmanager
def serving(app: Any = hello, host: str = "127.0.0.1", **limits: Any) -> Iterator[Connect]:
    """A server in a thread; yields a function that connects to it."""
    server = Server(app, load({"host": host, "port": 0}), drain=no_drain, limits=Limits(**limits))
    address = server.bind()
    thread = threading.Thread(target=server.run)
    thread.start()
    with contextlib.ExitStack() as clients:
        try:
            yield lambda: clients.enter_context(socket.create_connection(address, timeout=10))
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()


def answer(client: socket.socket) -> bytes:
    """Everything the server sends until it closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def one_answer(client: socket.socket, end: bytes) -> bytes:
    """What the server sends, up to `end`; the connection may stay open."""
    got = b""
    while not got.endswith(end):
        piece = client.recv(65536)
        assert piece, got
        got += piece
    return got


def test_a_request_is_answered_and_the_connection_kept_without_naming_the_server() -> None:
    with serving() as connect:
        client = connect()
        for _ in range(3):
            client.sendall(GET)
            got = one_answer(client, b"\r\n\r\n0").lower()
            assert got.startswith(b"http/1.1 200 ok\r\n")
            assert b"server:" not in got
            assert b"connection:" not in got
            assert b"date:" in got


def test_a_head_of_32_kib_is_taken_and_a_larger_one_is_431() -> None:
    with serving() as connect:
        for size, status in ((32 * 1024, b"200"), (32 * 1024 + 1, b"431")):
            client = connect()
            start, end = b"GET / HTTP/1.1\r\n", b"\r\nconnection: close\r\n\r\n"
            filler = size - len("/") - len("connectionclose") - 4 - len("a") - 4
            client.sendall(start + b"a: " + b"x" * filler + end)
            assert answer(client).startswith(b"HTTP/1.1 " + status)


def test_a_head_that_never_ends_is_431_and_the_connection_is_closed() -> None:
    with serving() as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\na: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                client.sendall(b"x" * 1024)
        got = answer(client)
        assert got.startswith(b"HTTP/1.1 431 ")
        assert b"connection: close\r\n" in got


def test_a_large_body_in_the_same_piece_as_its_head_is_no_large_head() -> None:
    with serving() as connect:
        client = connect()
        client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\nconnection: close\r\n\r\n" + bytes(200_000))
        assert answer(client).endswith(b"200000")


def test_a_large_head_behind_another_request_is_refused_after_the_first_answer() -> None:
    with serving() as connect:
        client = connect()
        client.sendall(GET + b"GET / HTTP/1.1\r\na: " + b"x" * 40_000 + b"\r\n\r\n")
        got = answer(client)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert got.count(b"HTTP/1.1 ") == 1


def test_a_head_that_does_not_come_in_time_is_408() -> None:
    with serving(head_time=0.2) as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert answer(client).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_trickles_is_408_all_the_same() -> None:
    with serving(head_time=0.3) as connect:
        client = connect()
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        assert answer(client).startswith(b"HTTP/1.1 408 ")


def test_the_second_head_on_a_connection_has_its_time_too() -> None:
    with serving(head_time=0.2) as connect:
        client = connect()
        client.sendall(GET)
        one_answer(client, b"\r\n\r\n0")
        time.sleep(0.4)  # idle between requests is not late
        client.sendall(b"GET / HTTP")
        assert answer(client).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_sends_nothing_is_just_closed() -> None:
    with serving(head_time=0.2) as connect:
        assert answer(connect()) == b""


def test_a_body_may_take_longer_than_a_head() -> None:
    with serving(head_time=0.2) as connect:
        client = connect()
        client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 2\r\nconnection: close\r\n\r\n1")
        time.sleep(0.4)
        client.sendall(b"2")
        assert answer(client).endswith(b"\r\n\r\n2")


def test_connections_over_the_limit_are_503_and_a_place_that_is_given_back_is_taken_again() -> None:
    with serving(connections=2) as connect:
        first, second = connect(), connect()
        for client in (first, second):
            client.sendall(GET)
            one_answer(client, b"\r\n\r\n0")
        got = answer(connect())
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in got
        first.close()
        for _ in range(100):  # the server hears of it in its own time
            third = connect()
            third.sendall(GET)
            if third.recv(65536).startswith(b"HTTP/1.1 200 "):
                break
        else:
            pytest.fail("the place was not given back")


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / SPDY/9\r\n\r\n"])
def test_what_is_not_http_is_a_plain_400(noise: bytes) -> None:
    with serving() as connect:
        client = connect()
        client.sendall(noise)
        got = answer(client)
        assert got.startswith(b"HTTP/1.1 400 ")
        assert b"text/plain" in got


def test_a_refused_client_that_goes_on_sending_still_reads_its_answer() -> None:
    with serving() as connect:
        client = connect()
        client.sendall(b"GARBAGE\r\n\r\n" + bytes(2**20))
        client.sendall(bytes(2**20))
        assert answer(client).startswith(b"HTTP/1.1 400 ")


def test_a_broken_chunk_is_400_and_the_app_hears_of_a_disconnect() -> None:
    heard = threading.Event()

    async def listener(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await hello(scope, receive, send)
        while (await receive())["type"] != "http.disconnect":
            pass
        heard.set()
        return None

    with serving(listener) as connect:
        client = connect()
        client.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
        assert answer(client).startswith(b"HTTP/1.1 400 ")
        assert heard.wait(5)


def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one_and_closed() -> None:
    with serving() as connect:
        client = connect()
        client.sendall(
            b"POST / HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
            b"content-length: 3\r\n\r\nabc"
        )
        got = answer(client)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert got.endswith(b"\r\n\r\n3")


def test_a_client_that_does_not_take_its_answer_is_cut_off() -> None:
    with serving(stall_time=0.3) as connect:
        client = connect()
        client.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(1.5)
        assert len(answer(client)) < 2**26


def test_a_slow_client_that_takes_its_answer_gets_all_of_it() -> None:
    with serving(stall_time=0.3) as connect:
        client = connect()
        client.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        size = 0
        while piece := client.recv(2**20):
            size += len(piece)
            time.sleep(0.01)
        assert size > 2**26


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"127\.0\.0\.1:{port} is in use"):
            Server(hello, load({"port": port}), drain=no_drain).run()


def test_a_host_that_is_not_here_is_named() -> None:
    with pytest.raises(StartError, match=r"no-such-host\.invalid:0 cannot be listened on"):
        Server(hello, load({"host": "no-such-host.invalid", "port": 0}), drain=no_drain).run()


def test_localhost_is_127_0_0_1() -> None:
    with serving(host="localhost") as connect:
        assert connect().getpeername()[0] == "127.0.0.1"


def test_an_error_in_the_lifespan_reaches_the_caller_as_it_is() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RunDirectoryError("the run directory is taken")

    with pytest.raises(RunDirectoryError, match="taken"):
        Server(failing, load({"port": 0}), drain=no_drain).run()


PROGRAM = """
import asyncio, sys
from app.server import Server
from app.settings import load
from tests.test_server import hello

served = asyncio.Event()
admitted = 0

async def app(scope, receive, send):
    "`/slow` is answered when the drain begins; everything else once draining is 503."
    global admitted
    if scope["type"] == "lifespan":
        return await hello(scope, receive, send)
    slow = scope["path"] == "/slow"
    if slow:
        admitted += 1
        print("slow", flush=True)
        await draining.wait()
        await asyncio.sleep(0.2)
        admitted -= 1
    status = 503 if draining.is_set() and not slow else 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})
    if not admitted:
        served.set()

draining = asyncio.Event()

async def drain(timeout):
    print("draining", timeout, flush=True)
    draining.set()
    if sys.argv[1] == "waits":
        await served.wait()
        served.clear()
        await served.wait()
    elif sys.argv[1] == "hangs":
        await asyncio.Event().wait()
    elif sys.argv[1] == "fails":
        raise RuntimeError("no")

import logging
logging.basicConfig(level="INFO")
server = Server(app, load({"port": 0, "drain_timeout": float(sys.argv[2])}), drain=drain)
print(server.bind()[1], flush=True)
sys.exit(server.run())
"""
