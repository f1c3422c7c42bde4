"""An answer as application/x-ndjson, line by line as results come; it knows no model, no queue and no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import orjson

from app import outputs
from app.steps import Request
from workers.errors import PhalanxError, RequestError
from workers.wire import Buffer


async def answer(request: Request, progress: asyncio.Event) -> AsyncIterator[bytes]:
    """A line an item, in order, each as soon as it and all before it are known; `progress` is set at every news.

    If the request as a whole fails on the way, that is the error of all items that have no result yet.
    """
    at = 0  # next item of the request, which knows nothing of broken lines
    waiting = iter(sorted(request.cut.broken.items()))
    index = request.cut.index or range(request.size)
    pending = next(waiting, None)

    def broken_before(limit: float) -> Iterator[bytes]:
        nonlocal pending
        while pending is not None and pending[0] < limit:
            yield _line(pending[0], None, pending[1])
            pending = next(waiting, None)

    while True:
        lines: list[bytes] = []
        ready = {span.start: span for span in request.spans if span.lengths}
        while span := ready.pop(at, None):
            for text in outputs.texts(span):
                lines += broken_before(index[at])
                lines.append(_line(index[at], text, request.failures.get(at)))
                at += 1
        request.spans = list(ready.values())
        if request.future.done():
            error = request.future.exception()
            if isinstance(error, RequestError):
                for place in index[at:]:
                    lines += [*broken_before(place), _line(place, None, error)]
            elif error is not None:
                raise error
            lines += broken_before(float("inf"))
            yield b"".join(lines)
            return
        if lines:
            yield b"".join(lines)
        await progress.wait()
        progress.clear()


def _line(index: int, output: Buffer | None, error: PhalanxError | None) -> bytes:
    if error is not None:
        return orjson.dumps({"index": index, "error": outputs.describe(error)}) + b"\n"
    return b'{"index":%d,"output":%s}\n' % (index, output)
