"""Tensors of the Open Inference Protocol ⇄ bytes: a body to a cut of rows, results to a body; it knows no queue.

The protocol is inference_rest.md of https://github.com/kserve/open-inference-protocol; tensors as bytes behind the JSON
object are Triton's "binary tensor data extension": little-endian, row-major, without gaps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import orjson

from app.codecs import MAX_NPY_AXES, MAX_NPY_SIZE, Cut, Rows
from app.outputs import Span
from workers import wire
from workers.arrays import is_shaped, numbers_in_turns, wide
from workers.errors import MalformedBody, NonFiniteResult, TooLarge, UnencodableResult
from workers.ring import Block
from workers.wire import Buffer, Form

INPUT, OUTPUT = "input", "output"  # names of a model's tensors
DTYPES = {"BOOL": "|b1", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "UINT8": "|u1", "INT8": "|i1"} | {
    f"{kind}{8 * size}": f"<{kind[0].lower()}{size}" for kind in ("UINT", "INT") for size in (2, 4, 8)
}  # a datatype of the protocol: the dtype of rows
PIECE = 1 << 16  # numbers written at a time
TEXTS = "BYTES"  # results that are no numbers, as JSON texts


@dataclass(frozen=True)
class Asked:
    """What a request says."""

    id: str | None
    cut: Cut
    made: int  # bytes of the cut that are not the body's own
    binary: bool  # the answer's tensor is to stand behind the JSON
    timeout: float  # seconds


class Output(NamedTuple):
    """A tensor of results, one a row of the first axis."""

    datatype: str
    shape: tuple[int, ...]
    pieces: Sequence[Buffer]  # its bytes, end to end, or with BYTES its texts


class _Parameters(msgspec.Struct):
    """Those of a tensor; others are hints that nothing here needs."""

    binary_data_size: int | None = None
    binary_data: bool | None = None
    shared_memory_region: str | None = None
    classification: int = 0


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: _Parameters | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: _Parameters | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    outputs: list[_Output] | None = None


_request = msgspec.json.Decoder(_Request)


def datatype(dtype: str) -> str:
    """The protocol's name for what NumPy, or torch, calls `dtype`."""
    return "BF16" if dtype == "bfloat16" else _NAMES[np.dtype(dtype).newbyteorder("<").str]


_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# ---- a request to rows


def read(body: Buffer, json_size: int | None, max_items: int, block: Block | None = None) -> Asked:
    """MalformedBody, with the reason, for what is no request; what the model says to the tensor, its ranks say.

    TooLarge for more items than `max_items`, before their numbers are read.

    `json_size` is the Inference-Header-Content-Length, if there is one; `block` what of the ring the body fills.
    """
    json_size = len(body) if json_size is None else json_size
    if json_size > len(body):
        raise MalformedBody(f"Inference-Header-Content-Length is {json_size}, and the body has {len(body)} bytes")
    try:
        asked = _request.decode(memoryview(body)[:json_size])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedBody(str(error)[:500]) from error
    except RecursionError as error:
        raise MalformedBody("the body is nested too deep") from error
    parameters = asked.parameters or {}
    binary = _own(parameters, "binary_data_output", bool, False)
    timeout = _own(parameters, "timeout", Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], 0) / 1e6 or math.inf
    parameters.pop("priority", None)  # a hint
    for output in asked.outputs or ():
        wish = _checked(output, OUTPUT)
        binary = binary if wish.binary_data is None else wish.binary_data
    if len(asked.inputs) != 1:
        raise MalformedBody(f"the model takes one input, {INPUT!r}, and the request has {len(asked.inputs)}")
    text = msgspec.json.encode(parameters, order="sorted") if parameters else b""
    tensor, behind = asked.inputs[0], memoryview(body)[json_size:]
    shape, dtype = _form(tensor)
    if shape[0] > max_items:
        raise TooLarge(f"{shape[0]} items are over the limit of {max_items} in one request")
    made = _made(tensor, shape, dtype, behind)
    data, block = (behind, block) if made is None else (made.view(np.uint8).data, None)
    items = Rows(data, shape[0], math.prod(shape[1:]) * dtype.itemsize, block, json_size)
    cut = Cut(items, Form("npy", "npy", text, (dtype.str, shape[1:])))
    return Asked(asked.id, cut, 0 if made is None else made.nbytes, binary, timeout)


def _own(parameters: dict[str, msgspec.Raw], name: str, kind: Any, default: Any) -> Any:
    """One of the protocol's own parameters, taken out of those that are the model's."""
    try:
        return msgspec.json.decode(parameters.pop(name), type=kind) if name in parameters else default
    except msgspec.DecodeError as error:
        raise MalformedBody(f"parameter {name}: {error}") from error


def _checked(tensor: _Input | _Output, name: str) -> _Parameters:
    parameters = tensor.parameters or _Parameters()
    if tensor.name != name:
        raise MalformedBody(f"the model has no tensor {tensor.name[:100]!r} there; it has {name!r}")
    if parameters.shared_memory_region is not None or parameters.classification:
        raise MalformedBody(f"tensor {name!r}: shared memory and classification are not offered")
    return parameters


def _form(tensor: _Input) -> tuple[tuple[int, ...], np.dtype]:
    """Shape, and the dtype of its rows: NumPy has no bfloat16, so those of BF16 are float32."""
    shape = tuple(tensor.shape)
    if not shape:
        raise MalformedBody("the tensor's shape is []; its first axis counts the items")
    if len(shape) > MAX_NPY_AXES or min(shape) < 0 or math.prod(size or 1 for size in shape) > MAX_NPY_SIZE:
        raise MalformedBody(f"no tensor has the shape {str(list(shape))[:200]}")
    if tensor.datatype == TEXTS:
        raise MalformedBody("the model takes numbers, and BYTES are none")
    if tensor.datatype not in (*DTYPES, "BF16"):
        raise MalformedBody(f"the protocol has no datatype {tensor.datatype[:100]!r}")
    return shape, np.dtype(DTYPES.get(tensor.datatype, "<f4"))


