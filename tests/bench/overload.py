"""Ten times more than a group can do, from 512 connections, against the most it does when it is not overloaded.

    python -m tests.bench.overload [--seconds 20] [--times 10]

The model sleeps, so that it is the group that is short of time and not this machine's cores. First 32 clients that wait
for their answers show what the group can do (the queue never fills); then 512 connections together offer `times` that.
*Goodput* is what is answered 200; an admitted request should wait for about the queue's length over the group's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict

from tests.service import Service, serving

QUEUE_ITEMS = 128
BATCH, SLEEP = 8, 0.08  # a step: 100 items/s at the most
CLIENTS, CONNECTIONS = 32, 512
HEAD = "POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


class Load:
    """Clients that POST one item each, `pace` seconds apart or as soon as they are answered, until `end`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: dict[int, list[float]] = defaultdict(list)  # of every answer, by its code

    async def client(self, first: float, pace: float, end: float) -> None:
        await asyncio.sleep(first)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps({"inputs": [1], "parameters": {"sleep": SLEEP}})
        while (started := time.monotonic()) < end:
            writer.write((HEAD.format(len(body)) + body).encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            now = time.monotonic()
            self.seconds[int(head.split()[1])].append(now - started)
            if "connection: close" in head:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            await asyncio.sleep(max(0.0, started + pace - now))
        writer.close()

    async def run(self, clients: int, pace: float, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(self.client(pace * n / clients, pace, end) for n in range(clients)))


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def measure(service: Service, clients: int, pace: float, seconds: float) -> tuple[float, Load]:
    """Answers of 200 a second, by the service's own count of items between the same two instants."""
    load = Load(service.port)
    started = time.monotonic()
    asyncio.run(load.run(clients, pace, seconds))
    return len(load.seconds[200]) / (time.monotonic() - started), load


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--times", type=float, default=10)
    flags = parser.parse_args(argv)
    limits = {"queue_items": QUEUE_ITEMS, "max_items": QUEUE_ITEMS, "max_batch_size": BATCH}
    with serving("Obedient", ranks=1, **limits) as service:
        most, unloaded = measure(service, CLIENTS, 0, flags.seconds)
        offered = flags.times * most
        goodput, load = measure(service, CONNECTIONS, CONNECTIONS / offered, flags.seconds)
        print(f"unloaded: {most:.0f} answers/s, p99 {quantile(unloaded.seconds[200], 0.99):.2f} s ({CLIENTS} clients)")
        sent = sum(map(len, load.seconds.values()))
        print(f"overload: {sent / flags.seconds:.0f} requests/s from {CONNECTIONS} connections")
        print(
            f"  200: {goodput:.0f}/s, {goodput / most:.2f} of the most; p99 {quantile(load.seconds[200], 0.99):.2f} s"
        )
        print(f"       (queue length / rate = {QUEUE_ITEMS / most:.2f} s)")
        print(f"  429: {len(load.seconds[429])}, p50 {1e3 * quantile(load.seconds[429], 0.5):.1f} ms,", end="")
        print(f" p99 {1e3 * quantile(load.seconds[429], 0.99):.1f} ms")
        print(f"  others: { {code: len(all_) for code, all_ in load.seconds.items() if code not in (200, 429)} }")
    return 0


if __name__ == "__main__":
    sys.exit(main())
