"""Nested JSON arrays of numbers to NumPy, with no Python object a number; it knows no model and no protocol."""

from __future__ import annotations

from typing import Literal

import numpy as np
import simdjson

from workers.wire import Buffer

_KINDS: dict[str, Literal["d", "i", "u"]] = {"float64": "d", "int64": "i", "uint64": "u"}
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


def is_shaped(text: bytes, shape: tuple[int, ...]) -> bool:
    """Whether brackets and commas are those of an array of that shape: `numbers` looks at the numbers only."""
    tokens, length = text.translate(None, _NO_TOKENS), 0
    for size in reversed(shape):
        length = 2 + size * length + max(size - 1, 0)
    if len(tokens) != length:  # so that no more memory is taken than the text has
        return False
    template = b""
    for size in reversed(shape):
        template = b"[" + b",".join([template] * size) + b"]"
    return tokens == template
