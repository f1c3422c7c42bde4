"""Twenty thousand requests of every kind, two group deaths among them: nothing grows and nothing is left."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import socket
import statistics
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.service import Service, descendants, parent, serving, until

REQUESTS = 20_000
DEATHS = (500, 1500)  # early, so that the processes of the first quarter are those of the last
EVERY = 250  # requests between two looks
FIRST, LAST = range(REQUESTS // 8, REQUESTS // 4), range(REQUESTS * 3 // 4, REQUESTS)


def test_looks_fall_in_both_quarters() -> None:
    assert all(len([n for n in range(0, REQUESTS, EVERY) if n in quarter]) >= 10 for quarter in (FIRST, LAST))


def roles(service: Service) -> dict[str, int]:
    """The pid of every process of a service, by what it is."""
    ranks = {f"rank {n}": pid for n, pid in enumerate(service.pids())}
    found = {"serve": service.process.pid, "torchrun": parent(service.pids()[0]), **ranks}
    for pid in descendants(service.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "app.cli" in words:
            found["front end" if "app" in words else "launcher"] = pid
        elif pid not in found.values():
            found["spare torchrun"] = pid
    return found


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Soak:
    """Clients that take the next number, POST what it stands for, and hold the answer to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.numbers = itertools.count()
        self.done = 0
        self.lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()

    def client(self) -> None:
        with httpx.Client(base_url=self.service.client.base_url, timeout=120) as http:
            while (n := next(self.numbers)) < REQUESTS:
                rng = random.Random(n)
                kind = rng.choices(
                    ("good", "raises", "broken", "npy", "hangs up", "late", "large"), (60, 8, 8, 8, 8, 4, 4)
                )[0]
                getattr(self, kind.replace(" ", "_"))(http, rng, n)
                with self.lock:
                    self.outcomes[kind] += 1
                    self.done += 1

    def good(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        items = [n + i for i in range(rng.choice([1, 1, 3, 20]))]
        answer = http.post("/infer", json={"inputs": items})
        assert (answer.status_code, answer.json().get("outputs")) == (200, items), answer.text

    def raises(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        answer = http.post("/infer", json={"inputs": [n, {"do": "raise", "n": n}, n + 1]})
        assert (answer.status_code, answer.json().get("outputs")) == (207, [n, None, n + 1]), answer.text

    def broken(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        assert http.post("/infer", content=b'{"inputs": [' * rng.randrange(1, 4)).status_code in (400, 415)

    def npy(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        rows = np.full((rng.randrange(1, 9), 100), n % 1000, np.float32)
        file = io.BytesIO()
        np.save(file, rows)
        answer = http.post("/infer", content=file.getvalue(), headers={"content-type": "application/x-npy"})
        assert answer.status_code == 200, answer.text
        assert np.array_equal(np.load(io.BytesIO(answer.content)), rows)

    def hangs_up(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        body = json.dumps({"inputs": [n, n], "parameters": {"sleep": 0.01}}).encode()
        head = b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.service.port)) as sock:
            sock.sendall((head % len(body) + body)[: rng.choice([50, 120, 10_000])])

    def late(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        answer = http.post("/infer", json={"inputs": [n]}, headers={"x-request-timeout": "0.001"})
        assert answer.status_code in (200, 504), answer.text

    def large(self, http: httpx.Client, rng: random.Random, n: int) -> None:
        items = [f"{n}" * 10_000, n]
        answer = http.post("/infer", json={"inputs": items})
        assert (answer.status_code, answer.json().get("outputs")) == (200, items), answer.text[:200]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_twenty_thousand_requests_leave_memory_and_descriptors_as_they_were() -> None:
    shm = set(Path("/dev/shm").iterdir())
    memory: dict[str, dict[int, int]] = defaultdict(dict)
    opened: dict[str, dict[int, int]] = defaultdict(dict)
    with serving("Obedient", ranks=2, request_timeout=100) as service, ThreadPoolExecutor(16) as pool:
        soak = Soak(service)
        clients = [pool.submit(soak.client) for _ in range(16)]
        for at in sorted({*DEATHS, *range(EVERY, REQUESTS, EVERY)}):
            until(lambda at=at: soak.done >= at or any(c.done() for c in clients), 300, f"{at} requests")
            if any(client.done() for client in clients):
                break
            if at in DEATHS:
                epoch = service.group()["epoch"]
                os.kill(service.pids()[at % 2], signal.SIGKILL)
                until(lambda epoch=epoch: (group := service.group()) and group["epoch"] > epoch, 60, "the next epoch")
                service.wait_ready()
            for role, pid in roles(service).items():
                memory[role][at], opened[role][at] = resident(pid), descriptors(pid)
        for client in clients:
            client.result(300)
        print(f"soak: {dict(soak.outcomes)}")
        for role in memory:
            first, last = (
                [(memory[role][at], opened[role][at]) for at in quarter if at in memory[role]]
                for quarter in (FIRST, LAST)
            )
            (mib0, fds0), (mib1, fds1) = (
                (statistics.median(m for m, _ in looks) / 2**20, statistics.median(f for _, f in looks))
                for looks in (first, last)
            )
            print(f"  {role}: {mib0:.1f} -> {mib1:.1f} MiB, {fds0:g} -> {fds1:g} descriptors")
            if role != "spare torchrun":  # whose imports take the first quarter
                assert mib1 <= 1.05 * mib0 + 4, f"the memory of {role} grew"
            assert fds1 <= fds0 + 4, f"the descriptors of {role} grew"
        assert {"serve", "front end", "launcher", "rank 0", "rank 1"} <= set(memory)
        until(lambda: service.info()["queue"] == {"items": 0, "bytes": 0, "waiting_items": 0}, 10)
        run_dir = service.run_dir
    assert set(Path("/dev/shm").iterdir()) <= shm
    assert not run_dir.exists()
