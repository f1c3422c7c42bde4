"""Whatever is POSTed gets an answer that the API knows, and the service goes on; for minutes in `make test-long`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service import ROOT, Service

KNOWN = {200, 207, 400, 406, 413, 415, 422, 500}
TYPES = ["application/json", "application/x-npy", "application/json; charset=utf-8", "text/plain", ""]
ACCEPTS = ["*/*", "application/json", "application/x-npy", "application/x-npy;q=0.5, */*;q=0.1", "image/png", ";;q="]
SHORT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG = settings(SHORT, max_examples=20_000)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)
documents = st.fixed_dictionaries({"inputs": st.lists(values) | values}, optional={"parameters": values, "x": values})


@st.composite
def arrays(draw: st.DrawFn) -> bytes:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    file = io.BytesIO()
    np.save(file, np.zeros(shape, draw(st.sampled_from(["f4", ">f8", "i2", "u1", "?", "c8", "S3", "f2"]))))
    return file.getvalue()


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON, npy or noise, some of it cut, doubled or with bytes changed."""
    body = draw(documents.map(lambda value: json.dumps(value).encode()) | arrays() | st.binary(max_size=200))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        body = draw(
            st.sampled_from(
                [body[:at], body[:at] + body, body[:at] + bytes([draw(st.integers(0, 255))]) + body[at + 1 :]]
            )
        )
    return body


def check(service: Service, body: bytes, content_type: str, accept: str) -> None:
    answer = service.client.post("/infer", content=body, headers={"content-type": content_type, "accept": accept})
    assert answer.status_code in KNOWN, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"]
    elif answer.headers["content-type"] == "application/json":
        json.loads(answer.text, parse_constant=pytest.fail)
    else:
        np.load(io.BytesIO(answer.content), allow_pickle=False)


@SHORT
@given(bodies(), st.sampled_from(TYPES), st.sampled_from(ACCEPTS))
def test_any_body_gets_a_known_answer(obedient: Service, body: bytes, content_type: str, accept: str) -> None:
    check(obedient, body, content_type, accept)


@SHORT
@given(bodies(), st.sampled_from(TYPES), st.sampled_from(ACCEPTS))
def test_any_body_for_a_tensor_model_gets_a_known_answer(
    double: Service, body: bytes, content_type: str, accept: str
) -> None:
    check(double, body, content_type, accept)


def by_its_description(service: Service, folder: Path, operations: int, *flags: str) -> None:
    """Schemathesis: whatever the API's own description allows, and what it does not, is answered as it says."""
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", ROOT / "tests" / "schemathesis.toml"]
    command += ["run", f"{service.client.base_url}/openapi.json", "--no-color", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)  # it leaves files where it runs
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{operations} selected" in done.stdout


def test_the_api_answers_as_its_description_says(obedient: Service, tmp_path: Path) -> None:
    by_its_description(obedient, tmp_path, 11, "--max-examples", "20", "--exclude-path-regex", "/versions/")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_api_answers_as_its_description_says_for_ten_minutes(obedient: Service, tmp_path: Path) -> None:
    by_its_description(obedient, tmp_path, 14, "--max-time", "600")


@pytest.mark.long
@pytest.mark.timeout(1500)
@LONG
@given(bodies(), st.sampled_from(TYPES), st.sampled_from(ACCEPTS))
def test_any_body_gets_a_known_answer_for_minutes(
    obedient: Service, double: Service, body: bytes, content_type: str, accept: str
) -> None:
    pids = obedient.pids()
    check(obedient, body, content_type, accept)
    check(double, body, content_type, accept)
    assert obedient.pids() == pids
