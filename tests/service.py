"""A real Phalanx under test: `phalanx serve` as a child, its ranks, and what it leaves behind."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

ROOT = Path(__file__).resolve().parent.parent
MODELS = Path(__file__).with_name("models.py")
READY_SECONDS = 60
T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def until(what: Callable[[], T], seconds: float = 20.0, why: str = "") -> T:
    """The first true value of `what`, asked again and again; AssertionError when the time is over."""
    end = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds:g} s: {why or what}"
        select.select([], [], [], 0.02)


class Service:
    """One `phalanx serve`, or one of its halves, as a child process."""

    def __init__(
        self,
        model: str,
        *,
        verb: str = "serve",
        run_dir: Path | None = None,
        inside: Sequence[str] = (),
        address: str = "127.0.0.1",
        **settings: object,
    ) -> None:
        """`inside` is a command that runs the one behind it: in a namespace, say; `address` is then where it is."""
        self.port = int(settings.pop("port", 0) or free_port())
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="phx-", dir="/dev/shm"))
        self.log_path = self.run_dir.with_name(f"{self.run_dir.name}-{verb}-{self.port}.log")
        self.cwd = settings.pop("cwd", ROOT)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PHALANX_")}
        environment |= {"PHALANX_PORT": str(self.port), "PHALANX_RUN_DIR": str(self.run_dir), "OMP_NUM_THREADS": "1"}
        environment |= {f"PHALANX_{key.upper()}": str(value) for key, value in settings.items()}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *inside,
                    Path(sys.executable).with_name("phalanx"),
                    verb,
                    *(["--model", model] if verb == "app" else [model]),
                ],
                env=environment,
                cwd=self.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.client = httpx.Client(base_url=f"http://{address}:{self.port}", timeout=60)

    @property
    def pid(self) -> int:
        """Of `phalanx`, which an `inside` that forks has for a child."""
        ours = [self.process.pid, *descendants(self.process.pid)]
        return next(pid for pid in ours if b"phalanx" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1])

    # ---- asking

    def infer(self, inputs: object, **json_members: object) -> httpx.Response:
        return self.client.post("/infer", json={"inputs": inputs, **json_members})

    def outputs(self, inputs: object, **json_members: object) -> list:
        answer = self.infer(inputs, **json_members)
        assert answer.status_code == 200, answer.text
        return answer.json()["outputs"]

    def info(self) -> dict:
        return self.client.get("/info").json()

    def group(self) -> dict | None:
        return self.info()["groups"].get("0")

    def pids(self) -> list[int]:
        """Of the ranks, by rank."""
        group = until(self.group, READY_SECONDS, "a group")
        return [rank["pid"] for rank in group["ranks"]]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line[len(name)] in " {")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # ---- waiting

    def ready(self) -> bool:
        assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log()}"
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, seconds: float = READY_SECONDS) -> Service:
        try:
            until(self.ready, seconds, "ready")
        except AssertionError:
            print(self.log())
            raise
        return self

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """The exit code, after a signal."""
        if self.process.poll() is None:
            os.kill(self.pid, number)
        return self.process.wait(seconds)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.log_path.unlink(missing_ok=True)


@contextmanager
def serving(model: str, **settings: object) -> Iterator[Service]:
    """A service that is ready; stopped, and held to leaving nothing, at the end."""
    service = Service(f"{MODELS}:{model}" if model.isidentifier() and model[0].isupper() else model, **settings)
    try:
        yield service.wait_ready()
        assert service.stop() == 0, service.log()
    except BaseException:
        print(service.log())
        raise
    finally:
        service.close()


def descendants(pid: int) -> list[int]:
    """Of a process, in /proc, whatever session they are in."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def samples() -> tuple[list, list[int]]:
    """The shipped digits and their labels."""
    folder = ROOT / "workers" / "models"
    body = json.loads((folder / "digits-samples.json").read_text())
    return body["inputs"], json.loads((folder / "digits-labels.json").read_text())
