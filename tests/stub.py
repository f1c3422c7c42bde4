"""A service that does as it is told, on a real socket: it echoes items, after whatever else was wanted of it first."""

from __future__ import annotations

import email
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Seen:
    """One request, as it came: `items` are JSON values, or (filename, bytes) of the parts of a form."""

    headers: dict[str, str]
    items: list
    parameters: object
    path: str = ""


Answer = Callable[[Seen], "tuple[int, dict[str, str], bytes] | None"]


@dataclass
class Stub:
    url: str
    script: deque[Answer] = field(default_factory=deque)  # of the next requests; after them `always`
    always: Answer = field(default=lambda seen: echo(seen))
    seen: list[Seen] = field(default_factory=list)


def echo(seen: Seen) -> tuple[int, dict[str, str], bytes]:
    outputs = [item[0] if isinstance(item, tuple) else item for item in seen.items]
    return 200, {"content-type": "application/json"}, json.dumps({"id": "x", "outputs": outputs}).encode()


def drop(seen: Seen) -> None:
    """The connection closes without an answer."""


def problem(status: int, slug: str, **headers: str) -> Answer:
    members = {"type": f"urn:phalanx:error:{slug}", "title": f"The {slug}", "detail": "why"}
    return lambda seen: (
        status,
        {name.replace("_", "-"): value for name, value in headers.items()} | {"x-request-id": "of-the-stub"},
        json.dumps(members).encode(),
    )


@contextmanager
def stub() -> Iterator[Stub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {}, b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            seen = _seen(dict(self.headers.items()), body)
            seen.path = self.path
            told.seen.append(seen)
            answer = (told.script.popleft() if told.script else told.always)(seen)
            if answer is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self._send(*answer)

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        told = Stub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()


def _seen(headers: dict[str, str], body: bytes) -> Seen:
    headers = {name.lower(): value for name, value in headers.items()}
    kind = headers["content-type"]
    if kind == "application/json":
        members = json.loads(body)
        return Seen(headers, members["inputs"], members.get("parameters"))
    if kind == "application/x-npy":
        return Seen(headers, [body], None)
    form = email.message_from_bytes(b"Content-Type: %b\r\n\r\n%b" % (kind.encode(), body))
    items, parameters = [], None
    for part in form.get_payload():
        if part.get_filename() is None:
            assert part.get_param("name", header="content-disposition") == "parameters"
            parameters = json.loads(part.get_payload(decode=True))
        else:
            items.append((part.get_filename(), part.get_payload(decode=True)))
    return Seen(headers, items, parameters)
