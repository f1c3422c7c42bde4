"""One item ⇄ bytes on a rank: JSON values and npy rows to values or a tensor, and results back; it runs no model.

Whatever is wrong with an item becomes that item's error, in `failures` by its index in the shard; nothing raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import orjson
import torch

from workers.arrays import is_shaped, numbers, wide
from workers.errors import (
    InvalidItem,
    MalformedBody,
    NonFiniteResult,
    NotAcceptable,
    PhalanxError,
    UnencodableResult,
)
from workers.model import File, TensorSpec, said
from workers.wire import Buffer, Encoding, Form, RowForm, offsets

MAX_DEPTH = 64  # of a JSON item
Failures = dict[int, PhalanxError]
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACKET_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as int8: one deeper, one less deep
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass
class Decoded:
    """The items of a shard that could be read: `values[k]` is item `index[k]`."""

    values: torch.Tensor | list[Any]  # a tensor [n, *shape] on the CPU where the model has a TensorSpec
    index: list[int]
    failures: Failures = field(default_factory=dict)


@dataclass
class Encoded:
    """A shard's results as one payload frame (see `workers.wire`)."""

    frame: bytes
    lengths: list[int]
    rows: list[RowForm]


def decode(frame: Buffer, lengths: Sequence[int], form: Form, spec: TensorSpec | None) -> Decoded:
    """The items of a payload frame."""
    if form.accepts == "npy":
        assert form.row is not None
        dtype = np.dtype(form.row[0])
        rows = np.frombuffer(frame, dtype).reshape(len(lengths), *form.row[1])
        return _rows(rows.view(np.uint8) != 0 if dtype.kind == "b" else rows, spec)  # a client's true may be any byte
    view = memoryview(frame)
    if form.accepts == "files":
        return _files([view[at : at + n] for at, n in zip(offsets(lengths, "files"), lengths, strict=True)], spec)
    raws = [view[at : at + n] for at, n in zip(offsets(lengths, "json"), lengths, strict=True)]
    if spec is None:
        return _values(raws)
    return _numbers(frame, raws, spec)


def encode(results: Sequence[Any] | np.ndarray, failures: Failures, size: int, encoding: Encoding) -> Encoded:
    """One payload frame of `size` results; `results[i]` of an index in `failures` is not looked at.

    A result that has no form in `encoding` is added to `failures`.
    """
    return (_encode_json if encoding == "json" else _encode_npy)(results, failures, size)


# ---- JSON and npy to values


