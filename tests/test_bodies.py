"""What else a client may POST to /infer: files, lines, compressed bodies; and answers that stream."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.service import Service, serving, until

pytestmark = pytest.mark.timeout(60)

LINES = {"content-type": "application/x-ndjson"}
JSON = {"content-type": "application/json"}


def ndjson(items: list) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def post_lines(service: Service, body: bytes, **headers: str) -> httpx.Response:
    return service.client.post("/infer", content=body, headers=LINES | headers)


def answers(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.split("\n") if line]


# ---- lines


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_lines_are_answered_in_lines_in_order(obedient: Service, count: int) -> None:
    items = [{"n": i, "é": "\u2028"} for i in range(count)]
    found = answers(post_lines(obedient, ndjson(items)))
    assert found == [{"index": i, "output": item} for i, item in enumerate(items)]


def test_line_ends_of_any_kind_blank_lines_and_no_last_end(obedient: Service) -> None:
    found = answers(post_lines(obedient, b'\n 1 \r\n\r\n"two"\n\n\t[3]'))
    assert found == [{"index": 0, "output": 1}, {"index": 1, "output": "two"}, {"index": 2, "output": [3]}]


def test_the_first_lines_arrive_while_later_ones_run(obedient: Service, tmp_path: Path) -> None:
    path = tmp_path / "go"
    items: list = [*range(500), {"do": "await", "path": str(path)}]
    with obedient.client.stream("POST", "/infer", content=ndjson(items), headers=LINES) as response:
        stream = response.iter_lines()
        early = [json.loads(next(stream)) for _ in range(128)]
        assert early == [{"index": i, "output": i} for i in range(128)]
        path.touch()
        late = [json.loads(line) for line in stream]
    assert [one["index"] for one in early + late] == list(range(501))


def test_a_line_that_is_not_json_fails_alone(obedient: Service) -> None:
    body = b'1\n{"a":\n"\xff"\n[1,2\n3],[4\n{"do":"raise","n":9}\n6\nnope'
    found = answers(post_lines(obedient, body))
    assert [one["index"] for one in found] == list(range(8))
    assert {one["index"]: one["output"] for one in found if "output" in one} == {0: 1, 6: 6}
    errors = {one["index"]: one["error"] for one in found if "error" in one}
    assert {i: error["type"] for i, error in errors.items()} == {
        **dict.fromkeys((1, 2, 3, 4, 7), "invalid-item"),
        5: "model-error",
    }
    assert "not JSON" in errors[1]["detail"]


def test_a_line_that_is_nested_too_deep_fails_alone(obedient: Service) -> None:
    for depth in (70, 2000):
        found = answers(post_lines(obedient, b"1\n" + b"[" * depth + b"]" * depth + b"\n3\n"))
        assert [one.get("output") for one in found] == [1, None, 3]
        assert found[1]["error"]["type"] == "invalid-item"


def test_lines_of_numbers_do_not_bleed_into_their_neighbours(double: Service) -> None:
    body = b"[1,2,3]\n[4,5\n6],[7,8,9]\n[0,0,1]\n"
    found = answers(post_lines(double, body))
    assert [one.get("output") for one in found] == [[2, 4, 6], None, None, [0, 0, 2]]


def test_lines_answered_as_json_keep_their_places(obedient: Service) -> None:
    answer = post_lines(obedient, b"1\nnope\n2\n", accept="application/json")
    assert answer.status_code == 207
    assert answer.json()["outputs"] == [1, None, 2]
    assert [error["index"] for error in answer.json()["errors"]] == [1]
    answer = post_lines(obedient, b"nope\nneither\n", accept="application/json")
    assert answer.status_code == 422
    assert [error["index"] for error in answer.json()["errors"]] == [0, 1]


def test_lines_answered_as_npy_and_json_answered_as_lines(double: Service) -> None:
    answer = post_lines(double, b"[1,2,3]\n[4,5,6]\n", accept="application/x-npy")
    assert np.load(io.BytesIO(answer.content)).tolist() == [[2, 4, 6], [8, 10, 12]]
    answer = double.client.post(
        "/infer", json={"inputs": [[1, 2, 3], [1], [4, 5, 6]]}, headers={"accept": "application/x-ndjson"}
    )
    first, second, third = answers(answer)
    assert (first["output"], third["output"]) == ([2, 4, 6], [8, 10, 12])
    assert second["error"]["type"] == "invalid-item"


def test_what_fails_before_the_first_line_has_its_status(obedient: Service) -> None:
    answer = post_lines(obedient, ndjson(list(range(10_001))))
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:phalanx:error:too-large")
    answer = obedient.client.post(
        "/infer", json={"inputs": [1], "parameters": {"no": 1}}, headers={"accept": "application/x-ndjson"}
    )
    assert answer.status_code == 422
    answer = post_lines(obedient, b'{"do":"sleep","seconds":1}\n', **{"x-request-timeout": "0.2"})
    assert answer.status_code == 504


def test_a_deadline_that_passes_on_the_way_is_each_late_lines_error(obedient: Service) -> None:
    items = [*range(128), *[{"do": "sleep", "seconds": 4}] * 2, b"broken"]
    body = ndjson(items[:-1]) + b"broken\n"
    found = answers(post_lines(obedient, body, **{"x-request-timeout": "3"}))
    assert [one["index"] for one in found] == list(range(131))
    assert [one["output"] for one in found[:128]] == list(range(128))
    assert [one["error"]["type"] for one in found[128:]] == ["deadline-exceeded"] * 2 + ["invalid-item"]


def test_a_client_that_goes_away_inside_its_answer_is_given_up(obedient: Service, tmp_path: Path) -> None:
    before = obedient.metric('phalanx_aborted_requests_total{during="wait"}')
    items: list = [*range(128), {"do": "await", "path": str(tmp_path / "go")}]
    with obedient.client.stream("POST", "/infer", content=ndjson(items), headers=LINES) as response:
        next(response.iter_lines())
    until(lambda: obedient.metric('phalanx_aborted_requests_total{during="wait"}') == before + 1)
    (tmp_path / "go").touch()
    assert obedient.outputs([1]) == [1]
    until(lambda: obedient.info()["queue"]["bytes"] == 0)


# ---- files


def test_files_are_items_in_order_with_their_names(obedient: Service) -> None:
    rng = random.Random(0)
    data = [rng.randbytes(rng.choice([0, 1, 100, 70_000])) + b"\r\n--x\r\n" for _ in range(50)]
    names = [f"né {i}.bin" if i % 2 else f"{i}.png" for i in range(50)]
    files = [("files", (name, one, "application/octet-stream")) for name, one in zip(names, data, strict=True)]
    answer = obedient.client.post("/infer", files=files)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [
        {"name": name, "size": len(one), "digest": hashlib.sha256(one).hexdigest()}
        for name, one in zip(names, data, strict=True)
    ]


def test_parameters_of_files_reach_the_model(obedient: Service) -> None:
    files = [("parameters", (None, '{"rank": 0, "sleep": 0.3}')), ("file", ("a", b"x"))]
    answer = obedient.client.post("/infer", files=files)
    assert [one["name"] for one in answer.json()["outputs"]] == ["a"]
    assert float(answer.headers["server-timing"].split("forward;dur=")[1].split(",")[0]) >= 300
    answer = obedient.client.post("/infer", files=[("parameters", (None, '{"no": 1}')), ("file", ("a", b"x"))])
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:phalanx:error:invalid-parameters")


def test_files_answered_in_lines(obedient: Service) -> None:
    answer = obedient.client.post(
        "/infer", files=[("f", ("a", b"1")), ("f", ("b", b"2"))], headers={"accept": "application/x-ndjson"}
    )
    assert [one["output"]["name"] for one in answers(answer)] == ["a", "b"]


def test_a_tensor_model_refuses_files_each(double: Service) -> None:
    answer = double.client.post("/infer", files=[("f", ("a", b"1"))])
    assert answer.status_code == 422
    assert "the item is a file; the model takes float32[3]" in answer.json()["errors"][0]["detail"]


BOUNDARY = {"content-type": "multipart/form-data; boundary=xx"}


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (b"--xx--\r\n", {"content-type": "multipart/form-data"}, "names no boundary"),
        (b"", BOUNDARY, "ends too early"),
        (b"no multipart", BOUNDARY, "cannot be read"),
        (b'--xx\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\nabc', BOUNDARY, "ends too early"),
        (
            b'--xx\r\nContent-Disposition: form-data; name="f"\r\n\r\nabc\r\n--xx--\r\n',
            BOUNDARY,
            "'f' has no file name",
        ),
        (b"--xx\r\nContent-Type: text/plain\r\n\r\nabc\r\n--xx--\r\n", BOUNDARY, "part 0 has no Content-Disposition"),
        (
            b'--xx\r\nContent-Disposition: form-data; name="parameters"\r\n\r\n[1]\r\n--xx--\r\n',
            BOUNDARY,
            "the part 'parameters'",
        ),
    ],
)
def test_a_broken_multipart_body_is_400_and_says_what_is_wrong(
    obedient: Service, body: bytes, headers: dict[str, str], said: str
) -> None:
    answer = obedient.client.post("/infer", content=body, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:phalanx:error:malformed-body")
    assert said in answer.json()["detail"]


def test_too_many_files_are_413(obedient: Service) -> None:
    part = b'--xx\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n\r\n'
    answer = obedient.client.post("/infer", content=part * 10_001 + b"--xx--\r\n", headers=BOUNDARY)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:phalanx:error:too-large")


def test_a_boundary_that_is_too_long_is_400(obedient: Service) -> None:
    answer = obedient.client.post(
        "/infer", content=b"--x", headers={"content-type": f"multipart/form-data; boundary={'b' * 300}"}
    )
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:phalanx:error:malformed-body")


# ---- compressed bodies


def members(text: bytes) -> bytes:
    return gzip.compress(text[:10]) + gzip.compress(text[10:])


@pytest.mark.parametrize("compress", [gzip.compress, members])
@pytest.mark.parametrize("count", [3, 9000])
def test_a_gzip_body_is_expanded(double: Service, compress, count: int) -> None:
    rows = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    headers = JSON | {"content-encoding": "gzip"}
    body = compress(json.dumps({"inputs": rows.tolist()}).encode())
    answer = double.client.post("/infer", content=body, headers=headers)
    assert np.array_equal(np.float32(answer.json()["outputs"]), 2 * rows)

    def pieces() -> Iterator[bytes]:  # chunked
        yield body[:7]
        yield body[7:]

    answer = double.client.post("/infer", content=pieces(), headers=headers)
    assert len(answer.json()["outputs"]) == count


@pytest.mark.parametrize("body", [b"", b"no gzip", gzip.compress(b'{"inputs":[1]}')[:-9], zlib.compress(b"{}")])
def test_a_body_that_is_no_gzip_is_400(double: Service, body: bytes) -> None:
    answer = double.client.post("/infer", content=body, headers=JSON | {"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:phalanx:error:malformed-body")


def test_a_small_body_that_grows_beyond_the_limit_is_413_before_it_is_expanded(double: Service) -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    assert len(bomb) < 1 << 20
    answer = double.client.post("/infer", content=bomb, headers=JSON | {"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:phalanx:error:too-large")
    assert "expanded" in answer.json()["detail"]
    until(lambda: double.info()["queue"]["bytes"] == 0)


def test_a_body_of_very_many_members_is_refused_soon(double: Service) -> None:
    answer = double.client.post(
        "/infer", content=gzip.compress(b"") * 50_000, headers=JSON | {"content-encoding": "gzip"}, timeout=5
    )
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:phalanx:error:malformed-body")
    assert "members" in answer.json()["detail"]


def test_who_sends_gzip_and_takes_it_gets_it(double: Service) -> None:
    rows = [[1, 2, 3]] * 500
    body = gzip.compress(json.dumps({"inputs": rows}).encode())
    answer = double.client.post(
        "/infer", content=body, headers=JSON | {"content-encoding": "gzip", "accept-encoding": "gzip"}
    )
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) < 500
    assert answer.json()["outputs"] == [[2, 4, 6]] * 500
    answer = double.client.post(
        "/infer", content=body, headers=JSON | {"content-encoding": "gzip", "accept-encoding": "gzip;q=0"}
    )
    assert "content-encoding" not in answer.headers
    answer = double.client.post("/infer", json={"inputs": rows}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in answer.headers


@pytest.mark.long
def test_with_a_size_set_larger_answers_are_compressed_for_all_that_take_it() -> None:
    with serving("Obedient", ranks=1, compress_from=1000) as service:
        answer = service.infer(["x" * 2000])
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["vary"] == "Accept-Encoding"
        assert answer.json()["outputs"] == ["x" * 2000]
        assert "content-encoding" not in service.infer([1]).headers
        answer = service.client.post("/infer", json={"inputs": ["x" * 2000]}, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in answer.headers
        answer = service.client.post(
            "/infer", json={"inputs": ["x" * 2000]}, headers={"accept": "application/x-ndjson"}
        )
        assert answer.text == json.dumps({"index": 0, "output": "x" * 2000}, separators=(",", ":")) + "\n"
