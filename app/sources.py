"""What `phalanx infer` reads: JSON lines, rows of arrays, files of folders, as streams of items; it sends nothing."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from app.chunks import MIB, Array
from workers.errors import InvalidItem, SettingsError

MAX_LINE = 64 * MIB  # bytes; a longer one is not held in memory


class Source(Protocol):
    """Items in a file or folder."""

    path: Path
    count: int
    mark: dict[str, Any]  # differs, as JSON, if the items do

    def items(self, start: int) -> Iterable[object] | Array:
        """From the one of this index on; an InvalidItem stands for one that cannot be sent."""
        ...

    def name(self, index: int) -> str | None:
        """Of the file that the item is."""
        ...


def source(path: Path) -> Source:
    """SettingsError: there is none, or nothing that is known."""
    try:
        if path.is_dir():
            return Folder(path)
        if path.suffix == ".npy":
            return Rows(path)
        if path.suffix not in (".jsonl", ".ndjson") and path.is_file():
            raise SettingsError(f"{path} is no .jsonl, no .npy and no folder of files")
        return Lines(path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None


class Lines:
    """A JSON value a line. Blank lines are no items."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = _mark(path)
        self.count = sum(1 for _ in _lines(path))

    def items(self, start: int) -> Iterable[object]:
        for number, line in itertools.islice(_lines(self.path), start, self.count):
            if line is None:
                yield InvalidItem(f"line {number} is longer than {MAX_LINE // MIB} MiB")
                continue
            try:
                orjson.loads(line)
                yield orjson.Fragment(line)  # as it was written: numbers keep all of their digits
            except orjson.JSONDecodeError as error:
                yield InvalidItem(f"line {number} is not JSON: {error}")

    def name(self, index: int) -> str | None:
        return None


class Rows:
    """An .npy file, whose first axis counts the items."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = _mark(path)
        try:
            self._array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise SettingsError(f"{path} is no npy file: {error}") from None
        if self._array.dtype.kind not in "biuf" or self._array.dtype.itemsize > 8 or not self._array.ndim:
            raise SettingsError(f"{path} holds {self._array.dtype}{list(self._array.shape)}: no array of numeric items")
        self.count = len(self._array)

    def items(self, start: int) -> Array:
        return self._array[start:]

    def name(self, index: int) -> str | None:
        return None


class Folder:
    """A folder's files, by name; neither those in folders in it, nor those whose names begin with a dot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os.scandir(path) as entries:
            files = sorted((one.name, one.stat()) for one in entries if one.is_file() and not one.name.startswith("."))
        self._names = [name for name, _ in files]
        self.count = len(files)
        digest = hashlib.blake2b(digest_size=16)
        for name, stat in files:
            digest.update(b"%b\0%d\0%d\0" % (os.fsencode(name), stat.st_size, stat.st_mtime_ns))
        self.mark = {"files": self.count, "digest": digest.hexdigest()}

    def items(self, start: int) -> Iterable[object]:
        return (self.path / name for name in itertools.islice(self._names, start, None))

    def name(self, index: int) -> str | None:
        return os.fsencode(self._names[index]).decode(errors="replace")


def _mark(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Each that is not blank, and its number; None for one that is too long."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line: bytes | None
            line = piece = file.readline(MAX_LINE)
            while len(piece) == MAX_LINE and not piece.endswith(b"\n"):
                line, piece = None, file.readline(MAX_LINE)
            if line is not None:
                if not line:
                    return
                line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if line != b"":
                yield number, line
