"""What the answers of a service say to a client: outputs and errors an item, or one error; it asks for nothing."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

import httpx
import msgspec
import numpy as np

from app.chunks import Array
from workers.errors import (
    DeadlineExceeded,
    ItemError,
    PhalanxError,
    RequestError,
    StrangeAnswer,
    Unreachable,
    by_type,
)

Came: TypeAlias = httpx.Response | httpx.TransportError | httpx.DecodingError
URN = "urn:phalanx:error:"
DTYPE = "x-phalanx-dtype"  # of results that are rows of arrays, and come as JSON since others failed


class ItemsFailed(RequestError):
    """Some items have no result, or none has. `outputs` holds the others', and None where an item failed.

    `errors` says why, by index in what was sent.
    """

    status, type, title = 207, "items-failed", "Items failed"

    def __init__(self, outputs: list[Any] | Array, errors: dict[int, ItemError], request_id: str | None = None) -> None:
        super().__init__(outputs, errors, request_id)
        self.outputs = outputs
        self.errors = errors
        self.request_id = request_id

    def __str__(self) -> str:
        index, error = min(self.errors.items())
        return f"{len(self.errors)} of {len(self.outputs)} items failed; item {index}: {error.title}: {error.detail}"


class Outcomes(NamedTuple):
    """An output an item, in order, and None where one failed; `errors` says why, by index."""

    outputs: list[Any] | Array
    errors: dict[int, ItemError]

    def each(self) -> Iterator[Any]:
        """An output or an ItemError an item."""
        for i, output in enumerate(self.outputs):
            yield self.errors.get(i, output)


def join(parts: Iterable[Outcomes]) -> Outcomes:
    """One after another: an array, where all are arrays of one form."""
    pieces: list[Any] = []
    errors: dict[int, ItemError] = {}
    count = 0
    for part in parts:
        pieces.append(part.outputs)
        errors |= {count + i: error for i, error in part.errors.items()}
        count += len(part.outputs)
    if len(pieces) == 1:
        return Outcomes(pieces[0], errors)
    forms = {(piece.dtype, piece.shape[1:]) if isinstance(piece, np.ndarray) else None for piece in pieces}
    if len(forms) == 1 and None not in forms:
        return Outcomes(np.concatenate(pieces), errors)
    return Outcomes([output for piece in pieces for output in piece], errors)


def outcomes(came: Came, count: int, *, arrays: bool) -> Outcomes:
    """Of `count` items, as arrays if asked for as `arrays`; or the RequestError that the answer stands for."""
    if not isinstance(came, httpx.Response):
        raise _no_answer(came)
    try:
        if came.headers.get("content-type") == "application/x-npy" and came.status_code == HTTPStatus.OK:
            outcomes = Outcomes(np.lib.format.read_array(io.BytesIO(came.content), allow_pickle=False), {})
        elif came.status_code in (HTTPStatus.OK, HTTPStatus.MULTI_STATUS):
            answer = msgspec.json.decode(came.content, type=_Outputs)
            errors, outputs = _item_errors(answer.errors), answer.outputs
            if arrays:  # and these are rows of arrays, but that one of them failed
                dtype = came.headers.get(DTYPE)
                outputs = [None if i in errors else np.asarray(output, dtype) for i, output in enumerate(outputs)]
            outcomes = Outcomes(outputs, errors)
        else:
            problem = msgspec.json.decode(came.content, type=_Problem)
            if not problem.type.startswith(URN):
                raise ValueError("a problem of somebody else")
            if not problem.errors:
                raise _request_error(came, problem)
            outcomes = Outcomes([None] * count, _item_errors(problem.errors))
        if len(outcomes.outputs) != count or not all(0 <= i < count for i in outcomes.errors):
            raise ValueError(f"{len(outcomes.outputs)} results for {count} items")
        return outcomes
    except RequestError:
        raise
    except Exception as error:  # it may be anything, made by anybody
        said = came.content[:200].decode(errors="replace").strip() or error
        raise _told(StrangeAnswer(f"{came.status_code}: {said}"), came) from error


def failed(error: PhalanxError) -> Outcomes:
    """Of one item, for which a request was refused."""
    return Outcomes([None], _item_errors([_Error(0, error.type, error.title, error.detail)]))


# ---- what the bodies hold


class _Error(msgspec.Struct):
    index: int
    type: str
    title: str = ""
    detail: str = ""


class _Outputs(msgspec.Struct):
    outputs: list[Any]
    errors: list[_Error] = []


class _Problem(msgspec.Struct):
    type: str
    title: str = ""
    detail: str = ""
    errors: list[_Error] = []


def _request_error(answer: httpx.Response, problem: _Problem) -> RequestError:
    slug = problem.type.removeprefix(URN)
    kind = by_type(slug)
    error = (kind if issubclass(kind, RequestError) else RequestError)(problem.detail)
    error.type, error.title = slug, problem.title
    return _told(error, answer)


def _told(error: RequestError, answer: httpx.Response) -> RequestError:
    after = answer.headers.get("retry-after", "")
    error.status = answer.status_code
    error.retry_after = int(after) if re.fullmatch("[0-9]{1,6}", after) else None
    error.request_id = answer.headers.get("x-request-id")
    return error


def _item_errors(said: Iterable[_Error]) -> dict[int, ItemError]:
    errors = {}
    for one in said:
        kind = by_type(one.type)
        error = (kind if issubclass(kind, ItemError) else ItemError)(one.detail)
        error.status, error.type, error.title = kind.status, one.type, one.title
        errors[one.index] = error
    return errors


def _no_answer(error: httpx.TransportError | httpx.DecodingError) -> Exception:
    """A time-out is the deadline's, but for that of connecting. A fault on this side stays what it is."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return error
    if isinstance(error, httpx.DecodingError):
        return StrangeAnswer(f"its encoding cannot be read: {error}")
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return DeadlineExceeded(f"no answer came in time ({said})")
    where = error._request.url.copy_with(path="/") if error._request is not None else "the service"
    return Unreachable(f"{where}: {said}")
