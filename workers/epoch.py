"""What becomes of an epoch: as its directory shows it, why it died, whether another follows; no processes, no clock.

An epoch is one incarnation of a group. Its directory is where its ranks, the launcher and the front end meet:
`ready-<r>` and `failed-<r>.json` come from the ranks, `leave` goes to them, `fenced` is the front end's.
"""

from __future__ import annotations

import json
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from workers.errors import ModelLoadError, StartError
from workers.lifeline import UNSEEN

logger = logging.getLogger("workers")

BACKOFF = (0.0, 1.0, 2.0, 5.0, 10.0)  # seconds before the first, second, ... respawn in a row
NODE = "node"  # kind of the death that another host's model is to blame for, which leaves the group
STEADY = 60.0  # seconds of being ready after which a death begins a new row
REPORTED = 0.3  # seconds torchrun has after the first report: it logs within 0.1, ends after 1, with a stopped rank 30
START_GRACE = 15.0  # seconds over the start timeout, which the ranks keep: torchrun may hang before there are any


@dataclass(frozen=True, slots=True)
class Death:
    """How an epoch ended that was not asked to."""

    kind: str
    text: str
    ready_for: float | None  # seconds; None: it never was


@dataclass(slots=True)
class Restarts:
    """Whether there is another epoch after a death, and after how many seconds: no clock, no processes.

    A group that has never been ready may try again `allowed` times; one that has been is replaced for ever.
    """

    allowed: int
    served: bool = False
    row: int = 0  # deaths in a row

    def after(self, death: Death) -> float:
        """Seconds to wait before the next start. Raises StartError or ModelLoadError when there is none."""
        self.served = self.served or death.ready_for is not None
        if death.kind == NODE:
            return 0.0
        if not self.served and death.kind == "model":
            raise ModelLoadError(death.text)
        if not self.served and self.row >= self.allowed:
            raise StartError(f"{self.row + 1} epochs died before they were ready, the last of them: {death.text}")
        if death.ready_for is not None and death.ready_for >= STEADY:
            self.row = 0
        self.row += 1
        return BACKOFF[min(self.row, len(BACKOFF)) - 1]


@dataclass(slots=True)
class Epoch:
    """One incarnation as its directory shows it: no processes; the clock is an argument, in seconds."""

    group: str
    number: int
    directory: Path
    start_timeout: float
    drain_timeout: float
    started: float
    ready: float | None = None
    felled: float | None = None
    leave_by: float | None = None
    ended: dict[int, str] = field(default_factory=dict)  # a rank: a sentence, in the order of their ends

    def look(self, now: float, stop: bool) -> str | None:
        """Take in what is new, and say why torchrun must be killed; None while it need not. `stop` asks it to leave."""
        if self.ready is None and any(self.directory.glob("ready-*")):
            self.ready = now
            self.log(logging.INFO, "ready after %.1f s", now - self.started)
        dying = any(self.directory.glob("failed-*.json")) or (self.ended and not self._has("leave"))
        if self.felled is None and dying:
            self.felled = now
        if self._has("fenced"):
            return f"fenced by the front end: {self._text('fenced')}"
        if stop and self.ready is None:
            return "stopped before it was ready"
        if stop and self.leave_by is None:
            self.leave_by = now + self.drain_timeout
            (self.directory / "leave").touch()
            self.log(logging.INFO, "asked to leave, within %g s", self.drain_timeout)
        if self.leave_by is not None and now >= self.leave_by:
            return f"it did not leave within {self.drain_timeout:g} s"
        if self.felled is not None and now >= self.felled + REPORTED:
            return "felled, and torchrun did not end"
        if self.ready is None and now >= self.started + self.start_timeout + START_GRACE:
            return f"not ready after {now - self.started:.0f} s"
        return None

    def death(self, now: float, killed_for: str | None, code: int, elsewhere: Death | None = None) -> Death | None:
        """What there is to say of the end, from torchrun's exit code; None if it was an orderly one.

        `elsewhere` is the end of ranks on another host, if torchrun was killed for that.
        """
        if code == 0 and self._has("leave"):
            return None
        report = cause(self.directory)
        ready_for = None if self.ready is None else now - self.ready
        if report is not None and not self._has("fenced"):
            return Death(report.kind, str(report), ready_for)
        if self._has("fenced"):
            return Death("fenced", f"fenced by the front end: {self._text('fenced')}", ready_for)
        if code < 0 and killed_for is None and elsewhere is None:
            return Death("supervisor", f"torchrun died of {signal.Signals(-code).name}", ready_for)
        # torchrun sends SIGTERM to those that are left, the launcher SIGUSR2 for their stacks: that tells of no cause
        telling = (text for text in self.ended.values() if not text.endswith(("SIGTERM", "SIGUSR2", UNSEEN)))
        first = next(telling, None)
        if first is not None:
            return Death("rank", first, ready_for)
        if elsewhere is not None:
            return replace(elsewhere, ready_for=ready_for)
        return Death("supervisor", killed_for or f"torchrun exited with {code}, and no rank said why", ready_for)

    def post_mortem(self, death: Death) -> str:
        """All there is to read of a death: the reason, every rank's end and stacks, the requests in flight."""
        ready = "it was never ready" if death.ready_for is None else f"it had been ready for {death.ready_for:.1f} s"
        lines = [
            f"group {self.group} epoch {self.number} died: {death.text}",
            f"kind: {death.kind}; {ready}",
            f"requests in flight: {self._text('in-flight') or 'none that the front end told of'}",
            *self.ended.values(),
        ]
        for path in sorted(self.directory.glob("stacks-*.txt")):
            rank = path.stem.removeprefix("stacks-")
            lines += ["", f"---- rank {rank}: stacks, the latest call first", path.read_text(errors="replace").strip()]
        return "\n".join([*lines, ""])

    def log(self, level: int, text: str, *values: object) -> None:
        logger.log(level, f"group %s epoch %d {text}", self.group, self.number, *values)  # noqa: G004 - a format

    def _text(self, name: str) -> str:
        path = self.directory / name
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def _has(self, name: str) -> bool:
        return (self.directory / name).exists()


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank wrote before it felled its group (`Lifeline.fell`)."""

    rank: int
    kind: str
    text: str
    at: int  # nanoseconds since 1970; a file's own time is coarser than the time in which a group is felled

    def __str__(self) -> str:
        return f"{self.text} ({self.kind}, rank {self.rank})"


def cause(epoch_dir: Path) -> Report | None:
    """Of all reports of a dead epoch the one that tells why it died; None if no rank left one.

    Several ranks may have reported before they were killed. A rank's own fault goes before a peer's death, for a rank
    that fells the others one by one is seen at it; among equals it is the first in time.
    """
    reports = []
    for file in epoch_dir.glob("failed-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # not written by us: then it says nothing
            fields = json.loads(file.read_text())
            reports.append(Report(int(fields["rank"]), str(fields["kind"]), str(fields["text"]), int(fields["at"])))
    return min(reports, key=lambda report: (report.kind == "peer", report.at), default=None)
