"""`app.server` and `app.connection`, seen from raw client sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import select
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
    """Reads the body to its end and answers with its length, or to `/big` with 64 MiB."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    body = b"%d" % size if scope["path"] != "/big" else bytes(2**26)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def no_drain(_: float) -> None:
    pass


Connect = Callable[[], socket.socket]


@contextlib.contextmanager
def serving(app: Any = hello, settings: dict[str, object] | None = None, **limits: Any) -> Iterator[Connect]:
    """A server in a thread; yields a function that connects to it."""
    own = Limits(**limits) if limits else None
    server = Server(app, load({"port": 0} | (settings or {})), drain=no_drain, limits=own)
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


@pytest.fixture(scope="module")
def usual() -> Iterator[Connect]:
    """The server with the limits that it has by default."""
    with serving() as connect:
        yield connect


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


def test_a_request_is_answered_and_the_connection_kept_without_naming_the_server(usual: Connect) -> None:
    client = usual()
    for _ in range(3):
        client.sendall(GET)
        got = one_answer(client, b"\r\n\r\n0").lower()
        assert got.startswith(b"http/1.1 200 ok\r\n")
        assert b"server:" not in got
        assert b"connection:" not in got
        assert b"date:" in got


def test_a_head_of_32_kib_is_taken_and_a_larger_one_is_431(usual: Connect) -> None:
    for size, status in ((32 * 1024, b"200"), (32 * 1024 + 1, b"431")):
        client = usual()
        start, end = b"GET / HTTP/1.1\r\n", b"\r\nconnection: close\r\n\r\n"
        filler = size - len("/") - len("connectionclose") - 4 - len("a") - 4
        client.sendall(start + b"a: " + b"x" * filler + end)
        assert answer(client).startswith(b"HTTP/1.1 " + status)


