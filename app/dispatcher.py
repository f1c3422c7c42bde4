"""Futures on one side, the local queue on the other: steps in flight, epochs, requeue; it knows no HTTP and no content.

The protocol is in `workers.wire`; who may run what, and when, is decided in `app.batcher`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.monitor

from app import codecs
from app.batcher import Account, Batch, Batcher, Job, Piece
from app.codecs import Cut, Span
from app.metrics import Metrics
from app.settings import Settings
from workers import wire
from workers.errors import (
    DeadlineExceeded,
    Draining,
    GroupError,
    InternalError,
    NoGroup,
    PhalanxError,
    PoisonItem,
    RequestError,
    by_type,
)
from workers.launch import claim, prepare_run_dir
from workers.wire import Buffer, Form, Goodbye, Hello, Leaving, Ping, Result, Step

log = logging.getLogger("app")

IN_FLIGHT = 2  # steps a group holds: one that runs, one that waits on the ranks' side
LATE = 3.0  # seconds over its deadline after which a step's group is given up: the ranks' own backstop takes two
TICK = 0.25  # seconds between two looks at canaries
IDLE = 1.0  # seconds after a step at which an idle group gets a canary
FRESH = 5.0  # seconds for which a step proves that its group is ready
CANARY_TIMEOUT = 2.0  # seconds, at least
CANARY_FACTOR = 5  # times the group's own warm-up step
PROBES = (0.0, 0.02, 0.2)  # seconds after a disconnect: ROUTER may learn of it later than its monitor


@dataclass(eq=False)
class Request(Job):
    """One admitted request: its items, and the results as they come in."""

    cut: Cut = field(kw_only=True)
    id: str = field(kw_only=True)
    future: asyncio.Future[None] = field(kw_only=True)
    timer: asyncio.TimerHandle | None = None
    answered: int = 0
    spans: list[Span] = field(default_factory=list)
    failures: dict[int, PhalanxError] = field(default_factory=dict)
    started: float = 0.0  # when its first items went into a step
    forward: float = 0.0  # seconds, of the slowest rank of each step
    collect: float = 0.0  # seconds

    def settle(self, span: Span, failures: dict[int, PhalanxError]) -> None:
        """Take in results; the future is done with the last of them."""
        self.spans.append(span)
        self.failures.update(failures)
        self.answered += len(span.lengths)
        if self.answered == self.size:
            refusal = next((e for e in self.failures.values() if isinstance(e, RequestError)), None)
            self.spans.sort(key=lambda one: one.start)
            self.end(refusal)

    def end(self, error: PhalanxError | None = None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.live = False
        if not self.future.done():
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)


@dataclass
class Flight:
    """A step that a group holds; without a batch it is a canary."""

    batch: Batch | None
    late: asyncio.TimerHandle
    expires: float

    @property
    def size(self) -> int:
        return self.batch.size if self.batch else 0


@dataclass
class Group:
    """A worker group that has said HELLO."""

    identity: bytes
    hello: Hello
    flights: dict[int, Flight] = field(default_factory=dict)
    last_step: float = field(default_factory=time.monotonic)  # its HELLO follows a step through the whole path
    canary_failure: str | None = None
    leaving: bool = False

    @property
    def name(self) -> str:
        return f"group {self.hello.group} epoch {self.hello.epoch}"

    @property
    def capacity(self) -> int:
        return self.hello.world * self.hello.model.max_batch_size


class Dispatcher:
    """The front end's side of the queue, on one event loop."""

    def __init__(self, settings: Settings, metrics: Metrics, on_ready: Callable[[Group], None] | None = None) -> None:
        """`on_ready` is called once, with the first group."""
        self._on_ready = on_ready
        self.account = Account(settings.queue_items, settings.queue_bytes)
        self.metrics = metrics
        self.session = secrets.token_hex(8)
        self.groups: dict[str, Group] = {}
        self.draining = False
        self.last_death = ""
        self._settings = settings
        self._run_dir: Path = settings.run_directory.absolute()
        self._batcher = Batcher(settings.max_wait_ms / 1000)
        self._requests: set[Request] = set()
        self._refused: set[bytes] = set()  # identities of epochs that are dead or superseded, for ever
        self._without_group_since = time.monotonic()
        self._step = 0
        self._feeding = False
        self._wake: asyncio.TimerHandle | None = None

    # ---- life

    async def start(self) -> None:
        """Claim the run directory and bind the queue. RunDirectoryError where another front end has it."""
        self._loop = asyncio.get_running_loop()
        prepare_run_dir(self._run_dir)
        self._lock = claim(self._run_dir / "lock")
        self._path = self._run_dir / "queue.sock"
        self._path.unlink(missing_ok=True)  # it survives its owner's death, and the lock says that the owner is dead
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(wire.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, wire.HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        umask = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{self._path}")
        finally:
            os.umask(umask)
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._loop.add_reader(self._monitor.fileno(), self._disconnected)
        # a socket's descriptor wakes nobody before its events were asked for once
        self._receive()
        self._disconnected()
        self._ticker = self._loop.call_later(TICK, self._tick)
        self._without_group_since = time.monotonic()

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
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    # ---- requests

    def submit(self, cut: Cut, request_id: str, deadline: float) -> Request:
        """Queue a request; `await request.future`, which raises a RequestError where the whole request fails.

        `deadline` is a time.monotonic(). Raises Draining or NoGroup; admission by size is the account's.
        """
        now = time.monotonic()
        if self.draining:
            raise Draining("the service takes no new requests")
        if not self.groups and now - self._without_group_since > self._settings.group_wait:
            waited = now - self._without_group_since
            raise NoGroup(f"no worker group for {waited:.0f} s; the last one: {self.last_death or 'none yet'}")
        request = Request(cut.form, len(cut.items), deadline, cut=cut, id=request_id, future=self._loop.create_future())
        if not request.size:
            request.end()
            return request
        request.timer = self._loop.call_later(max(0.0, deadline - now), self._expire, request)
        self._requests.add(request)
        request.future.add_done_callback(lambda _: self._requests.discard(request))
        self._batcher.add(request, now)
        self._feed_soon()
        return request

    def cancel(self, request: Request) -> None:
        """Nobody waits for it any more: what of it is queued is dropped."""
        request.end(DeadlineExceeded("given up"))

    def unreadiness(self) -> str | None:
        """Why the service is not ready; None when it is."""
        now = time.monotonic()
        if self.draining:
            return "draining"
        if not self.groups:
            return "no worker group" + (f"; the last one: {self.last_death}" if self.last_death else " yet")
        for group in self.groups.values():
            running = any(now < flight.expires for flight in group.flights.values())
            if group.leaving:
                return f"{group.name} is leaving"
            if group.canary_failure:
                return f"{group.name}: its example fails: {group.canary_failure}"
            if now - group.last_step >= FRESH and not running:
                return f"{group.name} has ended no step for {now - group.last_step:.1f} s"
        return None

    def waiting(self) -> int:
        """Items that are in no step yet."""
        return self._batcher.waiting(time.monotonic())

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
        for group in list(self.groups.values()):
            while not group.leaving and len(group.flights) < IN_FLIGHT:
                flights = group.flights.values()
                if any(flight.batch and flight.batch.strikes for flight in flights):
                    break  # a suspect runs alone
                beside = sum(flight.size for flight in flights) if flights else None
                batch = self._batcher.take(group.capacity, now, beside)
                if batch is None or not self._send(group, batch):
                    break
        if self._wake is not None:
            self._wake.cancel()
        wake_at = self._batcher.wake_at()
        self._wake = self._loop.call_later(wake_at - now, self._feed_soon) if now < wake_at < float("inf") else None

    def _send(self, group: Group, batch: Batch | None) -> bool:
        """A step, or a canary; False where the group took none."""
        timeout = self._settings.step_timeout
        if batch is None:
            timeout = min(timeout, max(CANARY_TIMEOUT, CANARY_FACTOR * group.hello.warmup_seconds))
        self._step += 1
        form, lengths, payload = _shards(batch, group.hello.world)
        step = Step(self.session, group.hello.epoch, self._step, form, lengths, timeout, canary=batch is None)
        try:
            self._socket.send_multipart([group.identity, *wire.encode(step, payload)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if batch is not None:
                self._batcher.put_back([batch], strike=False)
            if error.errno != zmq.EAGAIN:
                self._lost(group, "it cannot be reached")
            return False
        now = time.monotonic()
        late = self._loop.call_later(timeout + LATE, self._lost, group, f"step {self._step} did not end")
        group.flights[self._step] = Flight(batch, late, now + timeout)
        for piece in batch.pieces if batch else ():
            request = _request(piece)
            if not request.started:
                request.started = now
                self.metrics.queue_seconds.observe(now - request.added)
        self._loop.call_soon(self._receive)  # sending may have swallowed the edge that the reader waits for
        return True

    # ---- messages in

    def _receive(self) -> None:
        """Everything that has come: the socket's descriptor is edge-triggered."""
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                message, payload = wire.decode([frame.buffer for frame in frames])
                self._handle(identity.bytes, message, payload)
            except GroupError as error:
                log.error("%s: %s", identity.bytes, error)

    def _handle(self, identity: bytes, message: wire.Message, payload: list[Buffer]) -> None:
        group = next((one for one in self.groups.values() if one.identity == identity), None)
        if isinstance(message, Hello):
            self._greeted(identity, message, group)
        elif isinstance(message, Leaving) and group is not None:
            log.info("%s is leaving", group.name)
            group.leaving = True
            self._tell(identity, Goodbye())
        elif isinstance(message, Result) and group is not None and self._is_ours(message, group):
            flight = group.flights.pop(message.step)
            flight.late.cancel()
            group.last_step = time.monotonic()
            self._ended(group, flight, message, payload)
            self._feed_soon()
        else:
            self.metrics.dropped.inc()

    def _is_ours(self, message: Result, group: Group) -> bool:
        return (message.session, message.epoch) == (self.session, group.hello.epoch) and message.step in group.flights

    def _greeted(self, identity: bytes, hello: Hello, group: Group | None) -> None:
        if hello.wire != wire.WIRE:
            self.last_death = f"group {hello.group} speaks wire version {hello.wire}, this front end {wire.WIRE}"
            log.error("refused: %s", self.last_death)
            return
        if identity in self._refused:
            self._fence(hello, "its epoch was given up")
            return
        if group is not None:  # the connection was lost for a while, and with it perhaps a step
            log.warning("%s said HELLO again", group.name)
            self._requeue(group, strike=False)
            group.hello = hello
        else:
            if (old := self.groups.get(hello.group)) is not None:
                self._lost(old, f"superseded by epoch {hello.epoch}")
            self.groups[hello.group] = Group(identity, hello)
            self.metrics.epochs.inc()
            log.info("group %s epoch %d: %d ranks of %s", hello.group, hello.epoch, hello.world, hello.model.name)
            if self._on_ready is not None:
                self._on_ready(self.groups[hello.group])
                self._on_ready = None
        self._count_ranks()
        self._feed_soon()

    def _ended(self, group: Group, flight: Flight, result: Result, payload: list[Buffer]) -> None:
        if flight.batch is None:
            group.canary_failure = result.failures[0].detail if result.failures else None
            return
        self.metrics.steps.inc()
        self.metrics.step_items.observe(flight.size)
        self.metrics.collect_seconds.observe(result.collect_seconds)
        for stats in result.stats:
            self.metrics.forward_seconds.labels(stats.rank).observe(stats.forward_seconds)
        forward = max((stats.forward_seconds for stats in result.stats), default=0.0)
        for request in {id(piece.job): _request(piece) for piece in flight.batch.pieces}.values():
            request.forward += forward
            request.collect += result.collect_seconds
        failures: dict[int, PhalanxError] = {one.index: by_type(one.type)(one.detail) for one in result.failures}
        expected = [len(lengths) for lengths in wire.shares(flight.size, group.hello.world)]
        if [len(lengths) for lengths in result.lengths] != expected or len(payload) != group.hello.world:
            log.error("%s answered %s items for %s", group.name, [len(one) for one in result.lengths], expected)
            error = InternalError("the group's answer does not fit the step")
            self._fail(flight.batch.pieces, error)
            return
        _deal(flight.batch.pieces, result, payload, failures)

    def _fail(self, pieces: Sequence[Piece], error: PhalanxError) -> None:
        for piece in pieces:
            request = _request(piece)
            span = codecs.null_span(piece.start, piece.size, request.cut.form.returns)
            request.settle(span, dict.fromkeys(range(piece.start, piece.stop), error))

    # ---- groups that end

    def _disconnected(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
            for delay in PROBES:
                self._loop.call_later(delay, self._probe)

    def _probe(self) -> None:
        """The monitor does not say whose connection it was: whoever cannot be reached is gone."""
        for group in list(self.groups.values()):
            if not self._tell(group.identity, Ping()):
                self._lost(group, "its connection closed")

    def _tell(self, identity: bytes, message: wire.Message) -> bool:
        try:
            self._socket.send_multipart([identity, *wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN
        finally:
            self._loop.call_soon(self._receive)
        return True

    def _lost(self, group: Group, why: str) -> None:
        """A group has died, is late or has left: it is fenced, and what it held runs elsewhere, at the head."""
        if self.groups.get(group.hello.group) is not group:
            return
        del self.groups[group.hello.group]
        self._refused.add(group.identity)
        self._without_group_since = time.monotonic()
        self.last_death = f"{group.name}: {why}"
        self.metrics.group_deaths.inc()
        self._count_ranks()
        if group.leaving and not group.flights:
            log.info("%s has left", group.name)
            return
        log.error("%s is given up: %s; in flight: %s", group.name, why, self._ids(group) or "nothing")
        self._fence(group.hello, why)
        self._requeue(group, strike=not group.leaving)
        self._feed_soon()

    def _requeue(self, group: Group, strike: bool) -> None:
        batches = [flight.batch for flight in group.flights.values() if flight.batch]
        for flight in group.flights.values():
            flight.late.cancel()
        group.flights.clear()
        self.metrics.requeued.inc(sum(batch.size for batch in batches))
        for piece in self._batcher.put_back(batches, strike):
            log.error("item %d of request %s kills its group: given up", piece.start, _request(piece).id)
            self._fail([piece], PoisonItem("the worker group died each time that it ran the item, the last time alone"))

    def _fence(self, hello: Hello, why: str) -> None:
        """Ask the launcher to kill the epoch, whatever state its ranks are in."""
        with contextlib.suppress(OSError):  # the launcher may have cleared the epoch away already
            (self._run_dir / "epochs" / f"{hello.group}-{hello.epoch}" / "fenced").write_text(why)

    def _ids(self, group: Group) -> str:
        pieces = [piece for flight in group.flights.values() if flight.batch for piece in flight.batch.pieces]
        return ", ".join(dict.fromkeys(_request(piece).id for piece in pieces))

    def _count_ranks(self) -> None:
        self.metrics.ranks_up.set(sum(group.hello.world for group in self.groups.values()))

    def _tick(self) -> None:
        """Canaries: a group that nothing else proves alive runs its own example."""
        self._ticker = self._loop.call_later(TICK, self._tick)
        for group in list(self.groups.values()):
            if not group.flights and not group.leaving and time.monotonic() - group.last_step >= IDLE:
                self._send(group, None)


def _request(piece: Piece) -> Request:
    assert isinstance(piece.job, Request)
    return piece.job


def _shards(batch: Batch | None, world: int) -> tuple[Form, list[list[int]], list[Buffer]]:
    """A batch as one payload frame a rank, with the lengths of the items in it."""
    if batch is None:
        return Form("json", "json"), [], []
    form = batch.form
    assert isinstance(form, Form)
    lengths: list[list[int]] = []
    payload: list[Buffer] = []
    pieces = iter(batch.pieces)
    job, start, stop = next(pieces)
    for share in wire.shares(batch.size, world):
        parts: list[tuple[codecs.Items, int, int]] = []
        wanted = len(share)
        while wanted:
            if start == stop:
                job, start, stop = next(pieces)
            count = min(wanted, stop - start)
            assert isinstance(job, Request)
            parts.append((job.cut.items, start, start + count))
            start += count
            wanted -= count
        frame, sizes = codecs.frame(parts, form.accepts)
        payload.append(frame)
        lengths.append(sizes)
    return form, lengths, payload


def _deal(
    pieces: Sequence[Piece], result: Result, payload: Sequence[Buffer], failures: dict[int, PhalanxError]
) -> None:
    """Each piece its results: the slices of the ranks' frames that hold its items."""
    returns = _request(pieces[0]).cut.form.returns
    starts: list[int] = []  # of each rank's items within the step
    total = 0
    for lengths in result.lengths:
        starts.append(total)
        total += len(lengths)
    places = [wire.offsets(lengths, returns) for lengths in result.lengths]
    at = 0
    for piece in pieces:
        request = _request(piece)
        first, last = at, at + piece.size
        at = last
        while first < last:
            r = bisect_right(starts, first) - 1
            low, high = first - starts[r], min(last - starts[r], len(result.lengths[r]))
            lengths = result.lengths[r][low:high]
            frame = memoryview(payload[r])[places[r][low] : places[r][high - 1] + lengths[-1]]
            rows = result.rows[r] if len(result.rows[r]) == 1 else result.rows[r][low:high]
            offset = piece.start + first - (last - piece.size)
            found = {offset + i: failures[first + i] for i in range(high - low) if first + i in failures}
            request.settle(Span(offset, lengths, frame, rows), found)
            first += high - low
