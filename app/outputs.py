"""The results of a request, as they come in and as the body of its answer; it knows no route and no step.

An npy body is laid out as numpy.lib.format describes, version 1.0.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from app.codecs import Cut
from workers import wire
from workers.errors import NonFiniteResult, NotAcceptable, PhalanxError
from workers.wire import Buffer, Encoding, RowForm


@dataclass
class Span:
    """Results of a request's items from `start` on, as they stand in a result frame (see `workers.wire`)."""

    start: int
    lengths: list[int]
    frame: memoryview
    rows: list[RowForm]
    rank: str | None = None  # that made them, as `app.steps.rank_name` has it


def null_span(start: int, count: int, encoding: Encoding) -> Span:
    """Results that no rank made."""
    text = b",".join([b"null"] * count) if encoding == "json" else b""
    return Span(start, [4 if encoding == "json" else 0] * count, memoryview(text), [("", ())] * count)


def join_json(
    request_id: str, spans: Sequence[Span], failures: dict[int, PhalanxError], returns: Encoding, cut: Cut | None = None
) -> bytes:
    """The JSON answer; `outputs` holds null and `errors` the reason where an item failed.

    An npy result that JSON cannot say is added to `failures`.
    """
    if returns == "npy":
        outputs: list[Buffer] = [text for span in spans for text in _rows_as_json(span, failures)]
    elif cut and cut.broken:
        outputs = [text for span in spans for text in texts(span)]
    else:
        outputs = [span.frame for span in spans if span.lengths]
    if cut and cut.broken:
        for place in sorted(cut.broken):
            outputs.insert(place, b"null")
        failures = by_place(failures, cut)
    chunks: list[Buffer] = [b'{"id":', orjson.dumps(request_id), b',"outputs":[', b",".join(outputs), b"]"]
    if failures:
        chunks += [b',"errors":', orjson.dumps(listed(failures))]
    return b"".join([*chunks, b"}"])


def texts(span: Span) -> list[memoryview]:
    """The results of JSON, one by one."""
    places = zip(wire.offsets(span.lengths, "json"), span.lengths, strict=True)
    return [span.frame[at : at + length] for at, length in places]


def by_place(failures: Mapping[int, PhalanxError], cut: Cut) -> dict[int, PhalanxError]:
    """All failures, with their places in the body for indices."""
    if cut.index is None:
        return dict(failures)
    return {cut.index[i]: error for i, error in failures.items()} | cut.broken


def join_npy(spans: Sequence[Span]) -> bytes:
    """The npy answer, of results none of which failed. NotAcceptable: rows of unequal form."""
    forms = [form for span in spans for form in span.rows if span.lengths]
    for form in forms:
        if form != forms[0]:
            a, b = (f"{np.dtype(dtype)}{list(shape)}" for dtype, shape in (forms[0], form))
            raise NotAcceptable(f"results of unequal form, {a} and {b}, make no npy array; ask for application/json")
    dtype, shape = forms[0] if forms else ("<f4", ())
    head = io.BytesIO()
    count = sum(len(span.lengths) for span in spans)
    np.lib.format.write_array_header_1_0(head, {"descr": dtype, "fortran_order": False, "shape": (count, *shape)})
    return b"".join([head.getvalue(), *(span.frame for span in spans)])


def common_dtype(spans: Sequence[Span]) -> str | None:
    """Of all npy results, which JSON does not tell; None where they have several, or none."""
    dtypes = {dtype for span in spans if span.lengths for dtype, _ in span.rows} - {""}
    return dtypes.pop() if len(dtypes) == 1 else None


def describe(error: PhalanxError) -> dict[str, object]:
    """One item's error, as answers have it."""
    # A detail may quote what a client sent, lone surrogates included, which UTF-8 does not have.
    detail = error.detail.encode(errors="replace").decode()
    return {"type": error.type, "title": error.title, "detail": detail}


def listed(failures: Mapping[int, PhalanxError]) -> list[dict[str, object]]:
    """The `errors` member of an answer."""
    return [{"index": i, **describe(error)} for i, error in sorted(failures.items())]


def _rows_as_json(span: Span, failures: dict[int, PhalanxError]) -> list[bytes]:
    """An npy result that has holes takes the JSON form."""
    texts = []
    forms = span.rows if len(span.rows) == len(span.lengths) else span.rows * len(span.lengths)
    places = zip(wire.offsets(span.lengths, "npy"), span.lengths, forms, strict=True)
    for i, (at, length, (dtype, shape)) in enumerate(places, span.start):
        if i in failures:
            texts.append(b"null")
            continue
        row = np.frombuffer(span.frame[at : at + length], dtype).reshape(shape)
        if row.dtype.kind == "f" and not np.isfinite(row).all():
            failures[i] = NonFiniteResult("the result holds NaN or infinity, and an answer with failed items is JSON")
            texts.append(b"null")
        else:
            native = row.astype(row.dtype.newbyteorder("="), copy=False)
            texts.append(orjson.dumps(native, np.ndarray.tolist, orjson.OPT_SERIALIZE_NUMPY))
    return texts
