"""The service against its own model, a plain FastAPI app and itself on fewer ranks: every figure of the README's table.

    python -m tests.bench.serving [--rows ABCDEFGHI] [--seconds 3] [--rounds 3]

Everything runs on the same cores, the two sides of a row taking turns, so that only the ratios count. Load comes from
wrk (a Debian package), which costs little; what it does cost is in every figure of the service. Unless a row says
otherwise the model is `tests.models.Heavy`, an MLP of 512-2048-2048-512 in float32, on 2 ranks, one thread a rank.
Where there are GPUs, the rows that make sense there follow, on one rank a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from tests.service import ROOT, Service, descendants, free_port, serving, until
from workers import launch

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
JSON, NPY = "application/json", "application/x-npy"
SCRIPT = """
local file = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", file:read("*a")
wrk.headers["Content-Type"] = "{media}"
done = function(summary, latency, requests)
  local bad = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
  io.write(string.format("\\nfound %d %d %d %d %d\\n", summary.requests, summary.duration, latency:percentile(50),
    latency:percentile(99), bad))
end
"""


@dataclass
class Found:
    """What one turn of wrk found: requests a second, and seconds."""

    rate: float
    p50: float
    p99: float


class Bench:
    """How long a turn takes and how many there are; and the table."""

    def __init__(self, seconds: float, rounds: int, device: str = "cpu") -> None:
        self.device = device
        self.ranks = launch.visible_gpus() if device == "cuda" else 2
        self.seconds = seconds
        self.rounds = rounds
        self.folder = Path(tempfile.mkdtemp(prefix="phx-bench-"))

    # ---- load

    def serving(self, model: str, ranks: int = 0) -> contextlib.AbstractContextManager[Service]:
        return serving(model, ranks=ranks or self.ranks, device=self.device)

    def wrk(self, url: str, connections: int, body: bytes, media: str = JSON) -> Callable[[], Found]:
        """A turn of `connections` that POST `body` again and again; an answer other than 2xx is an error."""
        name = f"{abs(hash((body, media)))}"
        (self.folder / name).write_bytes(body)
        script = self.folder / f"{name}.lua"
        script.write_text(SCRIPT.format(body=self.folder / name, media=media))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{self.seconds:g}s", "--timeout", "30s", "-s", str(script), url]

        def turn() -> Found:
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            requests, micros, p50, p99, bad = map(int, printed.rsplit("found ", 1)[1].split())
            assert requests, printed
            assert not bad, printed
            return Found(requests / micros * 1e6, p50 / 1e6, p99 / 1e6)

        return turn

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[Callable[[], float]]:
        """A turn of one process a rank of `tests.bench.alone`: items a second of all."""
        commands = [
            [sys.executable, "-m", "tests.bench.alone", what, f"cuda:{rank}" if self.device == "cuda" else "cpu"]
            for rank in range(self.ranks)
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": ENVIRONMENT, "cwd": ROOT, "text": True}
        workers = [subprocess.Popen(command, **pipes) for command in commands]  # type: ignore[call-overload]
        try:
            for worker in workers:
                assert worker.stdout.readline() == "ready\n"

            def turn() -> float:
                for worker in workers:
                    worker.stdin.write(f"{self.seconds}\n")
                    worker.stdin.flush()
                return sum(int(worker.stdout.readline()) for worker in workers) / self.seconds

            yield turn
        finally:
            for worker in workers:
                worker.stdin.close()
                worker.wait()

    @contextlib.contextmanager
    def plain(self, workers: int) -> Iterator[str]:
        """`tests.bench.plain` in uvicorn; its address."""
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "tests.bench.plain:app", "--port", str(port), "--no-access-log"]
        command += ["--workers", str(workers), "--log-level", "warning"]
        process = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT)
        address = f"http://127.0.0.1:{port}"

        def up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.post(f"{address}/echo", json={"inputs": [1]}).status_code == 200
            return False

        try:
            for _ in range(20 * workers):  # until every worker has its model, most likely
                until(up, 60)
            yield address
        finally:
            process.terminate()
            process.wait()

    def turns(self, *sides: Callable[[], object]) -> list[list]:
        """The sides taking turns, after one each that does not count."""
        found: list[list] = [[] for _ in sides]
        for turn in range(self.rounds + 1):
            for side, results in zip(sides, found, strict=True):
                result = side()
                if turn:
                    results.append(result)
        return found

    # ---- the table

    def row(self, name: str, target: str, figure: str, detail: str) -> None:
        print(f"| {name} | {target} | {figure} | {detail} |", flush=True)


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def as_json(rows: np.ndarray) -> bytes:
    return json.dumps({"inputs": rows.tolist()}).encode()


def as_npy(rows: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def rows(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).random((n, *shape), np.float32)


def front_end(service: Service) -> int:
    [pid] = [
        pid for pid in descendants(service.process.pid) if b"app.cli\0app" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def batches(bench: Bench, service: Service, row: str, media: str, kind: str, target: float) -> None:
    """A and B: 64 items a request on 8 connections, against the ranks' work with no server."""
    body = as_json(rows(64, 512)) if media == JSON else as_npy(rows(64, 512))
    with bench.alone(kind) as alone:
        ours, theirs = bench.turns(bench.wrk(f"{service.client.base_url}/infer", 8, body, media), alone)
    a, b = 64 * middle([one.rate for one in ours]), middle(theirs)
    bench.row(
        f"{row}. 64 × 512 floats, {media.split('/')[1]}, 8 connections: items/s of the {kind} alone",
        f"≥ {target:.2f}",
        f"{a / b:.2f}",
        f"{a:.0f} of {b:.0f} items/s",
    )


