"""One line a request on standard output: JSON, or words on a terminal; it knows no socket, no queue and no trace."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import sys
import time
from contextlib import suppress
from typing import NamedTuple, TextIO
from urllib.parse import quote

import orjson

from app.steps import Request

FLUSH = 0.1  # seconds for which lines are gathered: a write a line would cost more than the line
LEFT_OUT = "time", "message"  # of the words of a line on a terminal
CLIENT_GONE = 499  # where there is nobody to send a status to


class Entry(NamedTuple):
    """What one request came to."""

    request_id: str
    path: str  # as clients meant it, without escapes
    status: int
    error: str | None  # type of the error that was the answer to all of it
    bytes_in: int
    bytes_out: int
    began: float  # time.monotonic(), like the next
    ended: float
    request: Request | None  # as far as it was admitted
    trace_id: str | None


class RequestLog:
    """Lines in the order in which requests end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._lines: list[str] = []

    def write(self, entry: Entry) -> None:
        if not self._lines:
            asyncio.get_running_loop().call_later(FLUSH, self.flush)
        members = _members(entry)
        if self._terminal:
            words = " ".join(f"{name}={_word(value)}" for name, value in members.items() if name not in LEFT_OUT)
            self._lines.append(f"{members['time']} {words}\n")
        else:
            self._lines.append(orjson.dumps(members).decode() + "\n")

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        with suppress(OSError, ValueError):  # nobody reads it any more: that is no reason not to serve
            self._stream.write("".join(lines))
            self._stream.flush()


def _members(entry: Entry) -> dict[str, object]:
    """Times in milliseconds."""
    now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    members: dict[str, object] = {
        "time": now.isoformat(timespec="milliseconds"),
        "message": "request",
        "request_id": entry.request_id,
        "path": entry.path if entry.path.isascii() and entry.path.isprintable() else quote(entry.path),
        "status": entry.status,
    }
    if entry.error is not None:
        members["error"] = entry.error
    if (request := entry.request) is not None:
        if request.model is not None:
            members["model"] = request.model
        members["items"] = request.size + len(request.cut.broken)
        members["failed"] = len(request.failures) + len(request.cut.broken)
        members["queue_ms"] = _ms((request.started or entry.ended) - (request.added or entry.began))
        members["forward_ms"] = _ms(request.forward)
        members["collect_ms"] = _ms(request.collect)
    members |= {
        "total_ms": _ms(entry.ended - entry.began),
        "bytes_in": entry.bytes_in,
        "bytes_out": entry.bytes_out,
    }
    if entry.trace_id is not None:
        members["trace_id"] = entry.trace_id
    return members


def _word(value: object) -> str:
    """What clients wrote, as one word, and without what a terminal would take for commands."""
    text = str(value)
    return text if re.fullmatch(r"[!#-~]+", text) else json.dumps(text)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
