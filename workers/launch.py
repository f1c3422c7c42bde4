"""The one restarter around torchrun: start, watch, respawn with back-off, stop; it knows no torch, queue or request.

torchrun runs once an epoch and restarts nothing itself. `Launcher` starts it, waits for its end, and lets `Restarts`
decide whether there is another. What ranks and launcher tell each other goes through small files in the epoch's
directory: `ready-<r>` and `failed-<r>.json` from the ranks, `leave` to them, `fenced` from the front end.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from workers import lifeline, rundir
from workers.command import TORCHRUN, Group, cores, torchrun_command, torchrun_environment, visible_gpus
from workers.epoch import Death, Epoch, Restarts
from workers.errors import ModelLoadError, RunDirectoryError, StartError
from workers.hosts import Alone, FrontEnd, Hosts, Meeting, Nodes, place
from workers.rundir import (
    Told,
    claim,
    last_deaths,
    prepare_run_dir,
    readiness,
    remove_run_dir,
    try_run_dir,
    waits,
)

if TYPE_CHECKING:
    from workers.watch import Watch

__all__ = [
    "FrontEnd",
    "Group",
    "Hosts",
    "Launcher",
    "Told",
    "attempt",
    "check",
    "claim",
    "cores",
    "last_deaths",
    "place",
    "prepare_run_dir",
    "readiness",
    "remove_run_dir",
    "spawn",
    "torchrun_command",
    "torchrun_environment",
    "try_run_dir",
    "visible_gpus",
    "waits",
]

logger = logging.getLogger("workers")

SPARE_AFTER = 2.0  # seconds of being ready after which a spare is worth its start
POLL = 0.1  # seconds between two looks at the epoch's directory; signals and torchrun's end wake the launcher at once
REMIND = 60.0  # seconds between two lines of the same wait
GONE = 10.0  # seconds to wait for killed ranks; one that the kernel cannot end must not keep the service down


def spawn(argv: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Start a child, in its own session, that dies with this process; for the main thread only.

    Its own children find its pid in the environment (`lifeline.PARENT`), so that `die_with_parent` in them knows
    whether they have lost their parent before they could ask the kernel to tell them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a child started from another thread would be killed when that thread ends")
    parent = os.getpid()
    environment = dict(popen.pop("env", None) or os.environ)

    def in_child() -> None:
        lifeline.die_with_parent(parent)
        os.environ.clear()
        os.environ.update(environment, **{lifeline.PARENT: str(os.getpid())})

    # Without `env` the child is started with its own environment, as `in_child` leaves it.
    return subprocess.Popen(argv, start_new_session=True, preexec_fn=in_child, **popen)


def check(group: Group) -> int:
    """The ranks load the model, run its example, say what came out and end; 0 if all went well. See `attempt`."""
    death = attempt(group, "--check")
    if death is None:
        return 0
    logger.error("the check failed: %s", death.text)
    return ModelLoadError.exit_code if death.kind == "model" else 1


def attempt(group: Group, flag: str, output: IO[bytes] | None = None) -> Death | None:
    """One epoch of ranks that end by themselves, as `--check` and `--probe` make them; None if all went well.

    In a run directory that nobody else has. What the ranks print goes to `output`, or where this process prints.
    When this returns no process of them is left. KeyboardInterrupt: SIGTERM or SIGINT came meanwhile.
    """
    return Launcher(group).attempt(flag, output)


class Spare:
    """A torchrun that waits for its command line, with its imports behind it: they are half of a restart."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        if self._process is None:
            agent = [sys.executable, "-m", TORCHRUN]
            self._process = spawn(agent, env=self._environment, stdin=subprocess.PIPE)

    def run(self, command: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Run a torchrun command: in the spare, where there is one that lives. It prints to `output`."""
        spare, self._process = self._process, None
        if spare is not None and spare.stdin is not None and command[2] == TORCHRUN:
            with suppress(BrokenPipeError), spare.stdin:
                spare.stdin.write(json.dumps(command[3:]).encode() + b"\n")
            if spare.poll() is None:
                return spare
        errors = None if output is None else subprocess.STDOUT
        return spawn(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Ranks:
    """How the ranks of an epoch end: seen at once, before torchrun takes the status away."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._pids: dict[int, int] = {}  # by rank
        self._pidfds: dict[int, int] = {}  # rank by pidfd, of those that run

    def watched(self) -> list[int]:
        return list(self._pidfds)

    def look(self) -> None:
        """Note who has ended, and hold those that have made themselves known in `pid-<r>`."""
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            rank = self._pidfds.pop(pidfd)
            os.close(pidfd)
            self._epoch.ended[rank] = f"rank {rank} (pid {self._pids[rank]}) {lifeline.how_it_ended(self._pids[rank])}"
        for path in self._epoch.directory.glob("pid-*"):
            rank = int(path.name.removeprefix("pid-"))
            with suppress(OSError, ValueError):  # written a moment ago, or gone already
                if rank not in self._pids:
                    pid = int(path.read_text().partition(" ")[0])
                    self._pidfds[os.pidfd_open(pid)] = rank
                    self._pids[rank] = pid

    def write_stacks(self) -> None:
        """Have those that run write down where they are, before they are killed: it may be all there is to know."""
        for pidfd in self._pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGUSR2)
        time.sleep(lifeline.STACKS)

    def close(self) -> None:
        self.look()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()


