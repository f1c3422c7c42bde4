"""The app on a socket, by uvicorn: port, signals, the order of a stop; it knows nothing of what the app does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from types import FrameType
from typing import Any, cast

import uvicorn
import uvloop

from app.connection import Connection, Limits
from app.settings import Settings
from workers.errors import StartError

log = logging.getLogger("app")

App = Callable[[Any, Any, Any], Awaitable[None]]
Drain = Callable[[float], Awaitable[None]]  # seconds it may take

KEEP_ALIVE = 75  # seconds an idle connection is kept: longer than the load balancers' 60, so that they close first
CLOSE_GRACE = 3  # seconds after the drain for the last bytes of answers


def serve(app: App, settings: Settings, *, drain: Drain) -> int:
    """Serves `app` until a signal stops it; returns the exit code. StartError where it cannot start."""
    return Server(app, settings, drain=drain).run()


class Server:
    """One app on one port.

    On the first SIGTERM or SIGINT: `drain(timeout)` is awaited with the listener still open, then the listener closes,
    and `run` returns 0. On the second the process exits at once, with 143 or 130.
    """

    def __init__(self, app: App, settings: Settings, *, drain: Drain, limits: Limits | None = None) -> None:
        self._app = app
        self._settings = settings
        self._drain = drain
        self._limits = limits or Limits(connections=settings.max_connections)
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._stopping = False
        self._signalled = False
        self._failure: Exception | None = None

    def bind(self) -> tuple[str, int]:
        """Claims the port, before anything costly is started, and returns the address; StartError if it is taken."""
        host, port = self._claimed().getsockname()[:2]
        return host, port

    def run(self) -> int:
        """Blocks until stopped and returns the exit code. Raises what the app's lifespan raised at start."""
        _allow_open_files(self._limits.connections)
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        with self._claimed() as listener, self._signals(), runner:
            runner.run(self._serve(listener))
        return 0

    def stop(self) -> None:
        """What the first signal does; from any thread, or a signal handler."""
        self._stopping = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    def _claimed(self) -> socket.socket:
        if self._listener is None:
            self._listener = listen(self._settings.host, self._settings.port)
        return self._listener

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stopping:  # a signal came before there was a loop to tell
            self._stop.set()
        config = uvicorn.Config(
            self._entry,
            http=cast("type[asyncio.Protocol]", functools.partial(Connection, self._limits)),
            ws="none",
            interface="asgi3",
            lifespan="on",
            workers=1,
            log_config=None,
            log_level="error",  # anyone on the network can make uvicorn warn
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=CLOSE_GRACE,
        )
        try:
            await _Uvicorn(config, self._until_drained).serve(sockets=[listener])
        except _NotStarted:
            raise self._failure or StartError("the app knows no lifespan") from None
        finally:
            self._loop = None
        log.info("stopped")

    async def _until_drained(self) -> None:
        log.info("listening on %s", _url(*self.bind()))
        await self._stop.wait()
        timeout = self._settings.drain_timeout
        log.info("stopping: up to %g s for the requests already admitted", timeout)
        try:
            await asyncio.wait_for(self._drain(timeout), timeout + 1)
        except TimeoutError:
            log.warning("the drain did not keep to its %g s", timeout)
        except Exception:
            log.exception("the drain failed")

    def _entry(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._lifespan(scope, receive, send)
        return self._app(scope, receive, send)

    async def _lifespan(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Keeps the exception of a failed start for `run` to raise, where uvicorn would log it and exit with 3."""
        started = False

        async def forward(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = started or message["type"] == "lifespan.startup.complete"
            if message["type"] == "lifespan.startup.failed":
                self._failure = StartError(message.get("message") or "the app did not start")
            else:
                await send(message)

        try:
            await self._app(scope, receive, forward)
        except Exception as error:
            if started:
                raise
            self._failure = error
        if not started:
            await send({"type": "lifespan.startup.failed"})

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            os._exit(128 + number)
        self._signalled = True
        self.stop()


class _NotStarted(Exception):
    """The app's lifespan failed."""


class _Uvicorn(uvicorn.Server):
    """uvicorn, but with the signals left alone, and stopping when `until` returns."""

    def __init__(self, config: uvicorn.Config, until: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._until = until

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(SystemExit):  # of newer versions; older ones just return
            await super().startup(sockets=sockets)
        if not self.started:
            raise _NotStarted

    async def main_loop(self) -> None:
        ticking = asyncio.create_task(super().main_loop())  # the Date header
        await self._until()
        self.should_exit = True
        await ticking


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; StartError, with the reason, where there can be none."""
    where = f"{_bracketed(host)}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # localhost means 127.0.0.1
        dual = family == socket.AF_INET6 and address[0] == "::"
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"{where} is in use: another process listens there (PHALANX_PORT, --port)") from None
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise StartError(f"{where} cannot be listened on (PHALANX_HOST, PHALANX_PORT): {reason}") from None


def _url(host: str, port: int) -> str:
    return f"http://{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def open_files(connections: int) -> int:
    """How many the front end may have open: as many connections more may be waiting for their refusal to be read."""
    return 2 * connections + 256


def _allow_open_files(connections: int) -> None:
    """Raises the soft limit on open files, often 1024, to what the connections need; warns where that fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = open_files(connections)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    allowed = need if hard == resource.RLIM_INFINITY else min(need, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < need:
        log.warning("%d open files are allowed (ulimit -n): too few for %d connections", allowed, connections)