def value(raw: Buffer, kind: Any = Any, what: str = "item") -> Any:
    """One JSON value. InvalidItem: it is not of `kind`. MalformedBody: it is no JSON, or nested too deep."""
    _check_depth(raw, what)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidItem(str(error).replace("`$", f"`{what}")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(str(error)) from error


def array(tensor: torch.Tensor) -> np.ndarray:
    """What a tensor holds, sharing its memory where that can be; kinds of float that NumPy lacks become float32."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.numpy(force=True)


def _values(raws: list[memoryview]) -> Decoded:
    values, index = [], []
    failures: Failures = {}
    for i, raw in enumerate(raws):
        try:
            values.append(value(raw))
            index.append(i)
        except PhalanxError as error:  # of this item alone, whatever it is called elsewhere
            failures[i] = InvalidItem(error.detail)
    return Decoded(values, index, failures)


def _files(slices: list[memoryview], spec: TensorSpec | None) -> Decoded:
    if spec is not None:
        wrong = InvalidItem(f"the item is a file; the model takes {spec}")
        return Decoded([], [], dict.fromkeys(range(len(slices)), wrong))
    ends = [2 + int.from_bytes(one[:2], "little") for one in slices]
    files = [File(one[end:], str(one[2:end], "utf-8")) for one, end in zip(slices, ends, strict=True)]
    return Decoded(files, list(range(len(files))))


def _check_depth(raw: Buffer, what: str) -> None:
    text = bytes(raw)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        steps = _STRING.sub(b"", text).translate(_BRACKET_STEPS, _NO_BRACKETS)
        if np.frombuffer(steps, np.int8).cumsum(dtype=np.int32).max(initial=0) > MAX_DEPTH:
            raise MalformedBody(f"the nesting of the {what} is deeper than {MAX_DEPTH}")


# ---- JSON numbers to a tensor


def _numbers(frame: Buffer, raws: list[memoryview], spec: TensorSpec) -> Decoded:
    """All items in one parse; where that fails, one by one, so that only the bad ones fail."""
    whole = _parse(b"".join((b"[", frame, b"]")), (len(raws), *spec.shape), spec.dtype)
    if whole is not None:
        return _checked(whole, list(range(len(raws))), {}, spec)
    arrays, index = [], []
    failures: Failures = {}
    for i, raw in enumerate(map(bytes, raws)):
        try:
            array = _parse(raw, spec.shape, spec.dtype)
            arrays.append(_explain(raw, spec) if array is None else array)
            index.append(i)
        except PhalanxError as error:
            failures[i] = InvalidItem(error.detail)
    return _stacked(arrays, index, failures, spec)


def _parse(raw: bytes, shape: tuple[int | None, ...], dtype: str) -> np.ndarray | None:
    """Nested arrays of numbers, with no Python object a number; None if it is not just that: `_explain` says why."""
    flat = numbers(raw, _wide(dtype))
    full = None if flat is None else _infer(shape, flat.size)
    return None if flat is None or full is None or not is_shaped(raw, full) else flat.reshape(full)


def _infer(shape: tuple[int | None, ...], size: int) -> tuple[int, ...] | None:
    """`shape` with its only None filled in, so that it holds `size` numbers; None where that cannot be."""
    known = math.prod(n for n in shape if n is not None)
    free = shape.count(None)
    if free > 1 or (free == 1 and (known == 0 or size % known)) or (free == 0 and known != size):
        return None
    return tuple(size // known if n is None else n for n in shape)


def _explain(raw: bytes, spec: TensorSpec) -> np.ndarray:
    """The careful way for an item that the fast one refused: a value, or an InvalidItem that names the place."""
    kind: Any = bool if spec.dtype == "bool" else float if np.dtype(_numpy(spec.dtype)).kind == "f" else int
    nested: Any = kind
    for _ in spec.shape:
        nested = list[nested]
    try:
        array = np.array(value(raw, nested), _wide(spec.dtype))
    except InvalidItem as error:
        raise InvalidItem(f"{error}; the model takes {spec}") from error
    except OverflowError as error:
        raise InvalidItem(f"a number does not fit in {spec.dtype}") from error
    except ValueError as error:
        raise InvalidItem(f"the item's rows are of unequal length; the model takes {spec}") from error
    if array.size == 0:  # an empty list does not say how long what it does not hold would be
        array = array.reshape(*array.shape, *(size or 0 for size in spec.shape[array.ndim :]))
    if not _fits(array.shape, spec):
        raise InvalidItem(f"the item's shape is {list(array.shape)}; the model takes {spec}")
    return array


# ---- rows and numbers to a checked tensor


def _rows(rows: np.ndarray, spec: TensorSpec | None) -> Decoded:
    everything = list(range(len(rows)))
    if spec is None:
        # a copy, in native byte order: a model may write into what it is given, and torch reads no other
        return Decoded(list(rows.astype(rows.dtype.newbyteorder("="))), everything)
    wrong = None
    if not _fits(rows.shape[1:], spec):
        wrong = f"the item's shape is {list(rows.shape[1:])}; the model takes {spec}"
    elif not np.can_cast(rows.dtype, _numpy(spec.dtype), "same_kind"):
        wrong = f"the item's dtype is {rows.dtype.name}; the model takes {spec}"
    if wrong is not None:
        return Decoded([], [], {i: InvalidItem(wrong) for i in everything})
    return _checked(rows, everything, {}, spec)


def _stacked(arrays: list[np.ndarray], index: list[int], failures: Failures, spec: TensorSpec) -> Decoded:
    """`None` sizes must be equal within a step: the first item that could be read decides."""
    equal = [k for k, array in enumerate(arrays) if array.shape == arrays[0].shape]
    for k in sorted(set(range(len(arrays))) - set(equal)):
        here, there = list(arrays[k].shape), list(arrays[0].shape)
        failures[index[k]] = InvalidItem(f"the item's shape is {here}, beside items of shape {there} in one step")
    if not equal:
        return Decoded([], [], failures)
    return _checked(np.stack([arrays[k] for k in equal]), [index[k] for k in equal], failures, spec)


def _checked(array: np.ndarray, index: list[int], failures: Failures, spec: TensorSpec) -> Decoded:
    """Range and finiteness item by item, then the cast to the model's dtype."""
    target = np.dtype(_numpy(spec.dtype))
    good = np.ones(len(array), bool)

    def refuse(bad: np.ndarray, why: str) -> None:
        for k in np.flatnonzero(bad & good):
            failures[index[k]] = InvalidItem(why)
        good[bad] = False

    def any_number(wrong: np.ndarray) -> np.ndarray:
        return np.asarray(wrong.reshape(len(array), -1).any(axis=1))

    if target.kind in "iu" and array.dtype.kind in "iu" and array.size and array.dtype != target:
        limits = np.iinfo(target)
        refuse(any_number((array < limits.min) | (array > limits.max)), f"a number does not fit in {spec.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.array(array, target)  # a copy in native byte order that the model may write into
    tensor = torch.from_numpy(cast)
    if spec.dtype == "bfloat16":
        tensor = tensor.to(torch.bfloat16)
        cast = tensor.float().numpy()
    if target.kind == "f" and not np.isfinite(cast).all():
        refuse(any_number(~np.isfinite(cast)), f"a number is not finite in {spec.dtype}")
    low = -math.inf if spec.minimum is None else spec.minimum
    high = math.inf if spec.maximum is None else spec.maximum
    if array.size and (low, high) != (-math.inf, math.inf):
        with np.errstate(invalid="ignore"):
            refuse(any_number((array < low) | (array > high)), f"a number is outside {low:g}..{high:g}")
    if good.all():
        return Decoded(tensor, index, failures)
    return Decoded(tensor[torch.from_numpy(good)], [i for i, ok in zip(index, good, strict=True) if ok], failures)


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    return len(shape) == len(spec.shape) and all(
        want is None or want == size for size, want in zip(shape, spec.shape, strict=True)
    )


def _numpy(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype


def _wide(dtype: str) -> str:
    return wide(np.dtype(_numpy(dtype)))


# ---- results to bytes


def _encode_json(results: Sequence[Any] | np.ndarray, failures: Failures, size: int) -> Encoded:
    texts = []
    for i in range(size):
        text = b"null"
        if i not in failures:
            try:
                text = _json(results[i])
            except PhalanxError as error:
                failures[i] = error
        texts.append(text)
    return Encoded(b",".join(texts), [len(text) for text in texts], [])


def _json(result: Any) -> bytes:
    try:
        text = _dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        why = said(error.__cause__ or error, kind=False)
        raise UnencodableResult(f"a result of type {type(result).__name__} has no JSON form: {why}") from error
    if b"null" in text:  # which orjson writes for NaN too: that would be a lie
        try:
            finite = _finite(result)
        except Exception as error:  # whatever a user's type brings about
            why = said(error, kind=False)
            raise UnencodableResult(f"a result of type {type(result).__name__} has no JSON form: {why}") from error
        if not finite:
            raise NonFiniteResult("the result holds NaN or infinity, which JSON cannot say; ask for application/x-npy")
    return text


def _dumps(result: Any) -> bytes:
    try:
        return orjson.dumps(result, _plain, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # once more without its own reading of arrays, which knows one byte order only
        try:
            return orjson.dumps(result, _plain, orjson.OPT_NON_STR_KEYS)
        except TypeError as error:
            if "64-bit" not in str(error):
                raise
    # whole numbers that take more than 64 bits, which JSON has and orjson has not
    return json.dumps(result, default=_plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """What orjson cannot write by itself."""
    if isinstance(value, torch.Tensor):
        return np.asarray(array(value), order="C")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "mM" and not _is_wide(value.dtype):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a type that JSON has")


def _finite(value: Any) -> bool:
    """Whether no float that orjson finds in `value` is NaN or infinite."""
    if isinstance(value, float | np.floating):
        return math.isfinite(value)
    if isinstance(value, torch.Tensor):
        return _finite(array(value))
    if isinstance(value, np.ndarray):
        return bool(np.isfinite(value).all()) if value.dtype.kind == "f" else _finite(value.tolist())
    if isinstance(value, dict):
        return all(_finite(key) and _finite(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if isinstance(value, Enum):
        return _finite(value.value)
    if is_dataclass(value):
        names = vars(value) if hasattr(value, "__dict__") else [one.name for one in fields(value)]
        return all(_finite(getattr(value, name)) for name in names if not name.startswith("_"))
    return True


def _encode_npy(results: Sequence[Any] | np.ndarray, failures: Failures, size: int) -> Encoded:
    if isinstance(results, np.ndarray) and _is_row(results.dtype) and not failures:
        length = results.nbytes // size if size else 0
        return Encoded(results.tobytes(), [length] * size, [(results.dtype.str, results.shape[1:])])
    parts: list[bytes] = []
    forms: list[RowForm] = []
    for i in range(size):
        part, form = b"", ("", ())
        if i not in failures:
            try:
                row = _row(results[i])
                part, form = row.tobytes(), (row.dtype.str, row.shape)
            except PhalanxError as error:
                failures[i] = error
        parts.append(part)
        forms.append(form)
    return Encoded(b"".join(parts), [len(part) for part in parts], forms)


def _row(result: Any) -> np.ndarray:
    what = f"a result of type {type(result).__name__} is no npy row"
    try:
        row = array(result) if isinstance(result, torch.Tensor) else np.asarray(result)
    except Exception as error:  # whatever a user's type brings about
        raise NotAcceptable(f"{what}: {said(error, kind=False)}") from error
    if not _is_row(row.dtype):
        raise NotAcceptable(f"{what}; ask for application/json")
    return row


def _is_row(dtype: np.dtype) -> bool:
    return dtype.kind in "biuf" and not _is_wide(dtype)


def _is_wide(dtype: np.dtype) -> bool:
    """long double: its bytes mean another number on another machine, and JSON readers have no such numbers."""
    return dtype.kind == "f" and dtype.itemsize > 8
