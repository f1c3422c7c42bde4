"""How bytes get from rank to rank and the receive buffers they land in; knows nothing of headers, parts or pickle."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

KEEP = 512 << 20
"""Bytes of receive buffers that rank 0 holds on to for later steps."""
CHUNK = 8 << 20
"""Bytes a rank gives to one all_gather over NCCL; the device holds `1 + world` times as many."""

Array = np.ndarray[Any, np.dtype[np.uint8]]
Places = Sequence[range]
"""Where each segment of one rank lies in that rank's receive buffer."""

# torch 2.13 renamed it, and warns at each call by the old name
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    def wait(self) -> Any: ...


class Transport(Protocol):
    """What a collect needs of a process group. Raises what the group raises: it is dead then.

    `kind` is what the transports of all ranks must have in common, `streams` whether heads may be sent while they are
    being made. What a rank sends to rank 0 arrives in order.
    """

    rank: int
    world: int
    kind: int
    streams: bool

    def first(self, frames: torch.Tensor, frame: torch.Tensor) -> None:
        """Every rank's `frame` on every rank, one after the other in `frames`: sizes equal on all ranks."""

    def second(self, sending: Sequence[Array], places: Sequence[Places]) -> list[memoryview]:
        """The segments of every rank but rank 0, to rank 0.

        `sending` are this rank's, `places` those of all ranks, the same on every rank. Rank 0 gets a receive buffer
        a rank (empty where nothing was sent, as for itself), the others nothing.
        """

    def send(self, sending: Sequence[Array]) -> Pending:
        """Begin to send segments to rank 0, which receives as many of the same sizes."""

    def receive(self, rank: int, places: Places) -> tuple[memoryview, Pending]:
        """Begin to receive segments from `rank`: the buffer that they will be in."""


