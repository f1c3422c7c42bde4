"""Fixtures: services that tests share as long as they do not hurt them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service import Service, serving


@pytest.fixture(scope="session")
def digits() -> Iterator[Service]:
    """The embedded default on two ranks."""
    with serving("digits", ranks=2) as service:
        yield service


@pytest.fixture(scope="session")
def obedient() -> Iterator[Service]:
    """`tests.models.Obedient` on two ranks, with limits low enough to reach."""
    with serving("Obedient", ranks=2, max_items=10_000, queue_items=20_000, body_timeout=1) as service:
        yield service


@pytest.fixture(scope="session")
def double() -> Iterator[Service]:
    """`tests.models.Double` on two ranks that may not leave a collective waiting for longer than five seconds."""
    with serving("Double", ranks=2, process_group_timeout=5, step_timeout=4) as service:
        yield service
