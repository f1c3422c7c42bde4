"""Requests on one side, groups on the other: steps in flight, epochs, requeue; it knows no HTTP, no content, no socket.

The protocol is in `workers.wire`; who may run what, and when, is decided in `app.batcher`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from app import steps
from app.batcher import Account, Batch
from app.catalog import Catalog, Served
from app.codecs import Cut
from app.fencing import Fencing
from app.groups import Flight, Group
from app.lost import Lost
from app.metrics import Metrics
from app.queue import Listen, Peer, Queue, Sent
from app.reception import Reception
from app.settings import Settings
from app.steps import Ran, Request
from workers import launch, wire
from workers.errors import DeadlineExceeded, Draining, NoGroup, PoisonItem, RequestError
from workers.ring import Block, Ring, open_ring
from workers.wire import Buffer, Form, Goodbye, Hello, Message, Place, Result, Step

log = logging.getLogger("app")

LATE = 3.0  # seconds over its deadline after which a step's group is given up: the ranks' own backstop takes two
TICK = 0.25  # seconds between two looks at canaries
IDLE = 1.0  # seconds after a step at which an idle group gets a canary
CANARY_TIMEOUT = 2.0  # seconds, at least
CANARY_FACTOR = 5  # times the group's own warm-up step
MOST_HELD = 8  # steps of earlier sessions that a group is waited for: more it cannot have, whatever it says
PAUSED = 1.0  # seconds between two ticks beyond which this process itself stood still
MISSING = 2.0  # seconds that a group whose connection closed has to say HELLO again
PROBES = (0.0, 0.02, 0.2)  # seconds after a disconnect: the socket may learn of it later than its monitor


class Dispatcher:
    """Requests to steps to results, on one event loop."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        on_ready: Callable[[Group], None] | None = None,
        beside: str | None = None,
    ) -> None:
        """`on_ready` is called once, with the first group; `beside` is the group that says which model is served."""
        self._on_ready = on_ready
        self.account = Account(settings.queue_items, settings.queue_bytes)
        self.metrics = metrics
        self.session = secrets.token_hex(8)
        self.catalog = Catalog(settings.model_names, settings.max_wait_ms / 1000, settings.group_wait, time.monotonic())
        self.groups = self.catalog.groups
        self.draining = False
        self.restarts = 0  # groups that came after an epoch of theirs that had ended
        self._settings = settings
        self._run_dir: Path = settings.run_directory.absolute()
        self.lost = Lost(self._run_dir)
        self._queue = Queue(self._run_dir, self._handle, self._disconnected, Listen.of(settings))
        self._fencing = Fencing(self._run_dir, self._queue.send)
        self._reception = Reception(self.catalog, self.lost, self._fencing, beside)
        self._ring: Ring | None = None
        self._requests: set[Request] = set()
        self._step = 0
        self._feeding = False
        self._wake: asyncio.TimerHandle | None = None

    # ---- life

    async def start(self) -> None:
        """Claim the run directory and bind the queue. RunDirectoryError where another front end has it."""
        self._loop = asyncio.get_running_loop()
        for served in self.catalog.models:
            served.without_group_since = time.monotonic()
        self._queue.open()
        try:
            self._ring = open_ring(self._run_dir, self.session, self._settings.ring_bytes)
        except OSError as error:
            log.warning("no ring in %s: %s; large bodies go through the queue's socket", self._run_dir, error.strerror)
        self._ticked = time.monotonic()
        self._ticker = self._loop.call_later(TICK, self._tick)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; return when the admitted ones are answered, or after `seconds`, which refuses those."""
        self.draining = True
        waiting = [request.future for request in self._requests]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        for request in list(self._requests):
            request.end(Draining(f"the service stopped before the request was answered, after {seconds:g} s"))

    async def close(self) -> None:
        self._ticker.cancel()
        for request in list(self._requests):
            request.end(Draining("the service has stopped"))
        if self._ring is not None:
            self._ring.close()
        self._queue.close()

    # ---- requests

    def block(self, size: int) -> Block | None:
        """Memory for a body that the ranks will see too; None where there is none left."""
        return None if self._ring is None else self._ring.take(size)

    def find(self, model: str | None) -> Served:
        """The model that a request names, or the only one. NoSuchModel, UnnamedModel; NoGroup: nobody knows yet."""
        served = self.catalog.find(model)
        if model is not None and served.name is None:
            last = self.lost.last() or "none yet"
            raise NoGroup(f"no worker group has said yet which model it serves; the last one: {last}")
        return served

    def submit(self, cut: Cut, model: str | None, request_id: str, deadline: float) -> Request:
        """Queue a request; `await request.future`, which raises a RequestError where the whole request fails.

        `deadline` is a time.monotonic(). Raises Draining, or as `find`; admission by size is the account's.
        """
        now = time.monotonic()
        if self.draining:
            raise Draining("the service takes no new requests")
        served = self.find(model)
        if not served.groups and (waited := now - served.without_group_since) > self._settings.group_wait:
            last = self.lost.last(served.name, self.groups) or "none yet"
            raise NoGroup(f"no worker group for {waited:.0f} s; the last one: {last}")
        request = Request(
            cut.form, len(cut.items), deadline, cut=cut, model=model, id=request_id, future=self._loop.create_future()
        )
        if not request.size:
            request.end()
            return request
        request.timer = self._loop.call_later(max(0.0, deadline - now), self._expire, request)
        self._requests.add(request)
        request.future.add_done_callback(lambda _: self._requests.discard(request))
        served.batcher.add(request, now)
        self._feed_soon()
        return request

    def unreadiness(self, model: str | None = None) -> str | None:
        """Why requests for `model`, or for some model, would not be answered now; None when they would. NoSuchModel."""
        if self.draining:
            return "draining"
        for served in self.catalog.models if model is None else [self.catalog.find(model)]:
            if (reason := self._unreadiness(served)) is not None:
                return f"model {served.name}: {reason}" if self.catalog.several else reason
        return None

    def _unreadiness(self, served: Served) -> str | None:
        if served.groups:
            return served.unreadiness(time.monotonic())
        last = self.lost.last(served.name, self.groups)
        waits = "".join(f"; group {group}: {wait}" for group, wait in launch.waits(self._run_dir).items())
        return (
            "no worker group" + ("" if last or waits else " yet") + waits + (f"; the last one: {last}" if last else "")
        )

    def waiting(self) -> int:
        """Items that are in no step yet."""
        now = time.monotonic()
        return sum(served.batcher.waiting(now) for served in self.catalog.models)

    def _expire(self, request: Request) -> None:
        request.end(DeadlineExceeded("the deadline passed before every item was answered"))

    # ---- steps out

    def _feed_soon(self) -> None:
        """After this turn of the loop, so that requests that come together go together."""
        if not self._feeding:
            self._feeding = True
            self._loop.call_soon(self._feed)

    def _feed(self) -> None:
        self._feeding = False
        now = time.monotonic()
        wake_at = min(self._feed_model(served, now) for served in self.catalog.models)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_later(wake_at - now, self._feed_soon) if wake_at < float("inf") else None

    def _feed_model(self, served: Served, now: float) -> float:
        """Steps to whichever group is free, the idlest first; when to look again."""
        wake_at = float("inf")
        groups = list(served.groups.values())
        while groups:
            group = min(groups, key=lambda one: len(one.flights))
            wanted_at = group.wants_next_at()
            if wanted_at <= now:
                beside = sum(flight.size for flight in group.flights.values()) if group.flights else None
                idle = sum(one.capacity for one in groups if one.wants_next_at() == 0.0)
                batch = served.batcher.take(group.capacity, now, beside, group.hello.group, idle)
                if batch is not None and self._send(group, batch):
                    continue
            else:
                wake_at = min(wake_at, wanted_at)
            groups.remove(group)
        batch_at = served.batcher.wake_at()
        return min(wake_at, batch_at) if batch_at > now else wake_at

    def _send(self, group: Group, batch: Batch | None) -> bool:
        """A step, or a canary; False where the group took none."""
        timeout = self._settings.step_timeout
        if batch is None:
            timeout = min(timeout, max(CANARY_TIMEOUT, CANARY_FACTOR * group.hello.warmup_seconds))
        self._step += 1
        no_items: tuple[Form, list[list[int]], list[Place | None], list[Buffer]] = Form("json", "json"), [], [], []
        form, lengths, places, payload = no_items
        if batch:
            form, lengths, places, payload = steps.shards(batch, group.hello.world, inline=group.peer.remote)
        step = Step(self.session, group.hello.epoch, self._step, form, lengths, places, timeout, canary=batch is None)
        sent = self._queue.send(group.peer, step, payload)
        if sent is not Sent.YES:
            if batch is not None:
                self.catalog.of(group).batcher.put_back([batch], strike=False)
            if sent is Sent.GONE:
                self._disconnected()
            else:
                self._loop.call_later(TICK, self._feed_soon)
            return False
        now = time.monotonic()
        # A step's own time begins when those before it have ended, those of an earlier session among them.
        held = 0 if group.settled else min(group.hello.held, MOST_HELD) * self._settings.step_timeout
        patience = timeout + held + sum(flight.timeout for flight in group.flights.values())
        group.flights[self._step] = Flight(batch, self._watch(group, self._step, patience), now + patience, timeout)
        for request in steps.requests(batch) if batch else ():
            if not request.started:
                request.started = now
                self.metrics.queue_seconds.observe(now - request.added)
        return True

    def _watch(self, group: Group, step: int, seconds: float) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds + LATE, self._lost, group, f"step {step} did not end")

    # ---- messages in

    def _handle(self, peer: Peer, message: Message, payload: list[Buffer]) -> None:
        group = next((one for one in self.groups.values() if one.peer == peer), None)
        if isinstance(message, Hello):
            self._greeted(peer, message, group)
        elif isinstance(message, wire.Leaving) and group is not None:
            log.info("%s is leaving", group.name)
            group.leaving = True
            self._queue.send(peer, Goodbye())
        elif isinstance(message, Result) and group is not None and self._is_ours(message, group, payload):
            flight = group.flights.pop(message.step)
            flight.late.cancel()
            group.step_ended(message)
            self._ended(group, flight, message, payload)
            self._feed_soon()
        elif isinstance(message, wire.Watching | wire.Died):
            ended = self._reception.told(peer, message)
            for one in [one for one in self.groups.values() if one.peer == ended]:
                self._lost(one, "its launcher says that it died")
        else:
            self.metrics.dropped.inc()

    def _is_ours(self, message: Result, group: Group, payload: list[Buffer]) -> bool:
        if (message.session, message.epoch) != (self.session, group.hello.epoch) or message.step not in group.flights:
            return False
        fault = group.peer.remote and steps.fault(
            group.flights[message.step].batch, message, payload, group.hello.world
        )
        if fault:  # the step is late then, and its group given up
            log.error("a result of %s is dropped: %s", group.name, fault)
        return not fault

    def _greeted(self, peer: Peer, hello: Hello, group: Group | None) -> None:
        if not self._reception.admits(peer, hello):
            return
        if group is not None:  # the connection was lost for a while, and with it perhaps a step
            log.warning("%s said HELLO again", group.name)
            self._requeue(group, strike=False)
            group.missing = group.settled = False
            group.hello = msgspec.structs.replace(group.hello, held=hello.held)
        else:
            if (old := self.groups.get(hello.group)) is not None:
                self._lost(old, f"superseded by epoch {hello.epoch}")
            self._welcome(Group(peer, hello))
        self.metrics.group_changed(hello.group, hello.world, up=True)
        for other, said in self._reception.early():
            self._greeted(other, said, None)
        self._feed_soon()

    def _welcome(self, group: Group) -> None:
        hello = group.hello
        self.catalog.welcome(group)
        for request in list(self._requests):  # nobody gets the answer of a model that took the place of another
            try:
                self.catalog.find(request.model)
            except RequestError as error:
                request.end(error)
        if (kind := self.lost.replaced(hello.group)) is not None:
            self.restarts += 1
            self.metrics.restarts.labels(kind).inc()
        self.metrics.epochs.inc()
        log.info("%s: %d ranks of %s", group.name, hello.world, hello.model.name)
        if self._on_ready is not None:
            self._on_ready(group)
            self._on_ready = None

    def _ended(self, group: Group, flight: Flight, result: Result, payload: list[Buffer]) -> None:
        if flight.batch is None:
            group.canary_failure = result.failures[0].detail if result.failures else None
            return
        self.metrics.step_ended(group.hello.group, flight.size, group.capacity, result)
        slowest = max((stats.forward_seconds for stats in result.stats), default=0.0)
        stats = [msgspec.structs.replace(one, began=0.0) for one in result.stats] if group.peer.remote else result.stats
        ran = Ran(flight.sent, group.last_step, flight.size, stats, result.collect_seconds, group.hello.group)
        for request in steps.requests(flight.batch):
            request.forward += slowest
            request.collect += result.collect_seconds
            request.ran.append(ran)
        steps.deal(flight.batch, result, payload, group.hello.group, group.hello.world)

    # ---- groups that end

    def _disconnected(self) -> None:
        for delay in PROBES:
            self._loop.call_later(delay, self._probe)

    def _probe(self) -> None:
        """The queue does not say whose connection it was: whoever cannot be reached is gone."""
        gone = [
            group
            for group in self.groups.values()
            if not group.missing and self._queue.send(group.peer, wire.Ping()) is Sent.GONE
        ]
        for group in gone:
            group.missing = True
            self.metrics.group_changed(group.hello.group, group.hello.world, up=False)
            self._fencing.note_in_flight(group.peer, group.hello, self._ids(group))
            self._loop.call_later(MISSING, self._give_up, group)
        for group in gone:
            others = self.catalog.of(group).groups.values()
            if group.flights and not all(other.missing or other.leaving for other in others):
                log.error("%s cannot be reached; what it held runs elsewhere: %s", group.name, self._ids(group))
                self._requeue(group, strike=not group.leaving)
                self._feed_soon()

    def _give_up(self, group: Group) -> None:
        """A front end that was paused finds its connections closed; ranks that live say HELLO again at once."""
        if group.missing:
            self._lost(group, "its connection closed")

    def _lost(self, group: Group, why: str) -> None:
        """A group has died, is late or has left: it is fenced, and what it held runs elsewhere, at the head."""
        if self.groups.get(group.hello.group) is not group:
            return
        self._reception.is_over(group.peer)
        group.ended_by = "it has left" if group.leaving and not group.flights else why
        served = self.catalog.lose(group, time.monotonic())
        self.lost.add(group)
        patience = 0.0 if group.leaving else self._settings.group_wait
        self._loop.call_later(patience, self._free_suspects, served, group.hello.group)
        self.metrics.group_deaths.inc()
        self.metrics.group_changed(group.hello.group, group.hello.world, up=False)
        if group.leaving and not group.flights:
            log.info("%s has left", group.name)
            if served.groups:
                self.metrics.group_left(group.hello.group)
            return
        log.error("%s is given up: %s; in flight: %s", group.name, why, self._ids(group) or "nothing")
        if not group.missing:  # then it was noted at once
            self._fencing.note_in_flight(group.peer, group.hello, self._ids(group))
        self._fencing.fence(group.peer, group.hello, why)
        self._requeue(group, strike=not group.leaving)
        self._feed_soon()

    def _requeue(self, group: Group, strike: bool) -> None:
        batches = [flight.batch for flight in group.flights.values() if flight.batch]
        for flight in group.flights.values():
            flight.late.cancel()
        group.flights.clear()
        self.metrics.requeued.inc(sum(batch.size for batch in batches))
        for piece in self.catalog.of(group).batcher.put_back(batches, strike, group.hello.group):
            log.error("item %d of request %s kills its group: given up", piece.start, steps.request(piece).id)
            error = PoisonItem("the worker group died each time that it ran the item, the last time alone")
            steps.fail([piece], error)

    def _free_suspects(self, served: Served, group: str) -> None:
        """A group that does not come back keeps nothing waiting."""
        if group not in served.groups:
            served.batcher.free(group)
            self._feed_soon()

    def _ids(self, group: Group) -> str:
        ids = (
            request.id for flight in group.flights.values() if flight.batch for request in steps.requests(flight.batch)
        )
        return ", ".join(dict.fromkeys(ids))

    def _tick(self) -> None:
        """Canaries: a group that nothing else proves alive runs its own example."""
        self._ticker = self._loop.call_later(TICK, self._tick)
        now = time.monotonic()
        stood_still, self._ticked = now - self._ticked - TICK, now
        for group in list(self.groups.values()):
            if stood_still > PAUSED:
                self._allow_for(stood_still, group)
            if not (group.flights or group.leaving or group.missing) and now - group.last_step >= IDLE:
                self._send(group, None)

    def _allow_for(self, stood_still: float, group: Group) -> None:
        """This process was stopped, or its machine: what came late meanwhile is not the group's fault."""
        for number, flight in group.flights.items():
            flight.late.cancel()
            flight.expires += stood_still
            flight.late = self._watch(group, number, max(0.0, flight.expires - self._ticked))