def singles(bench: Bench, service: Service) -> None:
    """C: one item a request, against a plain FastAPI app on two processes."""
    body = as_json(rows(1, 512))
    with bench.plain(2) as address:
        for connections, target in ((64, 4.5), (512, 4.0)):
            ours, theirs = bench.turns(
                bench.wrk(f"{service.client.base_url}/infer", connections, body),
                bench.wrk(f"{address}/infer", connections, body),
            )
            a, b = (middle([one.rate for one in side]) for side in (ours, theirs))
            p, q = (1e3 * middle([one.p99 for one in side]) for side in (ours, theirs))
            bench.row(
                f"C. 1 × 512 floats, JSON, {connections} connections: requests/s of plain FastAPI, 2 processes",
                f"≥ {target:.1f}, p99 lower",
                f"{a / b:.1f}",
                f"{a:.0f} and {b:.0f} requests/s, p99 {p:.0f} and {q:.0f} ms",
            )


def overhead(bench: Bench) -> None:
    """D: an echo, against a FastAPI route that does nothing else."""
    body = b'{"inputs": [1]}'
    with bench.serving("Obedient") as service, bench.plain(1) as address:
        ours, theirs = bench.turns(
            bench.wrk(f"{service.client.base_url}/infer", 64, body), bench.wrk(f"{address}/echo", 64, body)
        )
    a, b = (middle([one.rate for one in side]) for side in (ours, theirs))
    detail = f"{a:.0f} of {b:.0f} requests/s"
    bench.row(
        "D. echo of a small item, 64 connections: requests/s of a bare FastAPI route", "≥ 0.50", f"{a / b:.2f}", detail
    )


def scaling(bench: Bench) -> None:
    """E: one client's large batch on two ranks and on one."""
    with bench.serving("Heavy", 1) as one, bench.serving("Heavy", 2) as two:
        for media, body, target in ((NPY, as_npy(rows(1024, 512)), 0.55), (JSON, as_json(rows(1024, 512)), 0.60)):

            def post(service: Service, media: str = media, body: bytes = body) -> float:
                started = time.perf_counter()
                answer = service.client.post("/infer", content=body, headers={"content-type": media})
                assert answer.status_code == 200, answer.text
                return time.perf_counter() - started

            found = bench.turns(*[lambda s=s: middle([post(s) for _ in range(5)]) for s in (one, two)])  # type: ignore[misc]
            a, b = map(middle, found)
            name = f"E. one client, 1,024 × 512 floats, {media.split('/')[1]}: time on 1 rank"
            bench.row(name, f"≤ {target:.2f}", f"{b / a:.2f}", f"{1e3 * b:.0f} of {1e3 * a:.0f} ms")


def images(bench: Bench) -> None:
    """F: large bodies."""
    body = as_npy(np.ones((64, 3, 224, 224), np.uint8))
    with bench.serving("Images") as service, bench.alone("images") as alone:
        ours, theirs = bench.turns(bench.wrk(f"{service.client.base_url}/infer", 4, body, NPY), alone)
    a, b = 64 * middle([one.rate for one in ours]), middle(theirs)
    name = "F. 64 images of 3×224×224 bytes, npy, 4 connections: items/s of the model alone"
    bench.row(name, "≥ 0.90", f"{a / b:.2f}", f"{a:.0f} of {b:.0f} items/s")