class Gloo:
    """A group's CPU side, or this process alone where there is none.

    In the second round each segment goes straight from where it lies to where it belongs, at its exact size: that costs
    a fraction of what gloo's all_gather of it would.
    """

    kind = 0
    streams = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group` holds all ranks; None is the default one."""
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._group = group
        self._pool = Pool(KEEP, lambda n: np.empty(n, np.uint8))

    def first(self, frames: torch.Tensor, frame: torch.Tensor) -> None:
        if self.world > 1:
            all_gather(frames, frame, group=self._group)
        else:
            frames.copy_(frame)

    def second(self, sending: Sequence[Array], places: Sequence[Places]) -> list[memoryview]:
        if self.rank:
            self.send(sending).wait()
            return []
        coming = [self.receive(r, p) for r, p in enumerate(places)]
        for _, pending in coming:
            pending.wait()
        return [buffer for buffer, _ in coming]

    def send(self, sending: Sequence[Array]) -> Pending:
        return _Works([dist.isend(_tensor(segment), 0, self._group) for segment in sending])

    def receive(self, rank: int, places: Places) -> tuple[memoryview, Pending]:
        buffer = self._pool.take(extent(places))
        whole = torch.from_numpy(np.asarray(buffer))
        return buffer, _Works([dist.irecv(whole[p.start : p.stop], rank, self._group) for p in places])


class Nccl(Gloo):
    """The first round as on gloo, so that small results never touch the device; the second over NCCL, in all_gathers
    of equal chunks through pinned memory and a stream of its own.

    Every buffer of the device is made with it, so that nothing is allocated there in a step: all ranks make theirs at
    the same time. Only host memory is sent, so the stream need not wait for the model's: whoever encoded a tensor of
    the device has waited for it already.
    """

    kind = 1
    streams = False  # every rank takes part in the second round, so every rank must know its sizes before

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None, chunk: int = CHUNK) -> None:
        super().__init__(group)
        self._cuda = device.type == "cuda"  # without it, the same steps on the CPU, for tests
        self._chunk = chunk
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._slots = [torch.empty(chunk, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._slots if self._cuda]  # type: ignore[no-untyped-call]
        self._mine = torch.empty(chunk, dtype=torch.uint8, device=device)
        self._all = torch.empty(chunk * self.world, dtype=torch.uint8, device=device)
        self._pool = Pool(KEEP, self._pinned)
        if self._cuda:  # the first one makes the communicator: here, not in a step
            all_gather(self._all[: self.world], self._mine[:1], group=group)

    def second(self, sending: Sequence[Array], places: Sequence[Places]) -> list[memoryview]:
        buffers = [] if self.rank else [self._pool.take(extent(p)) for p in places]
        wholes = [torch.from_numpy(np.asarray(b)) for b in buffers]
        largest = max(map(extent, places))
        with torch.cuda.stream(self._stream):
            for k, at in enumerate(range(0, largest, self._chunk)):
                n = min(self._chunk, largest - at)
                self._fill(k % 2, sending, places[self.rank], range(at, at + n))
                all_gather(self._all[: n * self.world], self._mine[:n], group=self._group)
                for r, whole in enumerate(wholes):
                    target = whole[at : at + n]
                    target.copy_(self._all[r * n : r * n + len(target)], non_blocking=True)
        if self._stream:
            self._stream.synchronize()
        return buffers

    def _fill(self, k: int, sending: Sequence[Array], places: Places, window: range) -> None:
        """Bring what of the segments lies in `window` to the device."""
        slot = self._slots[k]
        if self._cuda:
            self._copied[k].synchronize()  # the copy that read this slot last is done
        host = slot.numpy()
        for segment, place in zip(sending, places, strict=True):
            lo, hi = max(place.start, window.start), min(place.stop, window.stop)
            if lo < hi:
                host[lo - window.start : hi - window.start] = segment[lo - place.start : hi - place.start]
        self._mine[: len(window)].copy_(slot[: len(window)], non_blocking=True)
        if self._cuda:
            self._copied[k].record(self._stream)

    def _pinned(self, n: int) -> Array:
        array: Array = torch.empty(n, dtype=torch.uint8, pin_memory=self._cuda).numpy()
        return array


def transport_for(device: torch.device | None, group: dist.ProcessGroup | None) -> Transport:
    """What the group has for results that come from `device`; the same kind on all ranks."""
    grouped = dist.is_available() and dist.is_initialized()
    if grouped and device is not None and device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group):
        return Nccl(device, group)
    return Gloo(group)


class Pool:
    """Receive buffers, each used again once no view of it is left; it holds on to at most `keep` bytes."""

    def __init__(self, keep: int, allocate: Callable[[int], Array]) -> None:
        self._keep = keep
        self._allocate = allocate
        self._held: list[tuple[Array, weakref.ref[Any]]] = []  # and what is lent of each; the latest last

    def take(self, n: int) -> memoryview:
        """`n` bytes that nobody looks at, contents undefined."""
        if not n:
            return memoryview(bytearray())
        size = max(1 << 16, 1 << (n - 1).bit_length())  # few sizes: one fits again; untouched pages are free
        for i, (buffer, lent) in enumerate(self._held):
            if buffer.nbytes == size and lent() is None:
                del self._held[i]
                break
        else:
            buffer = self._allocate(size)
        # Whatever is made of a memoryview keeps alive the object at its root, and only that: an array of an array
        # holds on to the innermost one. So the root is made anew for every loan, and is no array.
        root = (ctypes.c_ubyte * size).from_buffer(buffer.data)
        self._held.append((buffer, weakref.ref(root)))
        while sum(held.nbytes for held, _ in self._held) > self._keep:
            del self._held[0]  # if it is lent, its views own it now
        return memoryview(root).cast("B")[:n]


def extent(places: Places) -> int:
    """Bytes of the receive buffer that `places` fill."""
    return places[-1].stop if places else 0


def _tensor(segment: Array) -> torch.Tensor:
    return torch.from_numpy(segment if segment.flags.writeable else np.asarray(_Writable(segment)))


class _Writable:
    """Read-only memory that says it is writable: torch warns otherwise, and a send only reads."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = dict(array.__array_interface__, data=(array.ctypes.data, False))


class _Works(list[dist.Work | None]):
    """Operations of a process group, under way."""

    def wait(self) -> None:
        for work in self:
            assert work is not None, "this process is not in the group"
            work.wait()
