"""Dying together: parent-death signal, the peers' pidfds, step deadline, stacks; it knows no torch, queue or model.

A group of ranks is either whole or dead. A rank that sees a peer's end, or its own step pass the deadline, fells the
whole group; nobody repairs. Four threads hold that up, each for what the one before it cannot see:

- the parent-death signal: the kernel kills a child whose parent died (torchrun, the launcher);
- a watching thread in each rank: polls the peers' pidfds and the step's deadline. It needs the GIL;
- the peers: a rank that is stopped or holds its GIL is felled by another's watching thread;
- faulthandler's own thread, which needs no GIL: the backstop when a rank is alone, or all of them are stuck.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import select
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

PARENT = "LIFELINE_PARENT"  # in the environment: the pid that a spawned process's children must have as parent
BACKSTOP = 2.0  # seconds after the deadline at which faulthandler ends a rank that nobody else could
SLACK = 1.0  # seconds by which it may do so earlier: to set its timer costs a thread, 0.15 ms, and steps are short
STACKS = 0.1  # seconds that the peers have to write their stacks before they are killed; a dump takes 1.5 ms
UNSEEN = "nobody saw how"
STACKS_IN_PASSING = 0.02  # likewise, where the cause is known without them
SECOND_HAND = 0.02  # seconds in which a dead peer shows whose connection broke: its sockets close first
TICK = 0.1  # seconds between two looks at the deadline; a peer's death wakes the thread at once

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL this process when its parent ends; exit at once if the parent has gone already.

    `parent` is the pid that must be the parent; by default what `workers.launch.spawn` left in the environment, or
    whoever is the parent now. To be called first thing in a child, before any slow import. The kernel sends the signal
    when the *thread* that forked ends, so a child must be started from its parent's main thread.
    """
    if parent is None:
        parent = int(os.environ.get(PARENT, os.getppid()))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, instead of init, so that none can be lost sight of."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(but: int) -> None:
    """Reap the adopted that have ended; `but` is this process's own child, which is waited for elsewhere."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_orphans(parent: int) -> bool:
    """SIGKILL and reap what the process `parent`, which has ended, left to this one; whether nothing is left of it.

    Those are the children of this process that `parent`'s pid is marked in (`PARENT`), after `adopt_orphans`.
    """
    mark = f"{PARENT}={parent}".encode()
    left = False
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        stat = process_stat(pid)
        if stat is None or int(stat[1]) != os.getpid():
            continue
        with suppress(PermissionError, ProcessLookupError, ChildProcessError):
            environment = process_environment(pid)
            if environment and mark not in environment:
                continue  # of another making; one with none is on its way out, perhaps with a device still in its hands
            os.kill(pid, signal.SIGKILL)
            left = os.waitpid(pid, os.WNOHANG)[0] == 0 or left
    return not left


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's process, named so that no other host, pid namespace or later process can be taken for it."""

    rank: int
    pid: int
    boot_id: str
    pid_namespace: int  # inode
    start_time: int  # clock ticks since boot
    node: int = 0  # torchrun's word for a host; two of them may share one for a trial, but no run directory

    @classmethod
    def here(cls, rank: int, node: int = 0) -> Member:
        """This process."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
        return cls(rank, os.getpid(), boot_id, pid_namespace, start_time(os.getpid()) or 0, node)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        return cls(**json.loads(text))

    def sees(self, other: Member) -> bool:
        """Whether `other`'s pid means here what it means there, and its files lie where this one's do."""
        return (self.boot_id, self.pid_namespace, self.node) == (other.boot_id, other.pid_namespace, other.node)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


class Lifeline:
    """One rank's hold on its peers. Its files in the epoch's directory: pid-, stacks-, failed- and released-<r>."""

    def __init__(self, rank: int, epoch_dir: Path) -> None:
        self.rank = rank
        self._epoch_dir = epoch_dir
        self._stacks = open(epoch_dir / f"stacks-{rank}.txt", "a")  # noqa: SIM115 - for the life of the process
        draft = epoch_dir / f".pid-{rank}"
        draft.write_text(f"{os.getpid()} {start_time(os.getpid())}")
        draft.rename(epoch_dir / f"pid-{rank}")  # never seen half-written: the launcher looks at how it ends
        faulthandler.enable(self._stacks)  # a segfault leaves its stacks too
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        self._peers: dict[int, Member] = {}  # by pidfd; replaced, never changed, once it is watched
        self._steps: deque[tuple[float, str]] = deque()  # that have begun: seconds, what
        self._deadline = math.inf, ""  # of the first of them (monotonic), and what to say when it has passed
        self._backstop = 0.0  # when faulthandler's timer would end this rank (monotonic); 0 where none is set
        self._released = False
        self._arming = threading.Lock()
        self._felling = threading.Lock()

    def watch(self, members: list[Member]) -> None:
        """Hold the peers among `members`, and start the watching thread. A peer that has gone already fells the group.

        Only those of this boot and this pid namespace are opened: elsewhere the same number is an innocent.
        """
        here = next(member for member in members if member.rank == self.rank)
        gone = []
        for member in members:
            if member.rank == self.rank or not here.sees(member):
                continue
            try:
                pidfd = os.pidfd_open(member.pid)
            except ProcessLookupError:
                gone.append(member)
                continue
            if start_time(member.pid) == member.start_time:
                self._peers[pidfd] = member
            else:  # the number has passed on to another process, which is none of ours
                os.close(pidfd)
                gone.append(member)
        for member in gone:  # only now, with all the others in hand
            self._mourn(member)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def begin(self, seconds: float, what: str) -> None:
        """A step begins: unless `end` comes within `seconds`, the group is felled; `what` is said in the report.

        Its time counts from the end of the step before, if that comes later: a peer may still be busy with that one.
        """
        with self._arming:
            self._steps.append((seconds, what))
            if len(self._steps) == 1:
                self._arm()

    def end(self) -> None:
        """The step that began first is over; its deadline holds no more. For any thread, as is `begin`."""
        with self._arming:
            self._steps.popleft()
            self._arm()

    def _arm(self) -> None:
        if self._steps:
            seconds, what = self._steps[0]
            now = time.monotonic()
            self._deadline = now + seconds, f"{what} took longer than {seconds:g} s"
            wanted = now + seconds + BACKSTOP
            if not wanted - SLACK <= self._backstop <= wanted:
                self._backstop = wanted
                faulthandler.dump_traceback_later(seconds + BACKSTOP, exit=True, file=self._stacks)
        else:
            self._deadline = math.inf, ""  # the watching thread disarms the backstop, unless a step comes before

    def _disarm(self) -> None:
        with self._arming:
            if self._backstop and not self._steps:
                self._backstop = 0.0
                faulthandler.cancel_dump_traceback_later()

    def release(self) -> None:
        """The group is leaving: from here on peers may exit, and so may this rank, without felling anyone."""
        self._released = True
        # The peers hear of it through a file, for they may see this rank's exit before they come to release themselves.
        (self._epoch_dir / f"released-{self.rank}").touch()

    def fell(self, kind: str, text: str) -> NoReturn:
        """End the whole group now, this rank included, leaving failed-<rank>.json; `text` is one sentence.

        Every rank's stacks are written first: within 100 ms for the kind "deadline", where they are what matters,
        within 20 ms for others. The kinds "model" and "deadline" are reported as they are; any other, when a peer is
        dead already, is that peer's death seen second-hand.
        """
        self._felling.acquire()  # for ever: a second thread waits here for the end
        try:
            if kind not in ("model", "deadline", "peer"):
                for peer in self._ended(SECOND_HAND).values():
                    if not self._has_left(peer):
                        kind, text = "peer", f"{peer} died: {how_it_ended(peer.pid)}, seen here as: {text}"
            self._report(kind, text)
            self._signal_peers(signal.SIGUSR2)
            faulthandler.dump_traceback(self._stacks, all_threads=True)
            time.sleep(STACKS if kind == "deadline" else STACKS_IN_PASSING)
            self._signal_peers(signal.SIGKILL)
        finally:
            os._exit(1)

    def _watch(self) -> None:
        while True:
            left = min(TICK, self._deadline[0] - time.monotonic())
            for pidfd, peer in self._ended(max(0.0, left)).items():
                self._mourn(peer)
                self._peers = {fd: other for fd, other in self._peers.items() if fd != pidfd}
            self._disarm()
            deadline, what = self._deadline
            if time.monotonic() >= deadline:
                self.fell("deadline", what)

    def _ended(self, seconds: float) -> dict[int, Member]:
        """The peers that have ended, or the first that do within that time; for any thread, hence a poll of its own."""
        poll, peers = select.poll(), self._peers
        for pidfd in peers:
            poll.register(pidfd, select.POLLIN)
        return {pidfd: peers[pidfd] for pidfd, _ in poll.poll(seconds * 1000)}

    def _mourn(self, peer: Member) -> None:
        """Fell the group for a peer that has ended, unless it had left."""
        if not self._has_left(peer):
            self.fell("peer", f"{peer} died: {how_it_ended(peer.pid)}")

    def _has_left(self, peer: Member) -> bool:
        return self._released or (self._epoch_dir / f"released-{peer.rank}").exists()

    def _report(self, kind: str, text: str) -> None:
        # In one write, for torchrun may end this rank any moment. The first word stays; a full disk keeps nobody alive.
        line = json.dumps({"rank": self.rank, "kind": kind, "text": text, "at": time.time_ns()}).encode()
        with suppress(OSError):
            report = os.open(self._epoch_dir / f"failed-{self.rank}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(report, line)

    def _signal_peers(self, number: signal.Signals) -> None:
        for pidfd in self._peers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)


def how_it_ended(pid: int) -> str:
    """Of a process that has ended and whose parent has not asked yet; UNSEEN where that is over."""
    stat = process_stat(pid)
    if stat is None or stat[0] != "Z":
        return UNSEEN
    code = os.waitstatus_to_exitcode(int(stat[49]))
    return f"exited with {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None if there is none."""
    stat = process_stat(pid)
    return None if stat is None else int(stat[19])


def process_stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state (0) and parent (1) on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets


def process_environment(pid: int) -> list[bytes]:
    """What the process was started with, as NAME=value; nothing once it has given its memory back.

    Raises PermissionError for a process of another user.
    """
    try:
        return [line for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if line]
    except (FileNotFoundError, ProcessLookupError):  # newer kernels say so of one that has not yet ended
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