class Launcher:
    """Keeps one group alive until SIGTERM or SIGINT."""

    def __init__(self, group: Group) -> None:
        self._group = replace(group, run_dir=group.run_dir.absolute())
        self._restarts = Restarts(group.max_restarts)
        self._spare = Spare(torchrun_environment(group.ranks, os.environ))
        self._watch: Watch | None = None
        self._stop = False
        self._waits, self._waits_since = "", 0.0  # for other hosts
        self._wake = -1  # a pipe's end that is readable once a signal has come

    def run(self) -> int:
        """Start, watch and respawn the group, in the main thread, until a stop; returns the process's exit code.

        0 after a stop, 78 when the model cannot be loaded, 1 when the group does not become ready; the reason is
        logged. Raises RunDirectoryError, also where somebody removes the directory meanwhile. When this returns, no
        process of the group is left.
        """
        rundir.prepare_run_dir(self._group.run_dir, self._group.group)
        try:
            lock = rundir.claim(self._group.run_dir / f"launch-{self._group.group}.lock")
        except RunDirectoryError as error:
            remedy = "PHALANX_GROUP (--group) gives another a name"
            if self._group.hosts is not None:
                remedy = "another node of it on this host wants a run directory of its own (--run-dir)"
            which = f"group {self._group.group} has a launcher already; {remedy}"
            raise RunDirectoryError(f"{which}: {error}") from error
        lifeline.adopt_orphans()
        try:
            with self._signals(), closing(self._others()) as others, self._watching():
                return self._keep(others)
        except FileNotFoundError as error:
            if self._group.run_dir.exists():
                raise
            raise RunDirectoryError(f"{self._group.run_dir} was removed, and no group can live without it") from error
        finally:
            self._spare.end()
            rundir.note_wait(self._group.run_dir, self._group.group, "")
            os.close(lock)

    def attempt(self, flag: str, output: IO[bytes] | None = None) -> Death | None:
        """See the function of this name."""
        group, alone = self._group, self._alone()
        lifeline.adopt_orphans()
        begun = alone.next()
        directory = rundir.open_epoch(group.run_dir, group.group, begun.number)
        (directory / "leave").touch()  # who ends without being asked to leaves no less orderly
        now = time.monotonic()
        epoch = Epoch(group.group, begun.number, directory, group.start_timeout, group.drain_timeout, started=now)
        with self._signals():
            death = self._live(epoch, begun.meeting, alone, [flag], output)
        if self._stop:
            raise KeyboardInterrupt
        return death

    def _alone(self) -> Alone:
        return Alone(lambda: rundir.next_epoch(self._group.run_dir, self._group.group))

    def _others(self) -> Nodes:
        """The other hosts of the group."""
        hosts, alone = self._group.hosts, self._alone()
        if hosts is None:
            return alone
        from workers.nodes import Follower, Leader  # ZeroMQ, which a group on one host does without here

        return Follower(hosts) if hosts.node else Leader(hosts, alone.count)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A line to the front end, where that is on another host; one launcher of a group has it."""
        front_end, hosts = self._group.front_end, self._group.hosts
        if front_end is None or (hosts is not None and hosts.node):
            yield
            return
        from workers.watch import Watch  # ZeroMQ, which a group beside its front end does without here

        with closing(Watch(self._group.group, front_end)) as self._watch:
            yield

    def _keep(self, others: Nodes) -> int:
        group = self._group
        leads = group.hosts is None or group.hosts.node == 0
        while not self._stop:
            try:
                begun = others.next()
            except StartError as error:
                logger.critical("%s", error)
                return error.exit_code
            self._say_wait("" if begun is not None else others.wait())
            if begun is None:
                self._sleep(POLL, *others.fds)
                continue
            directory = rundir.open_epoch(group.run_dir, group.group, begun.number)
            now = time.monotonic()
            epoch = Epoch(group.group, begun.number, directory, group.start_timeout, group.drain_timeout, started=now)
            death = others.settle(self._live(epoch, begun.meeting, others))
            if death is None:
                epoch.log(logging.INFO, "has left")
                rundir.remove(directory)
                if others.news().leave and not self._stop:  # for another host, which may come again
                    continue
                return 0
            if self._stop:  # what was asked for, if not how
                epoch.log(logging.WARNING, "ended at the stop: %s", death.text)
                if epoch.ready is None:
                    rundir.remove(directory)
                return 0
            if self._watch is not None:
                self._watch.died(epoch.number, death)
            path = rundir.keep_post_mortem(group.run_dir, directory.name, epoch.post_mortem(death))
            if not leads:
                epoch.log(logging.ERROR, "died: %s; more in %s", death.text, path)
                continue
            try:
                pause = self._restarts.after(death)
            except StartError as error:
                epoch.log(logging.CRITICAL, "is not tried again: %s", error)
                others.over(error)
                return error.exit_code
            epoch.log(logging.ERROR, "died: %s; more in %s", death.text, path)
            self._sleep(pause)
        return 0

    def _say_wait(self, text: str) -> None:
        """Once, and again after a minute: in the log, and for the front end."""
        now = time.monotonic()
        if text != self._waits or (text and now >= self._waits_since + REMIND):
            self._waits, self._waits_since = text, now
            rundir.note_wait(self._group.run_dir, self._group.group, text)
            if text:
                logger.info("group %s: %s", self._group.group, text)

    def _live(
        self,
        epoch: Epoch,
        meeting: Meeting | None,
        others: Nodes,
        flags: Sequence[str] = (),
        output: IO[bytes] | None = None,
    ) -> Death | None:
        """One epoch, from torchrun's start until no process of it is left; None if the end was an orderly one."""
        command = [*torchrun_command(self._group, epoch.number, meeting), *flags]
        torchrun = self._spare.run(command, output)
        pidfd = os.pidfd_open(torchrun.pid)
        ranks = Ranks(epoch)
        epoch.log(logging.INFO, "starts: %d ranks under torchrun, pid %d", self._group.ranks, torchrun.pid)
        reason: str | None = None
        ended: Death | None = None  # on another host
        try:
            while torchrun.poll() is None and reason is None and ended is None:
                self._sleep(POLL, pidfd, *others.fds, *ranks.watched())
                ranks.look()
                lifeline.reap_orphans(but=torchrun.pid)
                if self._watch is not None:
                    self._watch.look(epoch.number, epoch.directory)
                news = others.news()
                reason, ended = epoch.look(time.monotonic(), self._stop or news.leave), news.ended
                if epoch.felled is not None:
                    others.dying()
                if epoch.leave_by is not None:
                    others.leave()
                if epoch.ready is not None and time.monotonic() >= epoch.ready + SPARE_AFTER:
                    self._spare.prepare()
            if reason is not None and epoch.ready is None and epoch.felled is None and not self._stop:
                ranks.write_stacks()
        finally:
            os.close(pidfd)
            ranks.close()
            self._end(torchrun, epoch)
            rundir.close_sockets(epoch.directory)
        return epoch.death(time.monotonic(), reason, torchrun.wait(), ended)

    def _end(self, torchrun: subprocess.Popen[bytes], epoch: Epoch) -> None:
        """Kill what is left, and wait until it has gone: the next epoch needs the memory of this one's devices."""
        torchrun.kill()  # does nothing to one that has ended
        torchrun.wait()
        patience = time.monotonic() + GONE
        while not lifeline.end_orphans(torchrun.pid):
            if time.monotonic() >= patience:
                epoch.log(logging.ERROR, "has ranks that SIGKILL did not end within %g s", GONE)
                break
            time.sleep(0.005)

    def _sleep(self, seconds: float, *pidfds: int) -> None:
        """Until the time is over, a signal comes, or a process of `pidfds` ends."""
        poll = select.poll()
        for fd in (self._wake, *pidfds):
            poll.register(fd, select.POLLIN)
        if any(fd == self._wake for fd, _ in poll.poll(seconds * 1000)):
            os.read(self._wake, 4096)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT set a flag and wake `_sleep`, and do nothing else."""

        def record(number: int, frame: FrameType | None) -> None:
            self._stop = True

        self._wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
            os.close(self._wake)
            os.close(write)
