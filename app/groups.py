"""What the front end knows of a worker group: its HELLO, its steps, whether it proves alive; it sends nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from app.batcher import Batch
from app.queue import Peer
from workers.wire import Hello, Result

IN_FLIGHT = 2  # steps a group holds: one that runs, one that waits on the ranks' side
FRESH = 5.0  # seconds for which a step proves that its group is ready
LEAD = 0.01, 0.25  # seconds, or part of a forward, by which the next one should be on the ranks before they want it


@dataclass
class Flight:
    """A step that a group holds; without a batch it is a canary."""

    batch: Batch | None
    late: asyncio.TimerHandle
    expires: float
    timeout: float  # seconds, its own
    sent: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        return self.batch.size if self.batch else 0


@dataclass
class Group:
    """A worker group that has said HELLO."""

    peer: Peer
    hello: Hello
    flights: dict[int, Flight] = field(default_factory=dict)
    last_step: float = field(default_factory=time.monotonic)  # its HELLO follows a step through the whole path
    canary_failure: str | None = None
    leaving: bool = False
    settled: bool = False  # has ended a step since its HELLO, so that it holds none from before
    missing: bool = False  # its connection has closed, and it has not said HELLO again
    ended_by: str = ""
    free_since: float = 0.0  # when the models were free to begin the oldest flight
    forwards: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=8))  # seconds, of the latest steps

    @property
    def name(self) -> str:
        return f"group {self.hello.group} epoch {self.hello.epoch}"

    def unreadiness(self, now: float) -> str | None:
        """Why it would not answer now; None when it would."""
        running = any(now < flight.expires for flight in self.flights.values())
        if self.leaving:
            return f"{self.name} is leaving"
        if self.missing:
            return f"{self.name}: its connection closed"
        if self.canary_failure:
            return f"{self.name}: its example fails: {self.canary_failure}"
        if now - self.last_step >= FRESH and not running:
            return f"{self.name} has ended no step for {now - self.last_step:.1f} s"
        return None

    def step_ended(self, result: Result) -> None:
        self.last_step = time.monotonic()
        self.settled = True
        self.free_since = self.last_step - result.collect_seconds
        if result.stats:
            self.forwards.append(max(stats.forward_seconds for stats in result.stats))

    def wants_next_at(self) -> float:
        """When a step should go behind the one that runs: just in time, so that it is as full and fair as can be.

        A guess, by the shortest of the latest forwards: too early costs little, and when a step ends one goes anyhow.
        Infinite where none may go before that.
        """
        if self.leaving or self.missing or len(self.flights) >= IN_FLIGHT:
            return float("inf")
        if any(flight.batch and flight.batch.strikes for flight in self.flights.values()):
            return float("inf")  # a suspect runs alone
        if not self.flights:
            return 0.0
        running, usual = next(iter(self.flights.values())), min(self.forwards)
        return max(running.sent, self.free_since) + usual - max(LEAD[0], LEAD[1] * usual)

    @property
    def capacity(self) -> int:
        return self.hello.world * self.hello.model.max_batch_size
