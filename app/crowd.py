"""How many items a JSON body holds, found without making any: for bodies that may hold far too many; no more.

To cut a body costs 0.15 us and 60 bytes an item: 64 MiB of small ones would hold the event loop for seconds before they
could be counted. To count them here leaves the loop alone, for NumPy does it, and ends at the limit.
"""

from __future__ import annotations

import msgspec
import numpy as np

from workers.errors import TooLarge
from workers.wire import Buffer

CROWDED = 1 << 20  # commas: fewer are no harm
CHUNK = 1 << 20  # bytes looked at in one go
COMMA, QUOTE = b',"'
STEPS = np.zeros(256, np.int8)
STEPS[list(b"[{")], STEPS[list(b"]}")] = 1, -1


class _Members(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_members = msgspec.json.Decoder(_Members)


def may_be_crowded(body: Buffer) -> bool:
    return len(body) > CROWDED and int(np.count_nonzero(np.frombuffer(body, np.uint8) == COMMA)) > CROWDED


def check(body: Buffer, max_items: int) -> None:
    """TooLarge for more items, or parameters, than that; what is wrong with the body otherwise is said elsewhere."""
    try:
        members = _members.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return
    for name, raw in (("items", members.inputs), ("parameters", members.parameters)):
        if _members_of(bytes(raw), max_items) > max_items:
            raise TooLarge(f"more than the limit of {max_items} {name} in one request")


def _members_of(text: bytes, enough: int) -> int:
    """Of an array or object of valid JSON; at least as many as `enough`, or all there are."""
    # without escapes every quote begins or ends a string
    plain = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    count, depth, quotes = 1, 0, 0
    for at in range(0, len(plain), CHUNK):
        piece = plain[at : at + CHUNK]
        seen = quotes + np.cumsum(piece == QUOTE, dtype=np.int32)
        outside = (seen & 1) == 0
        depths = depth + np.cumsum(STEPS[piece] * outside, dtype=np.int32)
        count += int(np.count_nonzero((piece == COMMA) & outside & (depths == 1)))
        if count > enough:
            break
        quotes, depth = int(seen[-1]) & 1, int(depths[-1])
    return count
