"""`Client` and `AsyncClient` of a service: connections and concurrency; what goes over them `app.call` decides."""

from __future__ import annotations

import asyncio
import functools
import itertools
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from types import TracebackType
from typing import Any

import httpx

from app.answers import Came, ItemsFailed, Outcomes, join
from app.call import Ask, Call, Policy
from app.chunks import MIB, Array, Chunk, Cutter, File, cut
from workers.errors import ItemError, RequestError, StrangeAnswer, Unreachable

__all__ = [
    "AsyncClient",
    "Client",
    "File",
    "ItemError",
    "ItemsFailed",
    "Outcomes",
    "RequestError",
    "StrangeAnswer",
    "Unreachable",
]

URL = "http://127.0.0.1:8000"
CONCURRENCY = 4  # requests at a time for the chunks of one batch


class Client:
    """Of the service at `base_url`; threads may share one.

    `model` names the model, which must be done only where the service has several.
    `timeout` is in seconds, for a request with its retries, of which there are at most `retries`: when no answer comes,
    and on 429, 502 and 503. What is longer than `chunk_items` items or `chunk_bytes` bytes goes in several requests.
    """

    def __init__(
        self,
        base_url: str = URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        retries: int = 6,
        chunk_items: int = 1024,
        chunk_bytes: int = 8 * MIB,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._policy = Policy(timeout, retries, chunk_items, chunk_bytes, model)
        self._http = httpx.Client(transport=transport, **_settings(base_url, api_key))

    def infer(
        self,
        items: Iterable[object] | Array,
        *,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> list[Any] | Array:
        """A result an item, in order. ItemsFailed: some have none; RequestError: all of it was refused or given up.

        `items` are JSON values; paths and `File`s, each sent as a file; or an array whose first axis counts them. An
        array is answered by an array where the model's results are rows of one form, and by a list where not.
        """
        ask = Ask(self._policy, items, parameters, timeout, request_id)
        return ask.all(self._gather(ask, items))

    def outcomes(
        self,
        items: Iterable[object] | Array,
        *,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Outcomes:
        """As `infer`, but items that fail raise nothing: (outputs, errors), None in place of an output."""
        ask = Ask(self._policy, items, parameters, timeout, request_id)
        return self._gather(ask, items)

    def map(
        self,
        items: Iterable[object] | Array,
        *,
        concurrency: int = CONCURRENCY,
        chunk_items: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """A result an item, in order, while `items` are read, which may never end; a failed one's is its ItemError.

        No more than `concurrency` chunks are read ahead of the results. RequestError as `infer`.
        """
        ask = Ask(self._policy, items, parameters, timeout, None)
        chunks = cut(items, chunk_items or self._policy.chunk_items, self._policy.chunk_bytes)
        for outcomes in self._answers(map(ask.call, chunks), concurrency):
            yield from outcomes.each()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _gather(self, ask: Ask, items: Iterable[object] | Array) -> Outcomes:
        chunks = cut(items, self._policy.chunk_items, self._policy.chunk_bytes)
        return join(self._answers(map(ask.call, chunks), CONCURRENCY))

    def _answers(self, calls: Iterator[Call], concurrency: int) -> Iterator[Outcomes]:
        stop = threading.Event()
        head = list(itertools.islice(calls, 2))
        if len(head) < 2:  # needs no thread
            yield from (self._run(call, stop) for call in head)
            return
        pool = ThreadPoolExecutor(concurrency, "phalanx")
        running: deque[Future[Outcomes]] = deque()
        try:
            for call in itertools.chain(head, calls):
                running.append(pool.submit(self._run, call, stop))
                while running and (len(running) >= concurrency or running[0].done()):
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, call: Call, stop: threading.Event) -> Outcomes:
        while call.unanswered and not stop.wait(call.pause):
            came: Came
            try:
                came = self._http.request(**call.request(time.monotonic()))
            except (httpx.TransportError, httpx.DecodingError) as error:
                came = error
            call.settle(came, time.monotonic())
        return call.outcomes()


class AsyncClient:
    """`Client` for asyncio."""

    def __init__(
        self,
        base_url: str = URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        retries: int = 6,
        chunk_items: int = 1024,
        chunk_bytes: int = 8 * MIB,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._policy = Policy(timeout, retries, chunk_items, chunk_bytes, model)
        self._http = httpx.AsyncClient(transport=transport, **_settings(base_url, api_key))

    async def infer(
        self,
        items: Iterable[object] | Array,
        *,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> list[Any] | Array:
        """As `Client.infer`."""
        ask = Ask(self._policy, items, parameters, timeout, request_id)
        return ask.all(await self._gather(ask, items))

    async def outcomes(
        self,
        items: Iterable[object] | Array,
        *,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Outcomes:
        """As `Client.outcomes`."""
        ask = Ask(self._policy, items, parameters, timeout, request_id)
        return await self._gather(ask, items)

    async def map(
        self,
        items: Iterable[object] | AsyncIterable[object] | Array,
        *,
        concurrency: int = CONCURRENCY,
        chunk_items: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        """As `Client.map`; `items` may be asynchronous."""
        ask = Ask(self._policy, items, parameters, timeout, None)
        chunks = _cut(items, chunk_items or self._policy.chunk_items, self._policy.chunk_bytes)
        async with aclosing(self._answers(ask, chunks, concurrency)) as answers:
            async for outcomes in answers:
                for outcome in outcomes.each():
                    yield outcome

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _gather(self, ask: Ask, items: Iterable[object] | Array) -> Outcomes:
        chunks = _cut(items, self._policy.chunk_items, self._policy.chunk_bytes)
        return join([outcomes async for outcomes in self._answers(ask, chunks, CONCURRENCY)])

    async def _answers(
        self, ask: Ask, chunks: AsyncIterator[Chunk], concurrency: int
    ) -> AsyncGenerator[Outcomes, None]:
        running: deque[asyncio.Task[Outcomes]] = deque()
        try:
            async for chunk in chunks:
                running.append(asyncio.create_task(self._run(ask.call(chunk))))
                while running and (len(running) >= concurrency or running[0].done()):
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, call: Call) -> Outcomes:
        while call.unanswered:
            await asyncio.sleep(call.pause)
            came: Came
            try:
                came = await self._http.request(**call.request(time.monotonic()))
            except (httpx.TransportError, httpx.DecodingError) as error:
                came = error
            call.settle(came, time.monotonic())
        return call.outcomes()


async def _cut(
    items: Iterable[object] | AsyncIterable[object] | Array, most_items: int, most_bytes: int
) -> AsyncIterator[Chunk]:
    if not isinstance(items, AsyncIterable):
        for chunk in cut(items, most_items, most_bytes):
            yield chunk
        return
    cutter = Cutter(most_items, most_bytes)
    async for item in items:
        for chunk in cutter.add(item):
            yield chunk
    for chunk in cutter.rest():
        yield chunk


@functools.cache
def tls() -> ssl.SSLContext:
    """One for all: to read the certificates takes a fifth of a second."""
    return httpx.create_ssl_context()


def _settings(base_url: str, api_key: str | None) -> dict[str, Any]:
    url = httpx.URL(base_url)
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{base_url!r} is not the address of a service, such as {URL}")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return {"base_url": base_url, "headers": headers, "limits": limits, "verify": tls()}
