"""Whether what a group says can be: its messages have the right types already, and must fit what they are about.

Between hosts whoever holds the cluster key may send them; what does not fit is dropped with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from app import tensors
from app.queue import Peer
from workers import wire
from workers.errors import InternalError, InvalidParameters, ItemError, PhalanxError
from workers.wire import Buffer, Encoding, Hello, ModelInfo, Result

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}"  # of groups, as app.settings has it
# What a rank may say of an item; parameters that the model does not take are found there too.
_KINDS: list[type[PhalanxError]] = [*ItemError.__subclasses__(), InternalError, InvalidParameters]
OF_ITEMS = {kind.type for kind in _KINDS}
MOST_RANKS, MOST_ITEMS = 10_000, 2**31  # in a group; of a rank in a step


def hello_fault(peer: Peer, hello: Hello) -> str | None:
    """What is wrong with a HELLO; None where nothing is."""
    token = "/[0-9a-f]{16}" if peer.remote else ""
    name = re.escape(f"{hello.group}/{hello.epoch}")
    if not re.fullmatch(NAME, hello.group) or not re.fullmatch(name + token, peer.identity.decode("latin-1")):
        return f"it is not called what it says, {hello.group[:40]!r} epoch {hello.epoch}"
    if not 1 <= hello.world <= MOST_RANKS:
        return f"it has {hello.world} ranks"
    for what, listed in (("devices", hello.devices), ("hosts", hello.hosts), ("pids", hello.pids)):
        if len(listed) != hello.world:
            return f"it has {hello.world} ranks and {len(listed)} {what}"
    if not 0 <= hello.warmup_seconds < math.inf or not 0 <= hello.held < MOST_ITEMS:
        return f"its warm-up took {hello.warmup_seconds} s, and it holds {hello.held} steps"
    return _model_fault(hello.model)


def _model_fault(model: ModelInfo) -> str | None:
    if not re.fullmatch(r"[^\s/,]{1,200}", model.name):
        return f"its model is called {model.name[:200]!r}"
    if not 1 <= model.max_batch_size <= MOST_ITEMS:
        return f"its model takes {model.max_batch_size} items"
    try:
        if model.dtype is not None:
            tensors.datatype(model.dtype)
        if (model.dtype is None) != (model.shape is None) or any(
            size is not None and size < 0 for size in model.shape or ()
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        return f"its model takes {str(model.dtype)[:40]!r} {str(model.shape)[:100]}"
    try:
        if model.example is not None:
            msgspec.json.decode(model.example)
    except msgspec.DecodeError:
        return "its example is no JSON"
    return None


def result_fault(
    result: Result, payload: Sequence[Buffer], size: int | None, returns: Encoding, world: int
) -> str | None:
    """What is wrong with the result of a step of `size` items, None for a canary's; None where nothing is."""
    numbers = [result.collect_seconds, *(stats.forward_seconds for stats in result.stats)]
    if not all(0 <= number < math.inf for number in numbers):
        return "it took no time that can be"
    if sorted(stats.rank for stats in result.stats) != list(range(len(result.stats))) or len(result.stats) > world:
        return f"it has figures of ranks that there are not, of {world}"
    if not all(0 <= stats.items <= MOST_ITEMS and stats.memory_bytes >= 0 for stats in result.stats):
        return "its ranks ran a number of items, or hold a memory, that cannot be"
    if size is None:
        return None
    counts = [len(share) for share in wire.shares(size, world)]
    if [len(lengths) for lengths in result.lengths] != counts or len(payload) != world or len(result.rows) != world:
        return f"it is not of {size} items on {world} ranks"
    for lengths, rows, frame in zip(result.lengths, result.rows, payload, strict=True):
        commas = max(0, len(lengths) - 1) if returns == "json" else 0
        if any(length < 0 for length in lengths) or sum(lengths) + commas != memoryview(frame).nbytes:
            return "its items do not fill its frames"
        if returns == "npy" and len(rows) not in (len(lengths), 1):
            return f"it has {len(rows)} forms of {len(lengths)} rows"
    if strange := {failure.type for failure in result.failures} - OF_ITEMS:
        return f"it has failures of a kind that no item has, {min(strange)[:40]!r}"
    if not all(0 <= failure.index < size for failure in result.failures):
        return f"it has failures of items beyond {size}"
    return None