def test_a_head_that_never_ends_is_431_and_the_connection_is_closed(usual: Connect) -> None:
    client = usual()
    client.sendall(b"GET / HTTP/1.1\r\na: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            client.sendall(b"x" * 1024)
    got = answer(client)
    assert got.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close\r\n" in got


@pytest.mark.parametrize(
    "endless", [b"0\r\n" + b"a: b\r\n" * 200_000, b"0\r\na: " + b"x" * 2**20, b"5;" + b"x" * 2**20]
)
def test_trailers_or_chunk_sizes_that_never_end_are_431(endless: bytes, usual: Connect) -> None:
    client = usual()
    client.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    client.sendall(endless)
    assert answer(client).startswith(b"HTTP/1.1 431 ")


def test_many_small_chunks_with_a_small_trailer_are_no_large_head(usual: Connect) -> None:
    client = usual()
    client.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
    client.sendall(b"1\r\nx\r\n" * 50_000 + b"0\r\na: b\r\n\r\n")
    assert answer(client).endswith(b"\r\n\r\n50000")


@pytest.mark.parametrize("upgrade", [b"", b"connection: Upgrade\r\nupgrade: h2c\r\n"])
def test_a_trailer_never_passes_for_a_header_however_it_comes(upgrade: bytes) -> None:
    async def headers(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await hello(scope, receive, send)
        while (await receive())["more_body"]:
            pass
        body = b"|".join(name for name, _ in scope["headers"]) + b"#"
        fields = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        return await send({"type": "http.response.body", "body": body})

    head = b"POST / HTTP/1.1\r\n%sx-one: 1\r\ntransfer-encoding: chunked\r\n\r\n" % upgrade
    rest = b"1\r\nx\r\n0\r\nx-api-key: secret\r\nexpect: 100-continue\r\n\r\n"
    with serving(headers) as connect:
        client = connect()
        for pieces in ([head + rest], [head, rest], [head + rest[:8], rest[8:]], [head + rest + head + rest]):
            for piece in pieces:
                client.sendall(piece)
            count = b"".join(pieces).count(b"POST")
            got = b""
            while got.count(b"#") < count:
                got += client.recv(65536)
            assert got.count(b"x-one|transfer-encoding#") == count
            assert b"x-api-key" not in got


def test_a_large_body_in_the_same_piece_as_its_head_is_no_large_head(usual: Connect) -> None:
    client = usual()
    client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\nconnection: close\r\n\r\n" + bytes(200_000))
    assert answer(client).endswith(b"200000")


def test_a_large_head_behind_another_request_is_refused_after_the_first_answer(usual: Connect) -> None:
    client = usual()
    client.sendall(GET + b"GET / HTTP/1.1\r\na: " + b"x" * 40_000 + b"\r\n\r\n")
    got = answer(client)
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.count(b"HTTP/1.1 200 ") == 1


def test_a_large_head_that_begins_behind_a_request_and_ends_after_its_answer_is_431(usual: Connect) -> None:
    client = usual()
    client.sendall(GET + b"GET / HTTP/1.1\r\na: " + b"x" * 20_000)
    one_answer(client, b"\r\n\r\n0")
    client.sendall(b"x" * 20_000 + b"\r\n\r\n")
    assert answer(client).startswith(b"HTTP/1.1 431 ")


def test_a_head_that_does_not_come_in_time_is_408() -> None:
    with serving(head_time=0.2) as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert answer(client).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_trickles_is_408_all_the_same() -> None:
    with serving(head_time=0.3) as connect:
        client = connect()
        for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
            client.sendall(bytes([byte]))
            if select.select([client], [], [], 0.02)[0]:
                break
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
    with serving(settings={"max_connections": 2}) as connect:
        first, second = connect(), connect()
        for client in (first, second):
            client.sendall(GET)
            one_answer(client, b"\r\n\r\n0")
        got = answer(connect())
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in got
        first.close()
        got = b""
        while not got.startswith(b"HTTP/1.1 200 "):  # the server hears of it in its own time
            with contextlib.suppress(ConnectionError), connect() as third:
                third.sendall(GET)
                got = third.recv(65536)


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / SPDY/9\r\n\r\n"]
)
def test_what_is_not_http_is_a_plain_400(noise: bytes, usual: Connect) -> None:
    client = usual()
    client.sendall(noise)
    got = answer(client)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"text/plain" in got


def test_a_refused_client_that_goes_on_sending_still_reads_its_answer(usual: Connect) -> None:
    client = usual()
    client.sendall(b"GARBAGE\r\n\r\n" + bytes(2**20))
    client.sendall(bytes(2**20))
    assert answer(client).startswith(b"HTTP/1.1 400 ")


BROKEN = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nZZZ\r\n"


def slow(go: threading.Event) -> Any:
    """`hello`, which answers /slow in two pieces, the second when told to."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/slow":
            await hello(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.to_thread(go.wait)
        await send({"type": "http.response.body", "body": b"second"})

    return app


@pytest.mark.parametrize("between", [b"", GET])
def test_a_fault_behind_a_request_in_work_takes_nothing_from_its_answer(between: bytes) -> None:
    go = threading.Event()
    with serving(slow(go)) as connect:
        client = connect()
        client.sendall(GET.replace(b"GET /", b"GET /slow"))
        assert b"first" in client.recv(65536)
        client.sendall(between + BROKEN)
        time.sleep(0.1)  # for the fault to be seen: were it answered at once, it would be here
        go.set()
        got = answer(client)
        assert got.startswith(b"6\r\nsecond\r\n0\r\n\r\n")
        assert got.count(b"HTTP/1.1 200") == bool(between)
        assert b"400" not in got


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


def test_requests_that_ask_for_another_protocol_are_answered_in_this_one_with_their_bodies(usual: Connect) -> None:
    head = b"POST / HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
    sized, chunked = b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n"
    client = usual()
    for body, size in ((sized, b"3"), (b"\r\n", b"0"), (chunked, b"4"), (sized, b"3")):
        client.sendall(head + body[:-2])
        client.sendall(body[-2:])
        assert one_answer(client, b"\r\n\r\n" + size).startswith(b"HTTP/1.1 200 ")
    client.sendall((head + sized) * 2 + GET)
    assert one_answer(client, b"\r\n\r\n0").count(b"HTTP/1.1 200 ") == 3


def test_a_client_that_does_not_take_its_answer_is_cut_off() -> None:
    cut_off = threading.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await hello(scope, receive, send)
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
            await asyncio.sleep(0)
        cut_off.set()
        return None

    with serving(flood, stall_time=0.2) as connect:
        client = connect()
        client.sendall(GET)
        assert cut_off.wait(10)


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
    with serving(settings={"host": "localhost"}) as connect:
        assert connect().getpeername()[0] == "127.0.0.1"


def test_an_error_in_the_lifespan_reaches_the_caller_as_it_is() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RunDirectoryError("the run directory is taken")

    with pytest.raises(RunDirectoryError, match="taken"):
        Server(failing, load({"port": 0}), drain=no_drain).run()


def test_an_app_that_says_it_does_not_start_is_not_served() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "not today"})

    with pytest.raises(StartError, match="not today"):
        Server(failing, load({"port": 0}), drain=no_drain).run()


def test_a_stop_before_the_start_is_not_forgotten() -> None:
    before = signal.getsignal(signal.SIGTERM)
    server = Server(hello, load({"port": 0}), drain=no_drain)
    server.stop()
    assert server.run() == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("soft", "hard", "allowed", "warns"), [(64, 100_000, 2304, 0), (64, 1000, 1000, 1)])
def test_the_limit_on_open_files_is_raised_to_what_the_connections_need(
    soft: int, hard: int, allowed: int, warns: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    server = Server(hello, load({"port": 0}), drain=no_drain)
    server.stop()
    server.run()
    assert limits == {resource.RLIMIT_NOFILE: (allowed, hard)}
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == warns


PROGRAM = """
import asyncio, logging, sys, time
import app.server as app_server
from app.server import Server
from app.settings import load

draining, answered = asyncio.Event(), asyncio.Event()

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        print("lifespan over", flush=True)
        return await send({"type": "lifespan.shutdown.complete"})
    if scope["path"] == "/stuck":
        print("stuck", flush=True)
        time.sleep(60)
    if scope["path"] == "/never":
        print("never", flush=True)
        await asyncio.Event().wait()
    if scope["path"] == "/slow":
        print("admitted", flush=True)
        await draining.wait()
        await asyncio.sleep(0.3)
        answered.set()
        status = 200
    else:
        status = 503 if draining.is_set() else 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})

