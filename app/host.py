"""Facts of this host that a service depends on, read from the kernel and the environment; it judges none of them."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

CONNECT = 3.0  # seconds for another host to answer
CGROUPS = Path("/sys/fs/cgroup")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def versions() -> str:
    import zmq

    ours = f"Phalanx {version('phalanx')}, Python {platform.python_version()}, torch {version('torch')}"
    driver = nvidia_driver()
    return f"{ours}, libzmq {zmq.zmq_version()}" + (f", NVIDIA driver {driver}" if driver else "")


def nvidia_driver() -> str | None:
    with suppress(OSError):
        found = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else "of an unknown version"
    return None


def limit(name: int) -> float:
    """The hard limit, which a process may raise its soft one to."""
    hard = resource.getrlimit(name)[1]
    return float("inf") if hard == resource.RLIM_INFINITY else hard


class Filesystem(NamedTuple):
    kind: str  # "tmpfs", "ext4"; "" where it cannot be told
    size: int  # bytes, as is `free`
    free: int


def filesystem(path: Path) -> Filesystem:
    """What `path` lies on, or would lie on once it is made."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    found, stat = os.statvfs(path), path.stat()
    device, kind = f"{os.major(stat.st_dev)}:{os.minor(stat.st_dev)}", ""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():  # proc(5)
            fields = line.split()
            if fields[2] == device:
                kind = fields[fields.index("-") + 1]
    return Filesystem(kind, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def available_memory() -> float:
    """Bytes that new processes may have: the machine's, or what the cgroup leaves of them."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    room = float(found[1]) * 1024 if found else float("inf")
    for group in _cgroups():
        with suppress(OSError, ValueError):  # ValueError: "max"
            most, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            room = min(room, most - used + (int(cached[1]) if cached else 0))
    return room


def available_tasks() -> float:
    """Processes and threads that the cgroup still allows."""
    room = float("inf")
    for group in _cgroups():
        with suppress(OSError, ValueError):
            room = min(room, int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    return room


class Patience(NamedTuple):
    """How long whatever stops the service waits before it kills."""

    who: str  # that says so, or that keeps it to itself; "" where nobody is known
    seconds: float | None = None
    remedy: str = ""  # where it is set, and what it is otherwise


def patience() -> Patience:
    """Of the compose file, the systemd unit, the pod or the container that this process is in."""
    if said := os.environ.get("STOP_GRACE"):
        return Patience("STOP_GRACE", duration(said), f"STOP_GRACE, which is {said!r}, and not a duration such as 45s,")
    unit = _path_of_cgroup().rpartition("/")[2]
    if unit.endswith(".service") and not unit.startswith("user@"):
        with suppress(OSError, subprocess.SubprocessError):
            command = ["systemctl", "show", "--property=TimeoutStopUSec", "--value", unit]
            said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            if (seconds := duration(said)) is not None:
                return Patience(f"TimeoutStopSec of {unit}", seconds)
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return Patience("the kubelet", None, "terminationGracePeriodSeconds (30, unless set)")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return Patience("the engine of this container", None, "stop_grace_period, --stop-timeout (docker: 10 s)")
    return Patience("")


def duration(text: str) -> float | None:
    """Seconds of `45s` or `1m30s`, as compose writes them, or `1min 30s` or `infinity`, as systemd does; else None."""
    if text == "infinity":
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?) *([a-z]*)", text)
    if not re.fullmatch(r"( *\d+(\.\d+)? *[a-z]*)+", text) or any(unit not in UNITS for _, unit in parts):
        return None
    return sum(float(number) * UNITS[unit] for number, unit in parts)


def _path_of_cgroup() -> str:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":  # of the unified hierarchy
                return path
    return "/"


def _cgroups() -> list[Path]:
    """This process's cgroup and those above it, each of which may have a limit; version 2."""
    path = Path(_path_of_cgroup().lstrip("/"))
    return [CGROUPS / one for one in (path, *path.parents)]


def name_of(address: str) -> tuple[str | None, float]:
    """The name of an address, if it has one, and the seconds that it took to look it up."""
    started, found = time.monotonic(), None
    with suppress(OSError):
        found = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    return found, time.monotonic() - started


def connects(host: str, port: int) -> str | None:
    """Why no TCP connection goes there; None if one does."""
    try:
        socket.create_connection((host, port), timeout=CONNECT).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
