"""Items as a client sends them: cut into chunks, one a request, and encoded; it knows no answers and no connections."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson

from workers.errors import InvalidItem, ItemError

MIB = 2**20


@dataclass(frozen=True)
class File:
    """An item that is sent as a file: a part of multipart/form-data."""

    name: str
    data: bytes = field(repr=False)


Array: TypeAlias = np.ndarray[Any, Any]
Parts: TypeAlias = list[bytes] | list[File] | Array  # JSON values, files, or an array whose first axis counts the items


@dataclass
class Chunk:
    """Items of one request, and why others among them cannot be sent, by their place in the chunk."""

    parts: Parts = field(default_factory=list)
    failures: dict[int, ItemError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.parts) + len(self.failures)


class Cutter:
    """Takes items one by one and gives them back in chunks, in order, as encoded as they are sent."""

    def __init__(self, most_items: int, most_bytes: int) -> None:
        self._most_items = most_items
        self._most_bytes = most_bytes
        self._chunk = Chunk()
        self._bytes = 0

    def add(self, item: object) -> Iterator[Chunk]:
        """The chunks that are full now. An item that has no form, or is an ItemError, takes its place as a failure."""
        try:
            part = _part(item)
        except ItemError as error:
            self._chunk.failures[len(self._chunk)] = error
        else:
            size = len(part.data if isinstance(part, File) else part)
            parts: list[Any] = self._chunk.parts  # type: ignore[assignment]  # an array does not come item by item
            if parts and (type(part) is not type(parts[0]) or self._bytes + size > self._most_bytes):
                yield from self.rest()
                parts = self._chunk.parts  # type: ignore[assignment]
            parts.append(part)
            self._bytes += size
        if len(self._chunk) >= self._most_items:
            yield from self.rest()

    def rest(self) -> Iterator[Chunk]:
        """What is left, at the end."""
        full, self._chunk, self._bytes = self._chunk, Chunk(), 0
        if len(full):
            yield full


def cut(items: Iterable[object] | Array, most_items: int, most_bytes: int) -> Iterator[Chunk]:
    """Lazily. A chunk holds an item even if that is over `most_bytes`; a file that is a path is read here.

    TypeError: `items` is one item, or an array of what is no number.
    """
    if isinstance(items, np.ndarray):
        if items.dtype.kind not in "biuf" or items.dtype.itemsize > 8 or not items.ndim:
            raise TypeError(
                f"an array {items.dtype}{list(items.shape)} is not sent: numbers, the first axis counts items"
            )
        step = max(1, min(most_items, most_bytes // max(1, items.nbytes // max(1, len(items)))))
        for start in range(0, max(1, len(items)), step):  # an empty array is sent too: its answer has a form
            yield Chunk(items[start : start + step])
        return
    if isinstance(items, str | bytes | os.PathLike | Mapping | File):
        raise TypeError(f"{type(items).__name__} is one item: send a list of items")
    cutter = Cutter(most_items, most_bytes)
    for item in items:
        yield from cutter.add(item)
    yield from cutter.rest()


def body(parts: Parts, parameters: bytes) -> dict[str, Any]:
    """Arguments of an httpx request that sends them; `parameters` is a JSON object, or nothing."""
    if isinstance(parts, np.ndarray):
        return {"content": _npy(parts), "headers": {"content-type": "application/x-npy"}}
    if parts and isinstance(parts[0], File):
        files = [("file", (part.name, part.data)) for part in parts if isinstance(part, File)]
        return {"files": files, "data": {"parameters": parameters.decode()} if parameters else {}, "headers": {}}
    inputs = b",".join(part for part in parts if isinstance(part, bytes))
    members = b'"inputs":[%b]' % inputs + (b',"parameters":%b' % parameters if parameters else b"")
    return {"content": b"{%b}" % members, "headers": {"content-type": "application/json"}}


def encode(value: object) -> bytes:
    """JSON of a value, arrays and tensors in it included. TypeError: it has none; ValueError: it holds NaN."""
    text = orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in text:  # which orjson writes for NaN too
        try:
            json.dumps(value, default=_plain, allow_nan=False)
        except ValueError:
            raise ValueError("NaN and infinity have no JSON; send a NumPy array") from None
    return text


def _plain(other: Any) -> Any:
    """What JSON writers do not know; a TypeError or AttributeError for what has no list."""
    return asdict(other) if is_dataclass(other) and not isinstance(other, type) else _tolist(other)


def _tolist(other: Any) -> Any:
    if not hasattr(other, "tolist"):
        raise TypeError(f"{type(other).__name__} has no JSON")
    return other.tolist()


def _part(item: object) -> bytes | File:
    if isinstance(item, ItemError):
        raise item
    if isinstance(item, File):
        if not item.name:
            raise InvalidItem("it cannot be sent: a file has a name")
        return item
    try:
        if isinstance(item, os.PathLike):
            path = Path(item)
            return File(os.fsencode(path.name).decode(errors="replace"), path.read_bytes())
        return encode(item)
    except (OSError, TypeError, ValueError) as error:
        raise InvalidItem(f"it cannot be sent: {error}") from error


def _npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