async def drain(timeout):
    draining.set()
    print("draining", flush=True)
    if sys.argv[1] == "fail":
        raise RuntimeError("no drain today")
    await (answered if sys.argv[1] == "wait" else asyncio.Event()).wait()

logging.basicConfig(level="INFO")
app_server.CLOSE_GRACE = 1
server = Server(app, load({"port": 0, "drain_timeout": 0.5 if sys.argv[1] == "overrun" else 20}), drain=drain)
print(server.bind()[1], flush=True)
sys.exit(server.run())
"""


class Process:
    """PROGRAM, listening; `drain` is what its drain does: wait for /slow, hang, overrun its time or fail."""

    def __init__(self, drain: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, drain], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.port = int(self.line())
        self.ask("/").close()  # it serves

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def ask(self, path: str, *, read: bool = True) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        client.sendall(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        if read:
            one_answer(client, b"\r\n\r\n")
        return client

    def status(self, path: str) -> bytes:
        with self.ask(path, read=False) as client:
            return one_answer(client, b"\r\n\r\n").split()[1]

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Waits for it to end by itself: exit code and what it logged."""
        _, logged = self.popen.communicate(timeout=10)
        return self.popen.returncode, logged


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def one(drain: str) -> Process:
        started.append(Process(drain))
        return started[-1]

    yield one
    for process in started:
        process.popen.kill()
        process.popen.communicate()


Start = Callable[[str], Process]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_admitted_finish_while_new_requests_get_their_503_and_exits_0(
    start: Start, number: int
) -> None:
    process = start("wait")
    slow = process.ask("/slow", read=False)
    assert process.line() == "admitted"
    process.signal(number)
    assert process.line() == "draining"
    assert process.status("/") == b"503"
    assert answer(slow).startswith(b"HTTP/1.1 200 ")
    slow.close()
    assert process.line() == "lifespan over"
    code, logged = process.end()
    assert code == 0
    assert f"listening on http://127.0.0.1:{process.port}" in logged
    with pytest.raises(ConnectionRefusedError):
        process.ask("/")


def test_a_second_signal_ends_the_process_at_once(start: Start) -> None:
    process = start("hang")
    process.signal(signal.SIGTERM)
    assert process.line() == "draining"
    process.signal(signal.SIGINT)
    assert process.end()[0] == 130


def test_a_second_signal_ends_a_process_whose_loop_is_stuck(start: Start) -> None:
    process = start("hang")
    with process.ask("/stuck", read=False):
        assert process.line() == "stuck"
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGINT)
        assert process.end()[0] in (130, 143)  # two pending signals come in no order


def test_a_drain_that_overruns_is_logged_and_the_stop_goes_on(start: Start) -> None:
    process = start("overrun")
    process.signal(signal.SIGTERM)
    code, logged = process.end()
    assert code == 0
    assert "did not keep to its 0.5 s" in logged


def test_what_a_failed_drain_left_is_answered_in_the_grace_and_then_given_up(start: Start) -> None:
    process = start("fail")
    with process.ask("/slow", read=False) as slow, process.ask("/never", read=False) as never:
        assert {process.line(), process.line()} == {"admitted", "never"}
        process.signal(signal.SIGTERM)
        assert answer(slow).startswith(b"HTTP/1.1 200 ")
        assert answer(never).startswith(b"HTTP/1.1 500 ")
    code, logged = process.end()
    assert code == 0
    assert "no drain today" in logged
