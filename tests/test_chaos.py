"""A few seconds of `tests.bench.chaos`; minutes of it belong to `make test-long`."""

from __future__ import annotations

import pytest

from tests.bench import chaos


@pytest.mark.timeout(240)
def test_seconds_of_chaos_lose_nothing_and_answer_nothing_wrongly() -> None:
    assert chaos.main(["--seconds", "4", "--seed", "4", "--every", "1.5"]) == 0
