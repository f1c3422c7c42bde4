"""A head that is sent while it is being made and read while it arrives; it knows transports, not what is in a head.

What travels is blocks, each after a notice of constant size that says how long it is and whether it is the last. The
last one ends with the lengths of the body's segments, which follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from workers.encode import Buffer, buffers, laid_out, sentence
from workers.errors import GroupError
from workers.rounds import Array, Pending, Transport

OK, ERROR, MORE = range(3)
"""How a head goes on: it is complete; a sentence in its place says why there is none; in blocks, or in more of them."""

_NOTICE = 3 * 8  # three int64: OK, ERROR or MORE; bytes of the block; segments of the body


class Outgoing:
    """A rank's end. Nothing is waited for before `close`: rank 0 may still be reading what another rank sends."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: list[Pending] = []

    def send(self, head: Sequence[Buffer], status: int = MORE, body: Sequence[Array] = ()) -> None:
        lengths = np.array([len(segment) for segment in body], np.int64)
        block = np.frombuffer(bytearray().join([*head, lengths.data]), np.uint8)
        notice = np.array([status, len(block), len(body)], np.int64).view(np.uint8)
        try:
            self._pending.append(self._transport.send([notice, block, *body]))
        except Exception as error:  # not the value's fault, though it happens while the value is being encoded
            raise GroupError(f"a block could not be sent: {sentence(error)}") from error

    def close(self, status: int, head: Sequence[Buffer], body: Sequence[Array]) -> None:
        self.send(head, status, body)
        for pending in self._pending:
            pending.wait()


class Broken(Exception):
    """The rank could not go on with the head; says why."""


class Incoming:
    """Rank 0's end: a file for an unpickler. Whatever comes of it, `drain` it."""

    def __init__(self, transport: Transport, rank: int) -> None:
        self._transport = transport
        self._rank = rank
        self._notice = transport.receive(rank, [range(_NOTICE)])
        self._blocks: list[memoryview] = []
        self._last: tuple[int, memoryview, memoryview] | None = None  # status, block, body

    def read(self, n: int) -> bytes:
        got = bytearray(n)
        self.readinto(got)
        return bytes(got)

    def readinto(self, target: bytearray | memoryview) -> int:
        at = 0
        while at < len(target):
            while not self._blocks:
                if self._last:
                    raise Broken(str(self._last[1], "utf-8", "replace"))
                self._next()
            block = self._blocks[0][: len(target) - at]
            target[at : at + len(block)] = block
            at += len(block)
            self._blocks[:1] = [rest] if (rest := self._blocks[0][len(block) :]) else []
        return at

    def readline(self) -> bytes:
        raise NotImplementedError("there are no lines in a pickle of protocol 5")

    def buffers(self) -> Iterator[memoryview]:
        """The buffers of the body, all of which has arrived when the first is asked for."""
        status, block, body = self.drain()
        if status == ERROR:
            raise Broken(str(block, "utf-8", "replace"))
        yield from buffers(block, body)

    def drain(self) -> tuple[int, memoryview, memoryview]:
        """Receive what is still under way; returns the last status and block, and the body."""
        while not self._last:
            self._next()
        return self._last

    def _next(self) -> None:
        try:
            status, length, n_segments = np.frombuffer(_arrived(self._notice), np.int64).tolist()
            block = self._transport.receive(self._rank, [range(length)])
            if status == MORE:
                self._notice = self._transport.receive(self._rank, [range(_NOTICE)])
                self._blocks.append(_arrived(block))
                return
            end = length - 8 * n_segments
            lengths = np.frombuffer(_arrived(block)[end:], np.int64).tolist()
            body = _arrived(self._transport.receive(self._rank, laid_out(lengths)))
        except Exception as error:  # not the value's fault, though it happens while the value is being decoded
            raise GroupError(f"a block of rank {self._rank} could not be received: {sentence(error)}") from error
        self._last = status, block[0][:end], body
        if status == OK:
            self._blocks.append(block[0][:end])


def _arrived(coming: tuple[memoryview, Pending]) -> memoryview:
    buffer, pending = coming
    pending.wait()
    return buffer
