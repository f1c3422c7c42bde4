"""One object ⇄ a pickle and its out-of-band buffers; knows nothing of ranks, rounds or process groups."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch

LARGE = 1 << 20
"""Bytes from which a buffer travels by itself, copied neither into the pickle nor out of it."""
MAX_SEGMENTS = 1024
"""Segments that one object is sent in; large buffers beyond that go into the pickle."""

Buffer = bytes | bytearray | memoryview


class OverCap(Exception):
    """The object takes more bytes than it may."""


class Packed(NamedTuple):
    """An encoded object: `pickle` and `buffers` are each in order, and what is large in them is by reference."""

    pickle: Sequence[Buffer] = ()
    buffers: Sequence[Buffer] = ()


def pack(value: object, cap: int) -> Packed:
    """Encode `value` in at most `cap` bytes. Raises `OverCap`, and whatever its own `__reduce__` raises.

    Tensors arrive as plain tensors on the CPU, detached, and a view brings its own bytes only. `bytes` arrive as
    `bytes`; a `memoryview` arrives as one and, if it is large, without a copy.
    """
    sink = _Sink(cap)
    pickler = pickle.Pickler(sink, 5, buffer_callback=sink.keep)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return Packed(sink.pieces, sink.buffers)


def unpack(data: Buffer, buffers: Sequence[Buffer]) -> object:
    """Decode what `pack` made; large arrays, tensors and memoryviews are views of `buffers`.

    Raises whatever the object's own reconstruction raises. It runs code: only for ranks of one group.
    """
    return pickle.loads(data, buffers=buffers)


def segments(pieces: Sequence[Buffer]) -> list[Buffer]:
    """`pieces` with each run of small ones joined: fewer than `MAX_SEGMENTS // 2` of them."""
    if sum(len(piece) >= LARGE for piece in pieces) >= MAX_SEGMENTS // 4:
        return [bytearray().join(pieces)]
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for piece in pieces:
        if len(piece) < LARGE:
            run.append(piece)
            continue
        if run:
            joined.append(bytearray().join(run))
            run = []
        joined.append(piece)
    if run:
        joined.append(bytearray().join(run))
    return joined


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

    __slots__ = ("buffers", "cap", "left", "pieces")

    def __init__(self, cap: int) -> None:
        self.cap = self.left = cap
        self.pieces: list[Buffer] = []
        self.buffers: list[Buffer] = []

    def write(self, piece: Buffer) -> None:
        self._count(len(piece))
        self.pieces.append(piece)

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's `buffer_callback`: false means out of band."""
        view = buffer.raw()
        if view.nbytes < LARGE or len(self.buffers) == MAX_SEGMENTS // 2:
            return True
        self._count(view.nbytes)
        self.buffers.append(view)
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
    flat = tensor.detach().resolve_conj().reshape(-1).view(torch.uint8).numpy(force=True)
    return _cast_tensor, (flat, tensor.dtype, tuple(tensor.shape))


def _tensor(buffer: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _cast_tensor(flat: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


def _reduce_storage(storage: Any) -> Any:
    return storage.cpu().__reduce_ex__(5)


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "biufc" or array.flags.fnc:
        return array.__reduce_ex__(5)
    return np.ndarray, (array.shape, array.dtype, _buffer(np.ascontiguousarray(array).data))


def _buffer(view: memoryview) -> pickle.PickleBuffer | bytearray:
    """A bytearray for a small one: it costs less than asking the sink, and arrives writable all the same."""
    return pickle.PickleBuffer(view) if view.nbytes >= LARGE else bytearray(view)


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
