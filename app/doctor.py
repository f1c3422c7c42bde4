"""`phalanx doctor`: one check after the other, a line a finding; what a fact means, `findings` knows, not this.

A check is a function of the service that yields what it found. The last ones run the service's own ranks, in a run
directory of their own, and take as long as a start.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from app import findings, host
from app.findings import Device, Finding, Gather, Torch
from app.settings import Settings
from workers import launch
from workers.errors import StartError

SHM = Path("/dev/shm")
TAIL = 40  # lines of what the ranks print that are shown where they failed
PROBE_SECONDS = 300.0  # for all ranks to import torch, which a cold disk may make long
COLOURS = {"ok": "32", "warn": "33", "fail": "31"}


@dataclass(frozen=True)
class Service:
    """What is to be started here."""

    settings: Settings
    group: launch.Group

    @property
    def named_gpus(self) -> int:
        return launch.visible_gpus()

    @property
    def on_gpus(self) -> bool:
        """As far as can be told without torch."""
        return self.settings.device != "cpu" and (self.named_gpus > 0 or self.settings.device == "cuda")


Check = Callable[[Service], Iterator[Finding]]


def run(settings: Settings, group: launch.Group) -> int:
    """Print every finding as it comes; 0 if none failed, else 1. KeyboardInterrupt: a signal came meanwhile."""
    service, failed = Service(settings, group), False
    for check in CHECKS:
        for finding in _findings(check, service):
            print(line(finding, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ), flush=True)
            failed = failed or finding.level == "fail"
    return int(failed)


def _findings(check: Check, service: Service) -> Iterator[Finding]:
    """A check that cannot be made is a finding too, and the next one comes all the same."""
    try:
        yield from check(service)
    except OSError as error:
        remedy = "the service needs the same of this host"
        yield Finding("fail", check.__name__.strip("_").replace("_", " "), f"cannot be checked: {error}", remedy)


def line(finding: Finding, colour: bool = False) -> str:
    level = f"{finding.level:<4}"
    if colour:
        level = f"\x1b[{COLOURS[finding.level]}m{level}\x1b[0m"
    text = f"{finding.text}; {finding.remedy}" if finding.remedy else finding.text
    return f"{level}  {finding.topic:<13}  {' '.join(text.split())}"


# ---- the checks


def _versions(service: Service) -> Iterator[Finding]:
    yield Finding("ok", "versions", host.versions())


def _resources(service: Service) -> Iterator[Finding]:
    settings, ranks, cores = service.settings, service.group.ranks, launch.cores()
    said = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(said) if said.isdecimal() else max(1, cores // ranks)
    yield findings.cores(cores, ranks, threads)
    yield findings.memory(host.available_memory(), ranks, settings.queue_bytes, settings.ring_bytes)
    yield findings.tasks(host.available_tasks(), ranks, threads)


def _limits(service: Service) -> Iterator[Finding]:
    from app.server import open_files

    connections = service.settings.max_connections
    yield findings.open_files(host.limit(resource.RLIMIT_NOFILE), open_files(connections), connections)
    yield findings.locked_memory(host.limit(resource.RLIMIT_MEMLOCK), service.on_gpus, service.group.ranks)


def _shared_memory(service: Service) -> Iterator[Finding]:
    if not os.access(SHM, os.W_OK | os.X_OK):
        remedy = "mount a tmpfs there, of mode 1777"
        yield Finding("fail", "/dev/shm", f"user {os.geteuid()} cannot write to it, or it is not there", remedy)
        return
    ring = service.settings.ring_bytes if SHM in service.group.run_dir.absolute().parents else 0
    yield findings.shared_memory(host.filesystem(SHM), ring, service.on_gpus, service.group.ranks)


def _run_directory(service: Service) -> Iterator[Finding]:
    path = service.group.run_dir
    try:
        launch.try_run_dir(path)
    except StartError as error:
        remedy = "stop that service, or give another --port" if "is held by" in str(error) else ""
        remedy = remedy or f"give one that user {os.geteuid()} can make, mode 0700, on a tmpfs (PHALANX_RUN_DIR)"
        yield Finding("fail", "run directory", str(error), remedy)
    else:
        yield findings.run_directory(path, host.filesystem(path), service.settings.ring_bytes)


def _port(service: Service) -> Iterator[Finding]:
    from app.server import listen

    where = f"{service.settings.host}:{service.settings.port}"
    try:
        with listen(service.settings.host, service.settings.port):
            pass
    except StartError as error:
        taken = "in use" in str(error)
        remedy = "stop what listens there (ss -ltnp)" if taken else "ports below 1024 are root's"
        yield Finding("fail", "port", str(error), f"{remedy}, or give another")
    else:
        yield Finding("ok", "port", f"{where} is free" if service.settings.port else f"{where} takes a free one")


def _hosts(service: Service) -> Iterator[Finding]:
    """Of a group on several: how the others reach this one, and this one node 0."""
    hosts = service.group.hosts
    if hosts is None:
        return
    try:
        address, interface = launch.place(hosts)
    except StartError as error:
        yield Finding("fail", "hosts", str(error), "give PHALANX_INTERFACE, or mend PHALANX_RDZV_ENDPOINT")
        return
    yield findings.hosts(hosts.nodes, hosts.node, address, interface)
    yield findings.name(address, *host.name_of(address))
    if hosts.node:
        yield findings.node_0(f"{hosts.host}:{hosts.port}", host.connects(hosts.host, hosts.port))
    else:
        from app.server import listen

        try:
            with listen(address, hosts.port):
                yield Finding("ok", "node 0", f"{address}:{hosts.port} is free")
        except StartError as error:
            yield Finding("fail", "node 0", str(error).partition(" (")[0], "give another port (PHALANX_RDZV_ENDPOINT)")


def _queue(service: Service) -> Iterator[Finding]:
    """Of a group whose front end is on another host."""
    if service.group.front_end is not None:
        host_name, port = service.group.front_end.host, service.group.front_end.port
        yield findings.front_end(f"{host_name}:{port}", host.connects(host_name, port))


def _stop(service: Service) -> Iterator[Finding]:
    yield findings.stop(service.settings.drain_timeout + findings.NONE_LEFT_OVER, host.patience())


def _ranks(service: Service) -> Iterator[Finding]:
    """Devices and all_gather; then the model, unless it would fail for the same reason."""
    group = service.group
    with _attempt(
        replace(group, start_timeout=min(group.start_timeout, PROBE_SECONDS)),
        "--probe",
        f"all_gather between {findings.many(group.ranks, 'rank')}",
    ) as probe:
        found = probe.said("torch")
        if found is not None:
            devices = findings.gpus(Torch(**found), group.device, group.ranks, service.named_gpus, host.nvidia_driver())
            yield devices
        if probe.death is not None or (gathers := probe.said("gathers")) is None:
            if found is None or devices.level != "fail":
                probe.show()
                yield findings.not_gathered(probe.text, service.on_gpus)
            yield Finding("fail", "model", "not tried, for its ranks would fail likewise", "first mend the line above")
            return
        memory = findings.device_memory([Device(**one) for one in gathers["devices"]])
        if memory is not None:
            yield memory
        yield findings.gathered([Gather(**one) for one in gathers["gathers"]], group.ranks, (found or {}).get("nccl"))
    yield from _model(service)


def _model(service: Service) -> Iterator[Finding]:
    group = service.group
    what = f"loading {group.model} on {findings.many(group.ranks, 'rank')}, for {group.start_timeout:g} s at most"
    with _attempt(group, "--check", what) as check:
        printed = re.search(r"^(.+): \d+ ranks? on (.+)$", check.output(), re.MULTILINE)
        if check.death is not None or printed is None:
            check.show()
            remedy = f"mend the model (phalanx check {group.model})"
            if (missing := re.search(r"No module named '(\w+)", check.text)) is not None:
                remedy = f"install the package that has {missing[1]} into {sys.prefix}, or mend the import"
            if check.late:
                remedy = "mend what it waits for, or give it more time (PHALANX_START_TIMEOUT)"
            yield Finding("fail", "model", check.text, remedy)
            return
        text = f"{printed[1]} on {printed[2]}: loaded and ran its example in {check.seconds:.1f} s"
        if "\nno example:" in check.output():
            text = f"{printed[1]} on {printed[2]}: loaded in {check.seconds:.1f} s, but predict has not run"
            yield Finding("warn", "model", text, "give the class an `example`: one item")
        else:
            yield Finding("ok", "model", f"{text}, with the start of Python")


CHECKS: tuple[Check, ...] = (
    _versions,
    _resources,
    _limits,
    _shared_memory,
    _run_directory,
    _port,
    _hosts,
    _queue,
    _stop,
    _ranks,
)


# ---- what they need


class _Attempt:
    """A group that was run to its end, while its run directory is still there."""

    def __init__(self, group: launch.Group, flag: str, printed: IO[bytes]) -> None:
        self._epoch_dir = group.epoch_dir(1)
        self._printed = printed
        started = time.monotonic()
        self.death = launch.attempt(group, flag, printed)
        self.seconds = time.monotonic() - started
        self.late = self.seconds >= group.start_timeout

    @property
    def text(self) -> str:
        """How it ended, and where the ranks were, if they did not end by themselves."""
        if self.death is None:
            return "the ranks ended without a word"
        where = self._where() if self.late or self.death.kind == "deadline" else ""
        return f"{self.death.text}; {where}" if where else self.death.text

    def said(self, name: str) -> Any:
        """What rank 0 wrote down; None if it did not come to it."""
        path = self._epoch_dir / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def output(self) -> str:
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace")

    def show(self) -> None:
        """The end of what the ranks printed, a traceback of the model for one, above the finding."""
        for text in self.output().splitlines()[-TAIL:]:
            print(f"      | {text}", file=sys.stderr, flush=True)

    def _where(self) -> str:
        """Each rank's innermost call in its main thread, which is the last of the stacks that it leaves."""
        ranks: dict[str, list[str]] = {}
        for path in sorted(self._epoch_dir.glob("stacks-*.txt")):
            main = re.findall(r'[Tt]hread .*\n +File "(.+)", line (\d+) in (.+)', path.read_text(errors="replace"))[-1:]
            for file, number, function in main:
                ranks.setdefault(f"in {function} ({file}, line {number})", []).append(path.stem[len("stacks-") :])
        return "; ".join(f"rank {', '.join(who)} {place}" for place, who in ranks.items())


@contextmanager
def _attempt(group: launch.Group, flag: str, what: str) -> Iterator[_Attempt]:
    usable = os.access(SHM, os.W_OK | os.X_OK) and host.filesystem(SHM).free >= findings.STARVED
    folder = SHM if usable else None  # the checks of /dev/shm have said so; those of the ranks go on
    with (
        tempfile.TemporaryDirectory(prefix="phalanx-doctor-", dir=folder) as run_dir,
        tempfile.TemporaryFile() as printed,
    ):
        with _progress(what):
            attempt = _Attempt(replace(group, run_dir=Path(run_dir)), flag, printed)
        yield attempt


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Say on standard error what takes so long; on a terminal until it is over."""
    on_terminal = sys.stderr.isatty()
    print(f"...   {what}", end="" if on_terminal else "\n", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
