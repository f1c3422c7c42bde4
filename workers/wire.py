"""The messages between the front end and the ranks, and their frames; it opens no socket and looks into no item.

A message is one msgpack frame, followed by payload frames: for a `Step` and a `Result` one a rank, for a `Shard` one.
In a payload frame of JSON items the items stand comma-separated, in one of npy rows they stand end to end; `lengths`
holds the bytes of each item without commas. A file stands as the length of its name in two bytes, little-endian, its
name in UTF-8 and its bytes, end to end with the others. A failed item of a JSON result stands as `null`, one of an npy
result as no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from workers.errors import GroupError

WIRE = 4  # raised with every change to this file that the other side could misread
HIGH_WATER_MARK = 8  # messages a socket holds for a peer
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 2000

Buffer: TypeAlias = bytes | bytearray | memoryview
Encoding: TypeAlias = Literal["json", "npy"]  # of results, and with "files" of items
RowForm: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and shape of one npy row


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Form(_Message, frozen=True, array_like=True):
    """How the items of a step are written; only requests of the same form share a step."""

    accepts: Encoding | Literal["files"]
    returns: Encoding
    parameters: bytes = b""  # the request's parameters as JSON, or nothing
    row: RowForm | None = None  # of npy items


class Place(_Message, frozen=True, array_like=True):
    """Bytes in shared memory: see `workers.ring`."""

    ring: str  # file in the run directory
    start: int
    size: int


class Step(_Message, frozen=True, array_like=True, tag=True):
    """Front end to rank 0: run these items. One payload frame a rank."""

    session: str
    epoch: int
    step: int
    form: Form
    lengths: list[list[int]]  # a rank, an item: bytes
    places: list[Place | None]  # a rank: where its payload is, if it is not in its frame
    timeout: float  # seconds until the group fells itself
    canary: bool = False  # no items: each rank runs the model's own example


class Shard(_Message, frozen=True, array_like=True, tag=True):
    """Rank 0 to one rank: its part of a step, items `start` to `start + len(lengths)` of `size`. One payload frame."""

    step: int  # counts within the group's life, whichever session it comes from
    form: Form
    start: int
    size: int
    lengths: list[int]
    timeout: float
    canary: bool = False
    place: Place | None = None


class Failure(_Message, frozen=True, array_like=True):
    """Why one item has no result."""

    index: int  # within the step
    type: str  # of workers.errors
    detail: str


class RankStats(_Message, frozen=True, array_like=True):
    """What one rank spent on one step."""

    rank: int
    items: int
    forward_seconds: float
    memory_bytes: int  # allocated on its device; on the CPU, resident
    began: float  # time.monotonic() of rank 0's host; 0 for ranks of other hosts, whose clock is another


class Result(_Message, frozen=True, array_like=True, tag=True):
    """Rank 0 to front end: a step's results, in order. One payload frame a rank."""

    session: str
    epoch: int
    step: int
    lengths: list[list[int]]  # a rank, an item: bytes
    failures: list[Failure]
    rows: list[list[RowForm]]  # a rank: the form of every npy row, or one that holds for all
    stats: list[RankStats]
    collect_seconds: float


class ModelInfo(_Message, frozen=True, array_like=True):
    """What the front end tells clients of the model."""

    name: str
    max_batch_size: int
    dtype: str | None  # of its TensorSpec
    shape: tuple[int | None, ...] | None
    example: bytes | None  # as JSON, if it has one that JSON can hold
    has_example: bool


class Hello(_Message, frozen=True, array_like=True, tag=True):
    """Rank 0 to front end on every connect: this group takes steps."""

    wire: int
    group: str
    epoch: int
    world: int
    model: ModelInfo
    devices: list[str]
    hosts: list[str]
    pids: list[int]
    warmup_seconds: float
    held: int = 0  # steps begun and not answered: of an earlier session, if this one is new


class Leaving(_Message, frozen=True, array_like=True, tag=True):
    """Rank 0 to front end: send no further step; what was sent is finished."""

    epoch: int


class Goodbye(_Message, frozen=True, array_like=True, tag=True):
    """The answer to Leaving, and rank 0's word to the ranks: nothing comes after this."""


class Ping(_Message, frozen=True, array_like=True, tag=True):
    """Front end to rank 0, to learn whether it can be reached; it has no answer."""


class Watching(_Message, frozen=True, array_like=True, tag=True):
    """A launcher on another host to the front end, on every connect and with every epoch: this one runs here."""

    wire: int
    group: str
    epoch: int


class Fence(_Message, frozen=True, array_like=True, tag=True):
    """Front end to such a launcher: kill this epoch, unless there is no `why`; these requests were in flight."""

    epoch: int
    why: str
    in_flight: str


class Died(_Message, frozen=True, array_like=True, tag=True):
    """Such a launcher to the front end: an epoch has died."""

    group: str
    epoch: int
    kind: str  # of `workers.epoch.Death`
    text: str


Message: TypeAlias = Watching | Fence | Died | Step | Shard | Result | Hello | Leaving | Goodbye | Ping
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of a message."""
    return [_encoder.encode(message), *payload]


def decode(frames: Sequence[Buffer]) -> tuple[Message, list[Buffer]]:
    """A message and its payload frames; GroupError for anything else: the peer speaks another language."""
    try:
        return _decoder.decode(frames[0]), list(frames[1:])
    except (msgspec.MsgspecError, IndexError) as error:
        raise GroupError(f"a message that wire version {WIRE} cannot read: {error}") from error


def shares(n: int, world: int) -> list[range]:
    """`n` items over `world` ranks: contiguous, in order, sizes that differ by at most one, the larger ones first."""
    few, more = divmod(n, world)
    return [range(r * few + min(r, more), (r + 1) * few + min(r + 1, more)) for r in range(world)]


def offsets(lengths: Sequence[int], encoding: str) -> list[int]:
    """Where each item of a payload frame begins."""
    gap = 1 if encoding == "json" else 0
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length + gap
    return starts
