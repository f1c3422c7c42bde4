"""Content types, in one table, and a body cut into items; it parses none of them, see `workers.items`.

An npy body is laid out as numpy.lib.format describes (format versions 1.0 to 3.0).
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np

from workers.errors import (
    InvalidItem,
    MalformedBody,
    NotAcceptable,
    PhalanxError,
    TooLarge,
    UnsupportedMediaType,
)
from workers.ring import Block
from workers.wire import Buffer, Encoding, Form, Place

Media = Literal["json", "npy", "ndjson", "multipart"]
MEDIA_TYPES: dict[Media, str] = {
    "json": "application/json",
    "npy": "application/x-npy",
    "ndjson": "application/x-ndjson",
    "multipart": "multipart/form-data",
}
ANSWERS: tuple[Media, ...] = ("json", "npy", "ndjson")
MAX_NPY_HEADER = 4096  # bytes
MAX_NPY_AXES = 32  # NumPy 1 has no more
MAX_NPY_SIZE = 2**60 - 1  # numbers: NumPy counts bytes in 63 bits, and a number has up to eight of them


class Items(Protocol):
    """The items of one request, as slices of its body."""

    def __len__(self) -> int: ...

    def slices(self, start: int, stop: int) -> Sequence[Buffer]: ...

    def lengths(self, start: int, stop: int) -> list[int]: ...

    def place(self, start: int, stop: int) -> Place | None:
        """Where the slices stand in the ring, end to end; None where they do not."""
        ...


@dataclass(frozen=True)
class Cut:
    """A body, cut."""

    items: Items
    form: Form
    index: list[int] | None = None  # each item's place in the body, where there are broken ones between them
    broken: dict[int, PhalanxError] = field(default_factory=dict)  # items that never were any, by place


# ---- content negotiation


@functools.lru_cache(maxsize=64)
def request_media(content_type: bytes | None) -> Media:
    """UnsupportedMediaType for a content type that is not in the table."""
    media, _, parameters = (content_type or b"").decode("latin-1").lower().partition(";")
    for known, name in MEDIA_TYPES.items():
        if media.strip() == name:
            if "json" in known and "charset" in parameters and not re.search(r"charset=\"?utf-?8\b", parameters):
                raise UnsupportedMediaType(f"JSON is UTF-8, not {parameters.strip()}")
            return known
    got = f"the content type {media.strip()!r}" if media.strip() else "a body without Content-Type"
    raise UnsupportedMediaType(f"{got} is not supported; send {' or '.join(MEDIA_TYPES.values())}")


@functools.lru_cache(maxsize=64)  # clients of a kind send one Accept, and to read it takes a tenth of a request's time
def answer_media(accept: bytes | None, request: Media) -> Media:
    """The form that the client likes best; where it likes them alike, the request's own or else JSON.

    NotAcceptable: it likes none.

    As RFC 9110 says in 12.5.1: of the ranges that hold a media type, the most specific one says how much it is liked.
    """
    likings: dict[str, float] = {}
    for choice in filter(None, map(str.strip, (accept or b"*/*").decode("latin-1").lower().split(","))):
        media, *parameters = (part.strip() for part in choice.split(";"))
        quality = next((one[2:] for one in parameters if one.startswith("q=")), "1")
        if not re.fullmatch(r"0(\.\d*)?|1(\.0*)?", quality):
            raise NotAcceptable(f"Accept: {choice!r} has a q that is no number from 0 to 1")
        likings[media] = max(float(quality), likings.get(media, 0.0))

    def liking(answer: Media) -> tuple[float, bool]:
        ranges = (MEDIA_TYPES[answer], "application/*", "*/*")
        return next((likings[media] for media in ranges if media in likings), 0.0), answer == request

    best = max(ANSWERS, key=liking)
    if not liking(best)[0]:
        raise NotAcceptable(f"no form in Accept is one of {', '.join(MEDIA_TYPES[answer] for answer in ANSWERS)}")
    return best


# ---- bodies to items


def cut(body: Buffer, accepts: Media, returns: Encoding, block: Block | None = None) -> Cut:
    """Of JSON or npy. MalformedBody, with the place, for a body that is not what its content type promises.

    `block` is what of the ring the body fills, if it does.
    """
    return _cut_json(body, returns) if accepts == "json" else _cut_npy(body, returns, block)


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[msgspec.Raw]
    parameters: dict[str, msgspec.Raw] | None = None


_body = msgspec.json.Decoder(_Body)


class _JsonItems:
    def __init__(self, raws: list[msgspec.Raw]) -> None:
        self._raws = raws

    def __len__(self) -> int:
        return len(self._raws)

    def slices(self, start: int, stop: int) -> Sequence[Buffer]:
        return self._raws[start:stop]

    def lengths(self, start: int, stop: int) -> list[int]:
        return [len(memoryview(raw)) for raw in self._raws[start:stop]]

    def place(self, start: int, stop: int) -> Place | None:
        return None


def _cut_json(body: Buffer, returns: Encoding) -> Cut:
    if not body:
        raise MalformedBody('the body is empty; send {"inputs": [item, ...]}')
    try:
        if not bytes(body).isascii():
            str(body, "utf-8")  # cutting does not look into strings
        parsed = _body.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedBody(f'{str(error)[:500]}; send {{"inputs": [item, ...], "parameters": {{...}}}}') from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        packed = bytes(body[:2]) == b"\x1f\x8b"
        raise MalformedBody("it is gzip, which Content-Encoding must say" if packed else str(error)) from error
    except RecursionError as error:
        raise MalformedBody("the body is nested too deep") from error
    parameters = msgspec.json.encode(parsed.parameters, order="sorted") if parsed.parameters else b""
    return Cut(_JsonItems(parsed.inputs), Form("json", returns, parameters))


_any = msgspec.json.Decoder(msgspec.Raw)


def cut_lines(text: bytes, returns: Encoding, max_items: int) -> Cut:
    """Each line is an item; one that is no JSON is broken, and blank ones are none. TooLarge: too many lines."""
    if text.count(b"\n") > max_items:  # before anything is made of them
        raise TooLarge(f"the lines are over the limit of {max_items} items in one request")
    ascii_only = text.isascii()
    raws: list[msgspec.Raw] = []
    index: list[int] = []
    broken: dict[int, PhalanxError] = {}
    for number, line in enumerate(filter(None, map(bytes.strip, text.split(b"\n")))):
        try:
            if not ascii_only:
                line.decode()  # cutting does not look into strings
            raws.append(_any.decode(line))
            index.append(number)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            broken[number] = InvalidItem(f"the line is not JSON: {str(error)[:500]}")
    return Cut(_JsonItems(raws), Form("json", returns), index if broken else None, broken)


class Rows:
    """Items of equal length, end to end."""

    def __init__(self, rows: memoryview, count: int, length: int, block: Block | None, at: int) -> None:
        """`rows` stand `at` so many bytes of `block`, which lives as long as they are wanted."""
        self._rows = rows
        self._block = block
        self._at = at
        self._count = count
        self._length = length

    def __len__(self) -> int:
        return self._count

    def slices(self, start: int, stop: int) -> Sequence[Buffer]:
        return [self._rows[start * self._length : stop * self._length]]

    def lengths(self, start: int, stop: int) -> list[int]:
        return [self._length] * (stop - start)

    def place(self, start: int, stop: int) -> Place | None:
        if self._block is None or not self._block.reachable:
            return None
        at = self._block.start + self._at
        return Place(self._block.ring, at + start * self._length, (stop - start) * self._length)


class Columns(Rows):
    """The rows of an array that lies in Fortran order: each slice of them is a copy, which may take long."""

    def __init__(self, array: np.ndarray, length: int, block: Block | None) -> None:
        """`block` is what the array lies in, if it does."""
        super().__init__(memoryview(b""), len(array), length, block, 0)
        self._array = array

    def in_rows(self) -> Rows:
        """One copy of them all; the GIL is free meanwhile."""
        return Rows(self._copied(0, self._count), self._count, self._length, None, 0)

    def slices(self, start: int, stop: int) -> Sequence[Buffer]:
        return [self._copied(start, stop)]

    def _copied(self, start: int, stop: int) -> memoryview:
        return np.ascontiguousarray(self._array[start:stop]).reshape(-1).view(np.uint8).data

    def place(self, start: int, stop: int) -> Place | None:
        return None


def _cut_npy(body: Buffer, returns: Encoding, block: Block | None) -> Cut:
    head = io.BytesIO(body[: MAX_NPY_HEADER + 16])
    try:
        version = np.lib.format.read_magic(head)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(head, MAX_NPY_HEADER)
        elif version in ((2, 0), (3, 0)):  # they differ in the names of fields only
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(head, MAX_NPY_HEADER)
        else:
            raise ValueError(f"format version {version[0]}.{version[1]} is not known")
    except Exception as error:  # numpy raises whatever a hostile header brings about
        raise MalformedBody(f"the npy header cannot be read: {str(error)[:200]}") from error
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise MalformedBody(f"npy arrays of dtype {str(dtype)[:200]} are not taken; send numbers or bools")
    if not shape:
        raise MalformedBody("the npy array has no axis; the first axis counts the items")
    if len(shape) > MAX_NPY_AXES or min(shape) < 0 or math.prod(size or 1 for size in shape) > MAX_NPY_SIZE:
        raise MalformedBody(f"the npy header has a shape that no array has: {str(shape)[:200]}")
    shape = tuple(map(int, shape))  # True counts as a size
    data = memoryview(body)[head.tell() :]
    length = math.prod(shape[1:]) * dtype.itemsize
    if len(data) != shape[0] * length:
        raise MalformedBody(f"an npy array {dtype}{list(shape)} has {shape[0] * length} bytes, the body {len(data)}")
    if fortran and len(shape) > 1:
        rows: Rows = Columns(np.frombuffer(data, dtype).reshape(shape, order="F"), length, block)
    else:
        rows = Rows(data, shape[0], length, block, head.tell())
    return Cut(rows, Form("npy", returns, b"", (dtype.str, shape[1:])))


def frame(pieces: Sequence[tuple[Items, int, int]], encoding: str) -> tuple[Buffer, list[int]]:
    """Items `start` to `stop` of each, as one payload frame, and their lengths."""
    slices = [one for items, start, stop in pieces for one in items.slices(start, stop)]
    lengths = [length for items, start, stop in pieces for length in items.lengths(start, stop)]
    if len(slices) == 1:
        return slices[0], lengths
    return (b"," if encoding == "json" else b"").join(slices), lengths
