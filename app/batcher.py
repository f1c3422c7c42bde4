"""Admission and batch forming, as pure decisions: no I/O, no clock (`now` is an argument), no asyncio, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from workers.errors import QueueFull, TooLarge


class Account:
    """The one account, in items and bytes, of bodies being read, queued, in flight, and answers being written."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.items = 0
        self.bytes = 0

    def open(self) -> Hold:
        return Hold(self)


class Hold:
    """What one request holds of the account, until `release`."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.items = 0
        self.bytes = 0

    def take_bytes(self, count: int) -> None:
        """Before they are read. QueueFull: no room now. TooLarge: there will never be room."""
        account = self._account
        if self.bytes + count > account.max_bytes:
            raise TooLarge(f"{self.bytes + count} bytes are more than the queue holds ({account.max_bytes})")
        if account.bytes + count > account.max_bytes:
            raise QueueFull(f"the queue holds {account.bytes} bytes; {count} more do not fit ({account.max_bytes})")
        self.add_bytes(count)

    def add_bytes(self, count: int) -> None:
        """Of an answer: it exists already, so it counts, but cannot be refused."""
        self._account.bytes += count
        self.bytes += count

    def take_items(self, count: int) -> None:
        """QueueFull: no room now. TooLarge: there will never be room."""
        account = self._account
        if count > account.max_items:
            raise TooLarge(f"{count} items are more than the queue holds ({account.max_items})")
        if account.items + count > account.max_items:
            raise QueueFull(f"the queue holds {account.items} items; {count} more do not fit ({account.max_items})")
        account.items += count
        self.items += count

    def release(self) -> None:
        self._account.items -= self.items
        self._account.bytes -= self.bytes
        self.items = self.bytes = 0


@dataclass(eq=False)
class Job:
    """One request as the batcher sees it: so many items of one form, wanted before `deadline`."""

    form: Hashable  # only jobs of equal form share a step
    size: int
    deadline: float
    added: float = 0.0
    taken: int = 0  # items that are in a step already
    live: bool = True  # somebody still waits for it

    def wanted(self, now: float) -> bool:
        return self.live and now < self.deadline


class Piece(NamedTuple):
    """Items `start` to `stop` of a job."""

    job: Job
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass
class Batch:
    """What one step runs."""

    pieces: list[Piece]
    strikes: int = 0  # groups that died with it in flight
    only: str | None = None  # the one group that may run it: it has felled that one, and must not fell all

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def form(self) -> Hashable:
        return self.pieces[0].job.form

    def split(self, count: int) -> list[Batch]:
        """Its first `count` items and the others."""
        first: list[Piece] = []
        second: list[Piece] = []
        for job, start, stop in self.pieces:
            cut = min(stop, start + count)
            count -= cut - start
            if cut > start:
                first.append(Piece(job, start, cut))
            if stop > cut:
                second.append(Piece(job, cut, stop))
        return [Batch(first, self.strikes, self.only), Batch(second, self.strikes, self.only)]


@dataclass
class Batcher:
    """Jobs in, batches out: fair between jobs, and careful with batches that a group died of."""

    max_wait: float = 0.0  # seconds that an idle group waits for a fuller step
    _jobs: deque[Job] = field(default_factory=deque)
    _returned: deque[Batch] = field(default_factory=deque)
    _sweep_at: int = 0

    def add(self, job: Job, now: float) -> None:
        job.added = now
        self._jobs.append(job)
        if len(self._jobs) > self._sweep_at:  # jobs that nobody waits for must not pile up while no step is taken
            self._jobs = deque(job for job in self._jobs if job.wanted(now))
            self._sweep_at = max(8, 2 * len(self._jobs))

    def waiting(self, now: float) -> int:
        """Items that wait for a step."""
        fresh = sum(job.size - job.taken for job in self._jobs if job.wanted(now))
        return fresh + sum(piece.size for batch in self._returned for piece in batch.pieces if piece.job.wanted(now))

    def take(
        self, capacity: int, now: float, beside: int | None = None, group: str = "", idle: int = 0
    ) -> Batch | None:
        """The next step of at most `capacity` items for a group, or None.

        `beside` is the number of items in the step that is running, None when none is: a second step goes only when
        it is at least as large or full, so that steps do not degenerate into tiny ones. A job that does not fit is cut
        and goes to the back, so that a large one takes turns with the others. `idle` is the capacity of all groups
        that run nothing, this one among them: they share what waits, except many small jobs, which are best together.
        """
        batch = self._take_returned(now, group)
        if batch is not None:
            if batch.size > capacity:  # a new group may hold less than the one that died
                batch, rest = batch.split(capacity)
                self._returned.appendleft(rest)
            if beside is not None and (batch.strikes or batch.size < min(beside, capacity)):
                self._returned.appendleft(batch)
                return None  # a suspect runs alone
            return batch
        while self._jobs and not self._jobs[0].wanted(now):
            self._jobs.popleft()
        if not self._jobs:
            return None
        chosen, size = self._choose(max(capacity, idle), now)
        if size < capacity and (size < (beside or 0) or (beside is None and now < self.wake_at())):
            return None
        if idle > capacity:
            share = ceil(size * capacity / idle)
            chosen, _ = self._choose(share if share >= len(chosen) else capacity, now)
        return Batch(self._cut(chosen))

    def wake_at(self) -> float:
        """When the oldest job has waited for `max_wait`."""
        return self._jobs[0].added + self.max_wait if self._jobs else float("inf")

    def put_back(self, batches: Iterable[Batch], strike: bool, group: str = "") -> list[Piece]:
        """At the head, what was in flight when `group` ended; the pieces returned are poison and not put back.

        Struck once, a batch runs again as it was, on whichever group is free: it is seldom to blame. Struck again, it
        is halved, until one item is alone: that is poison. The halves are for the group that died last alone, so that
        poison fells that one time and again while the others go on.
        """
        back: list[Batch] = []
        poison: list[Piece] = []
        for batch in batches:
            batch.strikes += strike
            if strike and batch.strikes >= 2:
                batch.only = group
            if batch.strikes < 2 or not strike:
                back.append(batch)
            elif batch.size == 1:
                poison += batch.pieces
            else:
                back += batch.split((batch.size + 1) // 2)
        self._returned.extendleft(reversed(back))
        return poison

    def free(self, group: str) -> None:
        """What only `group` could run any group may: it does not come back."""
        for batch in self._returned:
            if batch.only == group:
                batch.only = None

    def _take_returned(self, now: float, group: str) -> Batch | None:
        """The first of those put back that `group` may run; what nobody waits for is dropped."""
        passed: list[Batch] = []
        found = None
        while self._returned and found is None:
            batch = self._returned.popleft()
            batch.pieces = [piece for piece in batch.pieces if piece.job.wanted(now)]
            if batch.pieces and batch.only not in (None, group):
                passed.append(batch)
            elif batch.pieces:
                found = batch
        self._returned.extendleft(reversed(passed))
        return found

    def _choose(self, capacity: int, now: float) -> tuple[list[tuple[Job, int]], int]:
        """Jobs of the oldest job's form and how many items of each, without changing anything."""
        chosen: list[tuple[Job, int]] = []
        size = 0
        for job in self._jobs:
            if job.form == self._jobs[0].form and job.wanted(now):
                count = min(job.size - job.taken, capacity - size)
                chosen.append((job, count))
                size += count
                if size == capacity:
                    break
        return chosen, size

    def _cut(self, chosen: list[tuple[Job, int]]) -> list[Piece]:
        pieces = []
        for job, count in chosen:
            pieces.append(Piece(job, job.taken, job.taken + count))
            job.taken += count
        last = chosen[-1][0]
        taken = {id(job) for job, _ in chosen}
        if taken == {id(job) for job, _ in zip(self._jobs, chosen, strict=False)}:
            for _ in chosen:  # the usual case: they are the head of the queue
                self._jobs.popleft()
        else:
            self._jobs = deque(job for job in self._jobs if id(job) not in taken)
        if last.taken < last.size:
            self._jobs.append(last)
        return pieces
