"""multipart/form-data (RFC 7578) to items: each part with a file name is one; it knows no request and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.codecs import Cut
from workers.errors import MalformedBody, TooLarge
from workers.wire import Buffer, Encoding, Form, Place

PARAMETERS = "parameters"  # name of the part that holds the request's parameters, as JSON


class _Part(NamedTuple):
    name: str
    file_name: str | None
    data: list[memoryview]  # its pieces

    def bytes(self) -> bytes:
        return b"".join(self.data)


class _Files:
    """Files as items (see `workers.wire`): each its name's length in two bytes, its name in UTF-8, its bytes."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._items: list[list[Buffer]] = []
        for part in parts:
            name = (part.file_name or "").encode()
            self._items.append([len(name).to_bytes(2, "little") + name, *part.data])

    def __len__(self) -> int:
        return len(self._items)

    def slices(self, start: int, stop: int) -> Sequence[Buffer]:
        return [piece for item in self._items[start:stop] for piece in item]

    def lengths(self, start: int, stop: int) -> list[int]:
        return [sum(map(len, item)) for item in self._items[start:stop]]

    def place(self, start: int, stop: int) -> Place | None:
        return None


def cut(body: bytes, content_type: bytes, returns: Encoding, max_items: int) -> Cut:
    """The files of a body, in order, and its parameters. MalformedBody, TooLarge."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise MalformedBody("the Content-Type multipart/form-data names no boundary")
    found, parameters = [], b""
    for part in _parts(body, boundary, max_items):
        if part.file_name is not None:
            found.append(part)
        elif part.name == PARAMETERS and not parameters:
            parameters = _parameters(part.bytes())
        else:
            raise MalformedBody(
                f"the part {part.name[:200]!r} has no file name: a part is a file, or once {PARAMETERS!r} as JSON"
            )
    return Cut(_Files(found), Form("files", returns, parameters))


def _parameters(text: bytes) -> bytes:
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBody(f"the part {PARAMETERS!r}: {str(error)[:500]}") from error
    return msgspec.json.encode(found, order="sorted") if found else b""


def _parts(body: bytes, boundary: bytes, max_items: int) -> list[_Part]:
    view = memoryview(body)
    parts: list[_Part] = []
    header: list[bytes] = [b"", b""]  # name and value, of the one that is read
    disposition = b""
    ended = False

    def begin() -> None:
        nonlocal disposition
        disposition = b""
        if len(parts) > max_items:  # one may be the parameters
            raise TooLarge(f"more than {max_items} parts are over the limit in one request")

    def name(data: bytes, start: int, end: int) -> None:
        header[0] += data[start:end]

    def value(data: bytes, start: int, end: int) -> None:
        header[1] += data[start:end]

    def header_end() -> None:
        nonlocal disposition
        if header[0].lower() == b"content-disposition":
            disposition = header[1]
        header[:] = b"", b""

    def headers_finished() -> None:
        kind, options = parse_options_header(disposition)
        if kind != b"form-data" or b"name" not in options:
            raise MalformedBody(f"part {len(parts)} has no Content-Disposition of form-data with a name")
        file_name = options.get(b"filename")
        if file_name is not None and len(file_name) > 1024:
            raise MalformedBody(f"part {len(parts)} has a file name of {len(file_name)} bytes")
        parts.append(_Part(_text(options[b"name"]), None if file_name is None else _text(file_name), []))

    def data(_: bytes, start: int, end: int) -> None:
        parts[-1].data.append(view[start:end])

    def end() -> None:
        nonlocal ended
        ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_header_field": name,
                "on_header_value": value,
                "on_header_end": header_end,
                "on_headers_finished": headers_finished,
                "on_part_data": data,
                "on_end": end,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise MalformedBody(f"the multipart body cannot be read: {str(error)[:200]}") from error
    if not ended:
        raise MalformedBody("the multipart body ends too early")
    return parts


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
