"""What each rank puts into the collect, and the ranks' parts as one Result; it knows no group and no socket."""

from __future__ import annotations

from typing import NamedTuple

from workers import items
from workers.collect import Part
from workers.errors import InternalError
from workers.wire import Buffer, Failure, RankStats, Result, RowForm, Step


class Done(NamedTuple):
    """What one rank puts into the collect."""

    frame: Buffer
    lengths: list[int]
    failures: list[tuple[int, str, str]]
    rows: list[RowForm]
    stats: tuple[int, int, float, int, float]


def result(step: Step, parts: list[Part], collect_seconds: float) -> tuple[Result, list[Buffer]]:
    """The ranks' parts as one message. A part that did not come through is an error for each of its items."""
    lengths: list[list[int]] = []
    failures: list[Failure] = []
    rows: list[list[RowForm]] = []
    stats: list[RankStats] = []
    frames: list[Buffer] = []
    for part in parts:
        if part.error is not None:
            broken = dict.fromkeys(range(part.items), InternalError(part.error))
            encoded = items.encode([], dict(broken), part.items, step.form.returns)
            done = Done(
                encoded.frame,
                encoded.lengths,
                [(i, InternalError.type, part.error) for i in broken],
                encoded.rows,
                (len(stats), part.items, 0.0, 0, 0.0),
            )
        else:
            done = part.value  # type: ignore[assignment]  # what _forward of that rank made
        lengths.append(done.lengths)
        failures += [Failure(part.start + i, kind, detail) for i, kind, detail in done.failures]
        rows.append(done.rows)
        stats.append(RankStats(*done.stats))
        frames.append(done.frame)
    return Result(step.session, step.epoch, step.step, lengths, failures, rows, stats, collect_seconds), frames
