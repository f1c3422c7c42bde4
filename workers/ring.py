"""Large bodies in memory that front end and ranks share; it knows no message, no request and no socket.

A file in the run directory, mapped by the front end, which alone writes, and by every rank of the host. A fresh mapping
a body would cost more than a socket does; here the same pages are used again and again.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

ALIGNMENT = 64  # bytes
GROWTH = 8 << 20  # bytes of memory claimed at a time, up to the ring's size


class Block:
    """A piece of the ring, free again when nothing refers to it any more.

    Whoever keeps a slice of `view` keeps the block too; a view alone does not hold it.
    """

    def __init__(self, ring: Ring, start: int, stop: int, size: int) -> None:
        self._owner = ring
        self._stop = stop
        self.ring = ring.name
        self.start = start
        self.view = ring.memory[start : start + size]

    @property
    def reachable(self) -> bool:
        """Whether a rank that starts now would find it: somebody may have removed the ring's file."""
        return self._owner.linked

    def __del__(self) -> None:
        self._owner.give_back(self.start, self._stop)


class Ring:
    """The front end's end: it owns the file at `path` and cuts blocks from it, lowest first, so that few pages serve.

    Memory is claimed before it is written to: on a full tmpfs a write would be a fatal signal.
    """

    def __init__(self, path: Path, size: int) -> None:
        """OSError where there can be no such file."""
        self._path = path
        self.name = path.name
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(self._fd, size)
        self.memory = memoryview(mmap.mmap(self._fd, size))
        self._claimed = 0
        self._holes = [(0, size)]  # in order, no two adjacent

    @property
    def linked(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def take(self, size: int) -> Block | None:
        """A block of `size` bytes, or None: the ring is full, or the tmpfs is."""
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        for i, (start, stop) in enumerate(self._holes):
            if stop - start >= padded and self._claim(start + padded):
                self._holes[i : i + 1] = [(start + padded, stop)] if start + padded < stop else []
                return Block(self, start, start + padded, size)
        return None

    def give_back(self, start: int, stop: int) -> None:
        """A block's own, at its end."""
        i = next((i for i, hole in enumerate(self._holes) if hole[0] > start), len(self._holes))
        if i < len(self._holes) and self._holes[i][0] == stop:
            stop = self._holes.pop(i)[1]
        if i and self._holes[i - 1][1] == start:
            start = self._holes.pop(i - 1)[0]
            i -= 1
        self._holes.insert(i, (start, stop))

    def close(self) -> None:
        """Remove the file; blocks and mappings live on as long as somebody has them."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _claim(self, stop: int) -> bool:
        if stop > self._claimed:
            wanted = min(-(-stop // GROWTH) * GROWTH, len(self.memory))
            try:
                os.posix_fallocate(self._fd, self._claimed, wanted - self._claimed)
            except OSError:
                return False
            self._claimed = wanted
        return True


class Reader:
    """A rank's end: read-only, of the latest ring it was told of."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._name = ""
        self._memory = memoryview(b"")

    def view(self, name: str, start: int, size: int) -> memoryview:
        """The bytes there. OSError where the ring has gone, and its front end with it."""
        if name != self._name:
            with (self._run_dir / name).open("rb") as file:
                self._memory = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            self._name = name
        return self._memory[start : start + size]


def open_ring(run_dir: Path, session: str, size: int) -> Ring:
    """For the holder of the run directory's lock, who removes what earlier holders have left. OSError: see `Ring`."""
    for stale in run_dir.glob("ring-*"):
        with suppress(OSError):
            stale.unlink()
    return Ring(run_dir / f"ring-{session}", size)
