"""One object ⇄ a pickle and its out-of-band buffers; knows nothing of ranks, rounds or process groups."""

from __future__ import annotations

import copyreg
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

ALIGN = 64
"""Bytes: the buffers of a body start at multiples of it, so that arrays over them are aligned as any others are."""
OUT_OF_BAND = 8 << 10
"""Bytes from which a buffer is kept out of the pickle and decoded without a copy; less is copied for less."""
LARGE = 1 << 20
"""Bytes from which a buffer is a segment by itself, so that it is sent without a copy."""
MAX_LARGE = 256
"""Large buffers beyond this number are joined like small ones, so that a part has few segments."""

Buffer = bytes | bytearray | memoryview


class OverCap(Exception):
    """The object takes more bytes than it may."""


class Readable(Protocol):
    """What an unpickler reads from."""

    def read(self, n: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


class Packed(NamedTuple):
    """An encoded object, in pieces by reference: the head is the pickle and the lengths of the body's buffers."""

    head: Sequence[Buffer] = ()
    body: Sequence[Buffer] = ()


def pack(value: object, cap: int, spill: Callable[[Sequence[Buffer]], None] | None = None) -> Packed:
    """Encode `value` in at most `cap` bytes. Raises `OverCap`, and whatever its own `__reduce__` raises.

    `spill` is given the head so far whenever that has grown by `LARGE` bytes in small pieces; the rest is returned.
    Tensors arrive as plain tensors on the CPU, detached, and a view brings its own bytes only. `bytes` arrive as
    `bytes`; a `memoryview` arrives as one and, from `OUT_OF_BAND` bytes on, is decoded without a copy.
    """
    sink = _Sink(cap, spill)
    pickler = pickle.Pickler(sink, 5, buffer_callback=sink.keep)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    lengths = [len(piece) for piece in sink.body]
    return Packed([*sink.head, struct.pack(f"<{len(lengths) + 1}q", *lengths, len(lengths))], sink.body)


def unpack(head: memoryview, body: memoryview) -> object:
    """Decode what `pack` made; what was out of band is a view of `body`, its buffers laid out as `segments` does.

    Raises whatever the object's own reconstruction raises. It runs code: only for ranks of one group.
    """
    return pickle.loads(head, buffers=buffers(head, body))


def buffers(tail: memoryview, body: memoryview) -> Iterator[memoryview]:
    """The buffers in a `body`; `tail` is a head, or the end of one."""
    (n,) = struct.unpack_from("<q", tail, len(tail) - 8)
    at = 0
    for length in struct.unpack_from(f"<{n}q", tail, len(tail) - 8 * (n + 1)):
        yield body[at : at + length]
        at = aligned(at + length)


def unpack_stream(head: Readable, buffers: Iterator[memoryview]) -> object:
    """As `unpack`, while the head is still arriving; `buffers` are asked for one by one, when their turn comes."""
    return pickle.Unpickler(head, buffers=buffers).load()


def segments(pieces: Sequence[Buffer], align: int) -> list[Buffer]:
    """`pieces` in few segments, at most `2 * MAX_LARGE`: the large by themselves, runs of small ones joined.

    Each piece starts at a multiple of `align`, if each segment does.
    """
    apart = sum(len(piece) >= LARGE for piece in pieces) < MAX_LARGE
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for piece in pieces:
        if apart and len(piece) >= LARGE:
            if run:
                joined.append(bytearray().join(run))
                run = []
            joined.append(piece)
        else:
            run += [piece, bytes(-len(piece) % align)]
    if run:
        joined.append(bytearray().join(run))
    return joined


def aligned(at: int) -> int:
    """The first place for a buffer from `at` on."""
    return -(-at // ALIGN) * ALIGN


def laid_out(lengths: Sequence[int], head: int = 0) -> list[range]:
    """Where segments of such lengths lie: those of a head of `head` bytes in one piece, every other one aligned."""
    at, places = 0, []
    for length in lengths:
        at = at if at < head else aligned(at)
        places.append(range(at, at + length))
        at += length
    return places


def sentence(error: BaseException) -> str:
    """What `error` says, in one short sentence; never raises."""
    try:
        text = str(error)
    except Exception:  # an exception whose own text raises is still only an error
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text[:2000]}" if text else type(error).__name__


class _Sink:
    """Where a pickler writes: it keeps what it is given by reference, and counts.

    The pickler hands over its own frames of 64 KB, and larger `bytes` as the objects they are.
    """

    __slots__ = ("body", "cap", "head", "left", "spill", "waiting")

    def __init__(self, cap: int, spill: Callable[[Sequence[Buffer]], None] | None) -> None:
        self.cap = self.left = cap
        self.spill = spill
        self.waiting = 0  # bytes of the head
        self.head: list[Buffer] = []
        self.body: list[Buffer] = []

    def write(self, piece: Buffer) -> None:
        self._count(len(piece))
        self.head.append(piece)
        self.waiting += len(piece) if len(piece) < LARGE else 0  # a large one is better sent from where it lies
        if self.spill and self.waiting >= LARGE:
            self.spill(self.head)
            self.head, self.waiting = [], 0

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's `buffer_callback`: false means out of band."""
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND:
            return True
        self._count(view.nbytes)
        self.body.append(view)
        return False

    def _count(self, n: int) -> None:
        self.left -= n
        if self.left < 0:
            raise OverCap(f"the result takes more than the {self.cap} bytes that a rank may send in a step")


class _Reducers(dict[type, Callable[[Any], Any]]):
    """A dispatch table by kind: tensors and their subclasses in our way, everything else as pickle would."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        reduce: Callable[[Any], Any]
        if issubclass(kind, type):
            raise KeyError(kind)  # a class travels by its name, which pickle does when a table knows nothing
        if kind in copyreg.dispatch_table:
            reduce = copyreg.dispatch_table[kind]
        elif issubclass(kind, torch.Tensor):
            reduce = _reduce_tensor
        elif issubclass(kind, (torch.UntypedStorage, torch.TypedStorage)):
            reduce = _reduce_storage
        else:
            reduce = methodcaller("__reduce_ex__", 5)
        self[kind] = reduce  # the next object of this kind does not come here
        return reduce


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.detach().cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]  # its inner tensors come here
    tensor = tensor.contiguous()
    if tensor.is_cuda and tensor.nbytes >= LARGE:  # a copy to pinned memory is several times faster
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
    if tensor.dtype in _NUMPY:
        array = tensor.numpy(force=True)  # detached, on the CPU, conjugation resolved
        return _tensor, (_buffer(array.data), array.dtype, array.shape)
    flat = tensor.detach().resolve_conj().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy(force=True)
    return _cast_tensor, (flat, tensor.dtype, tuple(tensor.shape))


def _tensor(buffer: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _cast_tensor(flat: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


def _reduce_storage(storage: Any) -> Any:
    return storage.cpu().__reduce_ex__(5)


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    dtype, flags = array.dtype, array.flags
    if dtype.kind not in "biufc" or flags.fnc:
        return array.__reduce_ex__(5)
    view = array.data if flags.c_contiguous else np.ascontiguousarray(array).data
    return np.ndarray, (array.shape, dtype, _buffer(view))


def _buffer(view: memoryview) -> pickle.PickleBuffer | bytearray:
    """A bytearray for a small one: it costs less than asking the sink, and arrives writable all the same."""
    return pickle.PickleBuffer(view) if view.nbytes >= OUT_OF_BAND else bytearray(view)


def _reduce_memoryview(view: memoryview) -> Any:
    flat = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
    return _memoryview, (pickle.PickleBuffer(flat), view.format, view.shape)


def _memoryview(buffer: Buffer, code: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(buffer)
    if not view.nbytes or (code == "B" and len(shape) == 1):
        return view
    return view.cast(code, shape)  # type: ignore[call-overload, no-any-return]


_NUMPY = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
    | {torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64}
)
_REDUCERS = _Reducers({torch.Tensor: _reduce_tensor, np.ndarray: _reduce_array, memoryview: _reduce_memoryview})
