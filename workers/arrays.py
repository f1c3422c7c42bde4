"""Nested JSON arrays of numbers to NumPy, with no Python object a number; it knows no model and no protocol."""

from __future__ import annotations

from typing import Literal

import numpy as np
import simdjson

from workers.wire import Buffer

_KINDS: dict[str, Literal["d", "i", "u"]] = {"float64": "d", "int64": "i", "uint64": "u"}
PIECE = 1 << 18  # bytes of text that are parsed in one go: some milliseconds
_FLAT = bytes.maketrans(b"[]", b"  ")
_NO_TOKENS = bytes(set(range(256)) - set(b"[],"))  # deleted, they leave the structure of nested arrays


def wide(dtype: np.dtype) -> str:
    """The kind that `numbers` reads numbers for `dtype` in; bool is none of them."""
    return {"f": "float64", "i": "int64", "u": "uint64" if dtype.itemsize == 8 else "int64"}.get(dtype.kind, "bool")


def numbers(text: Buffer, kind: str) -> np.ndarray | None:
    """All numbers of nested arrays, in order; None: something in `text` is no number of the `kind`."""
    try:
        document = simdjson.Parser().parse(text)
        if isinstance(document, simdjson.Array) and kind in _KINDS:
            return np.frombuffer(document.as_buffer(of_type=_KINDS[kind]), kind)
    except (ValueError, TypeError, RuntimeError):  # no JSON, a string, null, true, or beyond 64 bits
        pass
    return None


def numbers_in_turns(text: bytes, kind: str, size: int) -> np.ndarray | None:
    """As `numbers`, of arrays that hold `size` by their commas, and with turns for other threads between pieces."""
    flat, made = text.translate(_FLAT), np.empty(size, kind) if kind in _KINDS else None
    if not size and flat.strip(b" \t\r\n,"):
        return None
    at = filled = 0
    while made is not None and filled < size:
        end = flat.find(b",", at + PIECE)
        end = len(flat) if end < 0 else end
        piece = numbers(b"[" + flat[at:end] + b"]", kind)
        if piece is None or not 0 < len(piece) <= size - filled:
            return None
        made[filled : filled + len(piece)] = piece
        filled += len(piece)
        at = end + 1
    return made


def is_shaped(text: bytes, shape: tuple[int, ...]) -> bool:
    """Whether brackets and commas are those of an array of that shape: `numbers` looks at the numbers only."""
    tokens, length = text.translate(None, _NO_TOKENS), 0
    for size in reversed(shape):
        length = 2 + size * length + max(size - 1, 0)
    if len(tokens) != length:  # so that no more memory is taken than the text has
        return False
    template = b""
    for size in reversed(shape):
        template = b"[" + template + (b"," + template) * (size - 1) + b"]" if size else b"[]"
    return tokens == template
