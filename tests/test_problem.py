"""`app.problem`: errors as RFC 9457 problems."""

from __future__ import annotations

import orjson
import pytest

from app.problem import plain, problem, told
from workers.errors import InvalidItem, MalformedBody, PhalanxError, QueueFull, Unauthorized


def test_a_problem_has_the_members_of_rfc_9457_and_the_request_id() -> None:
    status, headers, body = problem(MalformedBody("line 1 column 4: expected a comma"), "abc")
    assert status == 400
    assert dict(headers) == {b"content-type": b"application/problem+json", b"content-length": b"%d" % len(body)}
    assert orjson.loads(body) == {
        "type": "urn:phalanx:error:malformed-body",
        "title": "The body is malformed",
        "status": 400,
        "detail": "line 1 column 4: expected a comma",
        "request_id": "abc",
    }


def test_an_error_that_passes_says_when_to_come_again() -> None:
    assert (b"retry-after", b"1") in problem(QueueFull("no room"), "abc")[1]


def test_a_401_says_how_to_authenticate() -> None:
    assert (b"www-authenticate", b"Bearer") in problem(Unauthorized("no key"), "abc")[1]


def test_further_members_stand_beside_the_others() -> None:
    assert orjson.loads(problem(MalformedBody("x"), "abc", errors=[{"index": 3}])[2])["errors"] == [{"index": 3}]


def test_a_detail_that_utf_8_cannot_hold_is_still_told() -> None:
    assert orjson.loads(problem(MalformedBody("bad \ud800 here"), "abc")[2])["detail"] == "bad ? here"


@pytest.mark.parametrize(
    ("kind", "status"), [(MalformedBody, 400), (InvalidItem, 400), (QueueFull, 429), (PhalanxError, 500)]
)
def test_the_open_inference_protocol_has_one_member_and_no_422(kind: type[PhalanxError], status: int) -> None:
    got, headers, body = plain(kind("x"), "abc")
    assert (got, body) == (status, b'{"error":"x"}')
    assert (b"content-type", b"application/json") in headers
    assert ((b"retry-after", b"1") in headers) == (status == 429)


def test_the_path_decides_how_an_error_is_told() -> None:
    assert [told(path) for path in ("/v2", "/v2/models/x/infer", "/v2x", "/infer")] == [plain, plain, problem, problem]
