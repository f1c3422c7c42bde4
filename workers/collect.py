"""Every rank's part of a step, in order, on rank 0; it knows process groups, not what the parts mean.

Two rounds. In the first every rank all_gathers one frame of constant size: a header of 64 bytes and its pickle, if
that fits. Most steps end there. From the headers, which by then every rank holds, all decide alike whether there is
a second round, which takes the rest to rank 0. A pickle that grows long goes in blocks while it is still being made;
then its header says only that. Errors are data: nothing that a value does stops a rank from communicating.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from workers.encode import ALIGN, Buffer, Packed, aligned, laid_out, pack, segments, sentence, unpack, unpack_stream
from workers.errors import GroupError
from workers.rounds import Array, Transport, transport_for
from workers.stream import ERROR, MORE, OK, Broken, Incoming, Outgoing
from workers.wire import shares

__all__ = ["Collector", "Desynchronised", "Part", "shares"]

INLINE = 32 << 10
"""Bytes of a frame behind its header: the whole part; or the lengths of its segments, and the pickle if it fits."""
CAP = 1 << 30
"""Bytes one rank may send in a step, unless a collector is told otherwise."""

_MAGIC = b"PLX1"
_HEADER = struct.Struct("<4sBBHHHI6q")
_FRAME = _HEADER.size + INLINE


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a step: `items` items from `start` on. If `error` (a sentence) is set, `value` is None."""

    start: int
    items: int
    value: object
    error: str | None


class Desynchronised(GroupError):
    """The ranks are not in the same step, or not in the same group. Every rank raises it alike."""