def _made(tensor: _Input, shape: tuple[int, ...], dtype: np.dtype, behind: memoryview) -> np.ndarray | None:
    """The tensor's numbers, flat; None where the bytes `behind` the JSON are just those."""
    size = _checked(tensor, INPUT).binary_data_size
    what = f"{tensor.datatype}{list(shape)}"
    if size is None and behind:
        raise MalformedBody(f"{len(behind)} bytes follow the JSON, and no binary_data_size says whose they are")
    if size is None:
        return _from_json(bytes(tensor.data), shape, dtype, what)
    if bytes(tensor.data):
        raise MalformedBody("the input has data and binary_data_size: only one of them can be meant")
    if size != len(behind):
        raise MalformedBody(
            f"binary_data_size is {size}, and by Inference-Header-Content-Length {len(behind)} bytes follow the JSON"
        )
    wanted = math.prod(shape) * (2 if tensor.datatype == "BF16" else dtype.itemsize)
    if size != wanted:
        raise MalformedBody(f"a tensor {what} has {wanted} bytes, and binary_data_size is {size}")
    if tensor.datatype == "BF16":
        return (np.frombuffer(behind, "<u2").astype("<u4") << 16).view(dtype)
    return None


def _from_json(data: bytes, shape: tuple[int, ...], dtype: np.dtype, what: str) -> np.ndarray:
    """The numbers of `data`, flat; nested arrays must be of `shape`."""
    if dtype.kind == "b":  # the JSON is known to be whole, so that neither word can stand beside a digit
        data = data.replace(b"true", b"1").replace(b"false", b"0")
    size = math.prod(shape)
    if data.startswith(b"[") and not is_shaped(data, (size,)) and not is_shaped(data, shape):
        found = data.count(b",") + 1
        if found != size and data.count(b"[") == 1:
            raise MalformedBody(f"a tensor {what} has {size} numbers, and data {found}")
        raise MalformedBody(f"data is nested in another way than a tensor {what}, or holds another count")
    kind = "int64" if dtype.kind == "b" else wide(dtype)
    values = numbers_in_turns(data, kind, size) if data.startswith(b"[") else None
    if values is None:
        raise MalformedBody(f"data of a tensor {what} must be an array of such numbers, or binary_data_size be given")
    if dtype.kind != "f" and values.size:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if values.min() < low or values.max() > high:
            raise MalformedBody(f"a number of data does not fit in {what}")
    with np.errstate(over="ignore"):  # the ranks refuse what is not finite, item by item
        return values.astype(dtype)


# ---- results to an answer


def rows(spans: Sequence[Span]) -> Output | None:
    """Results in the npy form; None where there are none. UnencodableResult: they are of unequal form."""
    forms = {form for span in spans for form in span.rows if span.lengths}
    if len(forms) > 1:
        a, b = (f"{np.dtype(dtype)}{list(shape)}" for dtype, shape in sorted(forms)[:2])
        raise UnencodableResult(f"results of unequal form, {a} and {b}, make no tensor")
    if not forms:
        return None
    [(dtype, shape)] = forms
    frames: list[Buffer] = [span.frame for span in spans]
    if dtype.startswith(">"):
        frames = [np.frombuffer(frame, dtype).byteswap().tobytes() for frame in frames]
    return Output(datatype(dtype), (sum(len(span.lengths) for span in spans), *shape), frames)


def texts(spans: Sequence[Span]) -> Output:
    """Results in the JSON form."""
    pieces = [
        bytes(span.frame[at : at + length])
        for span in spans
        for at, length in zip(wire.offsets(span.lengths, "json"), span.lengths, strict=True)
    ]
    return Output(TEXTS, (len(pieces),), pieces)


def write(members: dict[str, Any], output: Output, binary: bool) -> tuple[bytes, int | None]:
    """The body of an answer, and with `binary` how many bytes of it are JSON; `members` stand before the outputs.

    NonFiniteResult: JSON cannot say a number of the results.
    """
    tensor: dict[str, Any] = {"name": OUTPUT, "datatype": output.datatype, "shape": output.shape}
    answer, pieces = members | {"outputs": [tensor]}, output.pieces
    if binary:
        if output.datatype == TEXTS:
            pieces = [struct.pack("<I", len(text)) + text for text in pieces]
        tensor["parameters"] = {"binary_data_size": sum(map(len, pieces))}
        head = orjson.dumps(answer)
        return b"".join((head, *pieces)), len(head)
    if output.datatype == TEXTS:
        tensor["data"] = [str(text, "utf-8") for text in pieces]
    else:
        data = np.frombuffer(b"".join(pieces), DTYPES[output.datatype])
        if data.dtype.kind == "f" and not (finite := np.isfinite(data)).all():
            i = int(finite.argmin()) * output.shape[0] // data.size
            raise NonFiniteResult(f"item {i}: the result holds NaN or infinity, which only binary data can say")
        return orjson.dumps(answer)[: -len(b"}]}")] + b',"data":[' + _numbers(data) + b"]}]}", None
    return orjson.dumps(answer), None


def _numbers(data: np.ndarray) -> bytes:
    """As JSON, in pieces, between which other threads may run."""
    parts = (data[at : at + PIECE] for at in range(0, data.size, PIECE))
    return b",".join(orjson.dumps(part, np.ndarray.tolist, orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in parts)
