"""`workers.wire`: the messages survive the way, and nothing else is taken for one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from workers import wire
from workers.errors import GroupError
from workers.wire import (
    Failure,
    Form,
    Goodbye,
    Hello,
    Leaving,
    Message,
    ModelInfo,
    Ping,
    Place,
    RankStats,
    Result,
    Shard,
    Step,
)

pytestmark = pytest.mark.timeout(30)

FORM = Form("npy", "json", b'{"a":1}', (">f4", (3, 0)))
MODEL = ModelInfo("Digits", 64, "float32", (None, 8), b"[1]", True)
MESSAGES: list[Message] = [
    Step("s", 1, 2, FORM, [[1, 2], []], [None, Place("ring-s", 64, 3)], 30.0),
    Step("s", 1, 2, Form("json", "json"), [], [], 0.5, canary=True),
    Shard(7, FORM, 2, 5, [1, 2, 3], 30.0),
    Shard(7, FORM, 2, 5, [1, 2, 3], 30.0, place=Place("ring-s", 0, 6)),
    Result(
        "s", 1, 2, [[4]], [Failure(0, "invalid-item", "é\x00")], [[("<f4", ())]], [RankStats(0, 1, 0.5, 9, 2.5)], 0.25
    ),
    Hello(wire.WIRE, "0", 3, 2, MODEL, ["cpu", "cuda:1 NVIDIA"], ["a", "b"], [10, 11], 0.125),
    Hello(wire.WIRE, "0", 3, 2, ModelInfo("M", 1, None, None, None, False), [], [], [], 0.0),
    Leaving(3),
    Goodbye(),
    Ping(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_with_its_payload(message: Message) -> None:
    payload = [b"", b"\x00\xff", memoryview(b"abc")]
    frames = wire.encode(message, payload)
    arrived, with_it = wire.decode([bytearray(frame) for frame in frames])
    assert arrived == message
    assert with_it == payload


@settings(deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.sampled_from(["Step", "Ping", "Leaving", "json", b"x"]),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=12,
    ).map(msgspec.msgpack.encode)
)
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")  # an array of four thousand million
@example(b"\x91" * 100_000)
@example(b"\x92\xa7Leaving\xa1\xff")
def test_what_is_no_message_is_a_group_error_and_nothing_else(frame: bytes) -> None:
    try:
        message, payload = wire.decode([frame, b"more"])
    except GroupError:
        return
    assert isinstance(message, Message)
    assert payload == [b"more"]


def test_a_message_without_a_frame_is_a_group_error() -> None:
    with pytest.raises(GroupError):
        wire.decode([])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_was_cut_short_is_a_group_error(message: Message) -> None:
    frame = bytes(wire.encode(message)[0])
    for end in range(len(frame)):
        with pytest.raises(GroupError):
            wire.decode([frame[:end]])


def test_only_forms_that_are_equal_share_a_step() -> None:
    forms: list[Any] = [
        FORM,
        Form("json", "json"),
        Form("json", "npy"),
        Form("json", "json", b'{"a":1}'),
        Form("npy", "npy", b"", ("<f4", (3,))),
        Form("npy", "npy", b"", (">f4", (3,))),
        Form("npy", "npy", b"", ("<f4", (3, 1))),
    ]
    assert len(set(forms)) == len(forms)
    arrived, _ = wire.decode(wire.encode(Shard(1, FORM, 0, 0, [], 1.0)))
    assert isinstance(arrived, Shard)
    assert hash(arrived.form) == hash(FORM)


@given(st.lists(st.binary(max_size=5), max_size=8))
def test_offsets_say_where_items_stand(items: list[bytes]) -> None:
    lengths = [len(item) for item in items]
    for encoding, comma in (("json", b","), ("npy", b"")):
        frame = comma.join(items)
        starts = wire.offsets(lengths, encoding)  # type: ignore[arg-type]
        assert [frame[at : at + n] for at, n in zip(starts, lengths, strict=True)] == items


@given(st.integers(0, 1000), st.integers(1, 16))
def test_shares_are_contiguous_and_differ_by_one_at_most(n: int, world: int) -> None:
    shares = wire.shares(n, world)
    sizes = [len(share) for share in shares]
    assert [i for share in shares for i in share] == list(range(n))
    assert len(shares) == world
    assert max(sizes) - min(sizes) <= 1
    assert all(a >= b for a, b in pairwise(sizes))