class Collector:
    """The collect of a process group, of the default one if `group` is None, or of this process alone if there is none.

    Rank 0's own part is kept by reference and never encoded. On the other ranks the large buffers of a value are sent
    from where they lie: until `collect` returns, nobody may write to them. On rank 0 the arrays, tensors and
    memoryviews of a part, but for small ones, are views of its receive buffer, which is used again when the last of
    them is gone.
    """

    def __init__(
        self,
        *,
        epoch: int = 0,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        cap: int = CAP,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or transport_for(device, group)
        self._rank, self._world = self._transport.rank, self._transport.world
        self._epoch = epoch & 0xFFFFFFFF
        self._cap = cap
        self._mine = torch.zeros(_FRAME, dtype=torch.uint8)
        self._all = torch.zeros(_FRAME * self._world, dtype=torch.uint8)
        self._frame = self._mine.numpy().data
        self._frames = self._all.numpy().data
        self._filled = 0  # bytes of the frame that are not zero
        self._dead: GroupError | None = None

    def collect(self, value: object, *, step: int, start: int, items: int, size: int) -> list[Part] | None:
        """Give `value`, this rank's `items` of the step's `size` items from `start` on; rank 0 gets all parts.

        Every rank calls it exactly once a step, whatever happened to it. Rank 0 gets the parts in the order of the
        ranks, the others None. A value that cannot be encoded, sent or decoded is an error in its own part; parts
        that do not tile [0, size) are all errors. Raises GroupError where the group cannot go on, and ever after.
        """
        if self._dead:
            raise self._dead
        claim = _Claim(step, start, items, size)
        try:
            if not self._rank:
                return self._take(value, claim)
            self._give(value, claim)
            return None
        except BaseException as error:
            self._dead = error if isinstance(error, GroupError) else GroupError(f"step {step}: {sentence(error)}")
            if self._dead is error or not isinstance(error, Exception):
                raise
            raise self._dead from error

    def _give(self, value: object, claim: _Claim) -> None:
        """What the ranks do that send."""
        headers: list[_Header] = []
        outgoing = Outgoing(self._transport)

        def spill(head: Sequence[Buffer]) -> None:
            if not headers:
                self._write(MORE, Packed(), claim)
                headers.extend(self._first_round(claim))
            if gap := _gap(headers, claim.size):
                raise ValueError(gap)  # nobody wants the rest
            outgoing.send(head)

        status, packed = self._pack(value, spill if self._transport.streams else None)
        if not headers:
            sending = self._write(status, packed, claim)
            self._second_round(self._first_round(claim), claim, sending)
        elif not _gap(headers, claim.size):
            outgoing.close(status, packed.head, _arrays(segments(packed.body, ALIGN)))

    def _take(self, value: object, claim: _Claim) -> list[Part]:
        """What rank 0 does."""
        self._write(OK, Packed(), claim)
        headers = self._first_round(claim)
        buffers = self._second_round(headers, claim, [])
        if gap := _gap(headers, claim.size):
            return [Part(h.start, h.items, None, gap) for h in headers]
        incoming = [Incoming(self._transport, h.rank) if h.status == MORE else None for h in headers]
        own = Part(claim.start, claim.items, value, None)
        return [own, *map(self._read, headers[1:], buffers[1:], incoming[1:])]

    def _pack(self, value: object, spill: Callable[[Sequence[Buffer]], None] | None) -> tuple[int, Packed]:
        """Encode this rank's value, or the reason why it cannot be; a bad value does not raise."""
        try:
            return OK, pack(value, self._cap, spill)
        except (KeyboardInterrupt, GroupError):
            raise
        except BaseException as error:  # a SystemExit in some __reduce__ is no less an error of this part alone
            text = f"the result cannot be sent: {sentence(error)}"
            return ERROR, Packed([text.encode("utf-8", "replace")])

    def _write(self, status: int, packed: Packed, claim: _Claim) -> list[Array]:
        """Make this rank's frame; returns the segments left for the second round."""
        head, body = sum(map(len, packed.head)), segments(packed.body, ALIGN)
        total = head + sum(map(len, body))
        inline: Sequence[Buffer]
        if total <= INLINE:
            inline, sending = [*packed.head, *body], []
        elif _fits(head, len(body)):
            inline, sending = packed.head, body
        else:
            inline, sending = [], segments(packed.head, 1) + body
        lengths = [len(segment) for segment in sending]
        who = status, self._transport.kind, self._rank, self._world, len(lengths), self._epoch
        _HEADER.pack_into(self._frame, 0, _MAGIC, *who, *claim, head, total)
        at = _HEADER.size
        for piece in (struct.pack(f"<{len(lengths)}q", *lengths), *inline):
            self._frame[at : at + len(piece)] = piece
            at += len(piece)
        if at < self._filled:  # nothing of an earlier step travels
            self._frame[at : self._filled] = bytes(self._filled - at)
        self._filled = at
        return _arrays(sending)

    def _first_round(self, claim: _Claim) -> list[_Header]:
        """Exchange the frames and check every header: the same outcome on every rank."""
        self._transport.first(self._all, self._mine)
        headers = []
        for r in range(self._world):
            h = _Header._make((*_HEADER.unpack_from(self._frames, r * _FRAME), ()))
            lengths = struct.unpack_from(f"<{h.segments}q", self._frames, r * _FRAME + _HEADER.size)
            headers.append(h._replace(lengths=lengths) if lengths else h)
        shared = self._transport.kind, self._world, self._epoch, claim.step, claim.size
        for r, h in enumerate(headers):
            same = (h.kind, h.world, h.epoch, h.step, h.size) == shared
            whole = h.total - (h.head if _fits(h.head, h.segments) else 0)
            if h.magic != _MAGIC or h.rank != r or not same or (h.segments and sum(h.lengths) != whole):
                said = (f"{h.rank} of {h.world} at epoch {h.epoch}, step {h.step}, {h.size} items" for h in headers)
                raise Desynchronised(f"the ranks are not in the same step: {'; '.join(said)}")
        return headers

    def _second_round(self, headers: Sequence[_Header], claim: _Claim, sending: Sequence[Array]) -> list[memoryview]:
        """Move to rank 0 what did not fit the frames: whether, and how much of it, is the same on every rank."""
        places = [laid_out(h.lengths, 0 if _fits(h.head, h.segments) else h.head) for h in headers]
        if any(places) and not _gap(headers, claim.size):
            return self._transport.second(sending, places)
        return [memoryview(b"")] * self._world

    def _read(self, h: _Header, buffer: memoryview, incoming: Incoming | None) -> Part:
        """Decode one rank's part; does not raise for what is in it."""
        value = error = None
        try:
            if incoming:
                value = unpack_stream(incoming, incoming.buffers())
            elif _fits(h.head, h.segments):
                at = h.rank * _FRAME + _HEADER.size + 8 * h.segments
                head = self._frames[at : at + h.head]
                if h.status == ERROR:
                    raise Broken(str(head, "utf-8", "replace"))
                if not h.segments:  # a copy: the frame is used again, whoever looks at it
                    buffer = memoryview(bytearray(self._frames[at + h.head : at + h.total]))
                value = unpack(head, buffer)
            else:
                value = unpack(buffer[: h.head], buffer[aligned(h.head) :])
        except (KeyboardInterrupt, GroupError):
            raise
        except Broken as broken:
            error = str(broken)
        except BaseException as broken:
            error = f"the result cannot be read: {sentence(broken)}"
        if incoming:
            incoming.drain()
        return Part(h.start, h.items, value, error)


class _Claim(NamedTuple):
    """What a rank says of its part and of the step, in items."""

    step: int
    start: int
    items: int
    size: int


class _Header(NamedTuple):
    """What a rank says of its part: 64 bytes, and behind them the length of each segment of the second round.

    `head` and `total` (head and body) are bytes. A part without segments is in the frame as a whole.
    """

    magic: bytes
    status: int
    kind: int
    rank: int
    world: int
    segments: int
    epoch: int
    step: int
    start: int
    items: int
    size: int
    head: int
    total: int
    lengths: tuple[int, ...]


def _fits(head: int, n_segments: int) -> bool:
    """Whether a head travels in the frame. The same answer for the body's segments alone and for those of both."""
    return 8 * n_segments + head <= INLINE


def _gap(headers: Sequence[_Header], size: int) -> str | None:
    """Why the parts do not tile [0, size), if they do not."""
    at = 0
    for h in headers:
        if h.start != at or h.items < 0:
            break
        at += h.items
    else:
        if at == size:
            return None
    parts = ", ".join(f"[{h.start}, {h.start + h.items})" for h in headers)
    return f"the parts {parts} do not tile the step's {size} items"


def _arrays(segments: Sequence[Buffer]) -> list[Array]:
    return [np.frombuffer(segment, np.uint8) for segment in segments]
