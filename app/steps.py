"""A batch as the frames of a step, and a step's results dealt back to its requests; it knows no socket and no group."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app import codecs, outputs
from app.batcher import Batch, Job, Piece
from app.codecs import Cut
from app.outputs import Span
from app.sound import result_fault
from workers import wire
from workers.errors import InternalError, PhalanxError, RequestError, by_type
from workers.wire import Buffer, Form, Place, RankStats, Result

Failures = dict[int, PhalanxError]


class Ran(NamedTuple):
    """A step that some of a request's items were in; times are time.monotonic(), which is one for a host."""

    sent: float
    ended: float
    items: int
    stats: list[RankStats]
    collect_seconds: float
    group: str


@dataclass(eq=False)
class Request(Job):
    """One admitted request: its items, and the results as they come in."""

    cut: Cut = field(kw_only=True)
    id: str = field(kw_only=True)
    future: asyncio.Future[None] = field(kw_only=True)
    model: str | None = field(kw_only=True, default=None)  # by the name that the client gave, if it did
    timer: asyncio.TimerHandle | None = None
    refused: str | None = None  # the error's type, where no item has a result and that is the answer
    progress: asyncio.Event | None = None  # set with every news of it, for an answer that is written bit by bit
    answered: int = 0
    spans: list[Span] = field(default_factory=list)
    failures: Failures = field(default_factory=dict)
    started: float = 0.0  # when its first items went into a step
    forward: float = 0.0  # seconds, of the slowest rank of each step
    collect: float = 0.0  # seconds
    ran: list[Ran] = field(default_factory=list)

    def settle(self, span: Span, failures: Failures) -> None:
        """Take in results; the future is done with the last of them."""
        self.spans.append(span)
        self.failures.update(failures)
        self.answered += len(span.lengths)
        if self.progress is not None:
            self.progress.set()
        if self.answered == self.size:
            self.spans.sort(key=lambda one: one.start)
            self.end(next((error for error in self.failures.values() if isinstance(error, RequestError)), None))

    def end(self, error: Exception | None = None) -> None:
        """Answer it, if nobody has yet: with its results, or with `error`."""
        if self.timer is not None:
            self.timer.cancel()
        self.live = False
        if not self.future.done():
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)
        if self.progress is not None:
            self.progress.set()


def request(piece: Piece) -> Request:
    assert isinstance(piece.job, Request)
    return piece.job


def requests(batch: Batch) -> list[Request]:
    """Those with items in the batch, each once."""
    return list({id(piece.job): request(piece) for piece in batch.pieces}.values())


def shards(
    batch: Batch, world: int, inline: bool = False
) -> tuple[Form, list[list[int]], list[Place | None], list[Buffer]]:
    """A batch as one payload a rank, with the lengths of the items in it: a place in the ring, or else a frame.

    `inline` are those of ranks that do not see the ring.
    """
    form = request(batch.pieces[0]).cut.form
    lengths: list[list[int]] = []
    places: list[Place | None] = []
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
        place = parts[0][0].place(*parts[0][1:]) if len(parts) == 1 and not inline else None
        places.append(place)
        payload.append(b"" if place else frame)
        lengths.append(sizes)
    return form, lengths, places, payload


def fault(batch: Batch | None, result: Result, payload: Sequence[Buffer], world: int) -> str | None:
    """What of a result cannot be that of a batch, or of a canary; None where nothing is wrong."""
    returns = request(batch.pieces[0]).cut.form.returns if batch else "json"
    return result_fault(result, payload, batch.size if batch else None, returns, world)


def deal(batch: Batch, result: Result, payload: Sequence[Buffer], group: str, world: int) -> None:
    """Each piece its results: the slices of the ranks' frames that hold its items.

    An answer that does not fit the step is an InternalError for all of them: never somebody else's results.
    """
    counts = [len(lengths) for lengths in result.lengths]
    if counts != [len(share) for share in wire.shares(batch.size, world)] or len(payload) != world:
        fail(batch.pieces, InternalError(f"the group answered {counts} items for a step of {batch.size}"))
        return
    returns = request(batch.pieces[0]).cut.form.returns
    failures: Failures = {one.index: by_type(one.type)(one.detail) for one in result.failures}
    starts = [share.start for share in wire.shares(batch.size, world)]
    names = [rank_name(group, rank) for rank in range(world)]
    places = [wire.offsets(lengths, returns) for lengths in result.lengths]
    first = 0  # item of the step
    for piece in batch.pieces:
        at = piece.start  # item of the request
        while at < piece.stop:
            rank = bisect_right(starts, first) - 1
            low = first - starts[rank]
            high = min(low + piece.stop - at, counts[rank])
            lengths = result.lengths[rank][low:high]
            frame = memoryview(payload[rank])[places[rank][low] : places[rank][high - 1] + lengths[-1]]
            rows = result.rows[rank] if len(result.rows[rank]) == 1 else result.rows[rank][low:high]
            failed = {at + i: failures[first + i] for i in range(high - low) if first + i in failures}
            request(piece).settle(Span(at, lengths, frame, rows, names[rank]), failed)
            first += high - low
            at += high - low


def rank_name(group: str, rank: int) -> str:
    """As clients read it: `0` is rank 0 of group 0, `1/0` that of group 1."""
    return f"{rank}" if group == "0" else f"{group}/{rank}"


def fail(pieces: Sequence[Piece], error: PhalanxError) -> None:
    """`error` for each of their items."""
    for piece in pieces:
        span = outputs.null_span(piece.start, piece.size, request(piece).cut.form.returns)
        request(piece).settle(span, dict.fromkeys(range(piece.start, piece.stop), error))
