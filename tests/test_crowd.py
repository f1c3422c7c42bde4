"""`app.crowd`: bodies with far too many items are refused before any is made."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import crowd
from workers.errors import TooLarge

pytestmark = pytest.mark.timeout(60)

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(VALUES, min_size=1, max_size=12), st.dictionaries(st.text(max_size=3), VALUES, max_size=5))
def test_the_count_is_exact(inputs: list, parameters: dict) -> None:
    for escape in (True, False):
        body = json.dumps({"inputs": inputs, "parameters": parameters}, ensure_ascii=escape).encode()
        crowd.check(body, max(len(inputs), len(parameters), 1))
        if len(inputs) > 1:
            with pytest.raises(TooLarge, match="items"):
                crowd.check(body, len(inputs) - 1)


def test_the_count_goes_on_over_the_borders_of_what_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "CHUNK", 7)
    items = [[1, [2, ","]], 'a,]\\",[', {"b,": 1, "c": [2, 3]}, 4] * 9
    body = json.dumps({"inputs": items}).encode()
    crowd.check(body, 36)
    with pytest.raises(TooLarge):
        crowd.check(body, 35)


def test_a_crowd_is_refused_without_being_made() -> None:
    body = b'{"inputs":[' + b"0," * (8 << 20) + b"0]}"
    assert crowd.may_be_crowded(body)
    tracemalloc.start()
    with pytest.raises(TooLarge):
        crowd.check(body, 16384)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(body)
    assert not crowd.may_be_crowded(b"0," * 1000)


def test_what_is_no_such_body_is_left_to_those_who_say_why() -> None:
    for body in (b"", b"[", b"[1,2]", b'{"inputs":1}', b'{"other":[1,2]}', b'{"inputs":[1,}'):
        crowd.check(body, 1)
