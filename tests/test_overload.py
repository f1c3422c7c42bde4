"""More than the service can do: it stays within its bounds, refuses the rest, and answers what it admits."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import Service, descendants, serving, until

QUEUE_ITEMS = 64
MIB = 2**20


@pytest.fixture(scope="module")
def small() -> Iterator[Service]:
    """One rank that runs 8 items at a time, before a small queue."""
    limits = {"queue_items": QUEUE_ITEMS, "max_items": QUEUE_ITEMS, "queue_bytes": 128 * MIB, "max_batch_size": 8}
    with serving("Obedient", ranks=1, max_body_bytes=64 * MIB, **limits) as service:
        yield service


def front_end(service: Service) -> int:
    [pid] = [
        pid for pid in descendants(service.process.pid) if "app.cli\0app" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    return pid


def resident(pid: int) -> int:
    """Bytes."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def request(body: bytes, length: int | None = None) -> bytes:
    head = "POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    return head.format(len(body) if length is None else length).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.long
def test_512_connections_get_200_or_429_within_the_bounds(small: Service) -> None:
    pid = front_end(small)
    before = resident(pid)
    codes: Counter[int] = Counter()
    most_items = 0
    end = time.monotonic() + 4

    async def client(n: int) -> None:
        reader = None
        while time.monotonic() < end:
            if reader is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
            body = json.dumps({"inputs": [n], "parameters": {"sleep": 0.01}}).encode()
            writer.write(request(body))
            code, headers, text = await answer(reader)
            codes[code] += 1
            if code == 429:
                assert headers["retry-after"] == "1"
            else:
                assert json.loads(text)["outputs"] == [n]
            if headers.get("connection") == "close" or code == 429:
                writer.close()
                reader = None
        if reader is not None:
            writer.close()

    async def watch() -> None:
        nonlocal most_items
        while time.monotonic() < end:
            items = (await asyncio.to_thread(small.info))["queue"]["items"]
            most_items = max(most_items, items)

    async def everyone() -> None:
        await asyncio.gather(watch(), *(client(n) for n in range(512)))

    asyncio.run(everyone())
    assert set(codes) == {200, 429}
    assert 0 < most_items <= QUEUE_ITEMS
    assert resident(pid) - before < 64 * MIB
    until(lambda: small.info()["queue"] == {"items": 0, "bytes": 0, "waiting_items": 0}, 5)


@pytest.mark.long
def test_bodies_that_are_only_announced_hold_room_but_no_memory(small: Service) -> None:
    pid = front_end(small)
    before = resident(pid)

    async def everyone() -> Counter[str]:
        outcomes: Counter[str] = Counter()
        pairs = [await asyncio.open_connection("127.0.0.1", small.port) for _ in range(512)]
        for _, writer in pairs:
            writer.write(request(b"{", length=64 * MIB))
        reads = [asyncio.ensure_future(answer(reader)) for reader, _ in pairs]
        done, waiting = await asyncio.wait(reads, timeout=8)
        outcomes.update(str(read.result()[0]) for read in done)
        outcomes["reading"] = len(waiting)
        assert small.info()["queue"]["bytes"] == 128 * MIB
        for read in waiting:
            read.cancel()
        for _, writer in pairs:
            writer.close()
        return outcomes

    assert asyncio.run(everyone()) == {"429": 510, "reading": 2}
    assert resident(pid) - before < 64 * MIB
    until(lambda: small.info()["queue"]["bytes"] == 0, 15)
    assert small.outputs(["next"]) == ["next"]