def fairness(bench: Bench, service: Service) -> None:
    """G: single items beside a large request, in steps of that request's own."""
    large, single = as_npy(rows(10_000, 512)), as_npy(rows(1, 512))
    group = service.group()
    capacity = len(group["ranks"]) * group["model"]["max_batch_size"]

    def post(client: httpx.Client, body: bytes) -> float:
        started = time.perf_counter()
        assert client.post("/infer", content=body, headers={"content-type": NPY}).status_code == 200
        return time.perf_counter() - started

    step = middle([post(service.client, large) for _ in range(2)]) / (10_000 / capacity)
    waits: list[float] = []
    end = time.monotonic() + bench.seconds * (bench.rounds + 1)

    def beside() -> None:
        with httpx.Client(base_url=service.client.base_url, timeout=60) as client:
            while time.monotonic() < end:
                post(client, large)

    thread = threading.Thread(target=beside)
    thread.start()
    while time.monotonic() < end - 1:
        waits.append(post(service.client, single))
    thread.join()
    waits.sort()
    p99 = waits[int(0.99 * len(waits))]
    name = "G. single items beside a request of 10,000: p99 in steps"
    bench.row(
        name,
        "≤ 3",
        f"{p99 / step:.1f}",
        f"p50 {1e3 * middle(waits):.0f}, p99 {1e3 * p99:.0f}, a step {1e3 * step:.0f} ms",
    )


def ranks(bench: Bench) -> None:
    """H: a model that sleeps, on up to 8 ranks."""
    body = as_npy(rows(64, 8))
    first = 0.0
    for world in (1, 2, 4, 8):
        with bench.serving("Sleeper", world) as service:
            turn = bench.wrk(f"{service.client.base_url}/infer", 4 * world, body, NPY)
            gaps: list[float] = []

            def sample(service: Service = service, gaps: list[float] = gaps) -> None:
                time.sleep(bench.seconds / 2)
                answer = service.client.post("/infer", content=body, headers={"content-type": NPY})
                gaps.extend(set(np.load(io.BytesIO(answer.content)).ravel().tolist()))

            found = []
            for turn_number in range(bench.rounds + 1):
                thread = threading.Thread(target=sample)
                thread.start()
                before, started = service.metric("phalanx_step_items_sum"), time.perf_counter()
                turn()
                rate = (service.metric("phalanx_step_items_sum") - before) / (time.perf_counter() - started)
                thread.join()
                if turn_number:
                    found.append(rate)
        rate = middle(found)
        first = first or rate
        name = f"H. 20 ms of sleep a step, {world} rank{'s' * (world > 1)}: items/s of linear growth; gap between steps"
        detail = f"{rate:.0f} items/s, {rate / (world * 16 / 0.02):.2f} of the sleep alone"
        bench.row(name, "≥ 0.90, ≤ 1 ms", f"{rate / first / world:.2f}, {1e3 * middle(gaps):.1f} ms", detail)


def cost(bench: Bench, service: Service) -> None:
    """I: the front end's CPU."""
    pid = front_end(service)
    for name, body, media, connections in (
        ("single items", as_json(rows(1, 512)), JSON, 64),
        ("64 items, JSON", as_json(rows(64, 512)), JSON, 8),
        ("64 items, npy", as_npy(rows(64, 512)), NPY, 8),
    ):
        turn = bench.wrk(f"{service.client.base_url}/infer", connections, body, media)
        turn()
        before, started = cpu_seconds(pid), time.perf_counter()
        requests = turn().rate * bench.seconds
        spent = cpu_seconds(pid) - before
        share = spent / (time.perf_counter() - started)
        detail = f"{1e3 * spent / requests / (len(body) / 2**20):.2f} ms a MiB of body, {share:.2f} of a core"
        bench.row(f"I. CPU of the front end a request, {name}", "", f"{1e6 * spent / requests:.0f} µs", detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="ABCDEFGHI")
    parser.add_argument("--seconds", type=float, default=3.0, help="a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns that count, a side")
    flags = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("the load comes from wrk, which is not installed (Debian: apt install wrk)")
    print(f"{os.cpu_count()} cores, turns of {flags.seconds:g} s, medians of {flags.rounds}")
    measure(Bench(flags.seconds, flags.rounds), set(flags.rows))
    if launch.visible_gpus():
        measure(Bench(flags.seconds, flags.rounds, "cuda"), set(flags.rows) - set("EH"))


def measure(bench: Bench, wanted: set[str]) -> None:
    print(f"\n{bench.ranks} ranks on {bench.device}\n\n| workload | target | found | |\n|---|---|---|---|")
    try:
        if wanted & set("ABCGI"):
            with bench.serving("Heavy") as service:
                if "A" in wanted:
                    batches(bench, service, "A", JSON, "codec", 0.90)
                if "B" in wanted:
                    batches(bench, service, "B", NPY, "model", 0.95)
                if "C" in wanted:
                    singles(bench, service)
                if "G" in wanted:
                    fairness(bench, service)
                if "I" in wanted:
                    cost(bench, service)
        for letter, row in (("D", overhead), ("E", scaling), ("F", images), ("H", ranks)):
            if letter in wanted:
                row(bench)
    finally:
        shutil.rmtree(bench.folder)


if __name__ == "__main__":
    main()
