"""`POST /infer` on real groups: order, balance, per-item outcomes, refusals, and going on after each."""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests.service import Service, samples, serving, until

NPY = {"content-type": "application/x-npy"}
JSON = {"content-type": "application/json"}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def post(service: Service, body: bytes, **headers: str):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return service.client.post("/infer", content=body, headers=JSON | names)


def raw(service: Service, request: bytes, *, shut: bool = False) -> bytes:
    """What a bare socket gets for these bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as sock:
        sock.sendall(request)
        if shut:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
        return answer


# ---- order and balance


def test_the_shipped_digits_are_read_right(digits: Service) -> None:
    images, labels = samples()
    outputs = digits.outputs(images)
    assert [output["digit"] for output in outputs] == labels
    assert all(0 < output["score"] <= 1 for output in outputs)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_result_i_is_of_item_i_under_concurrent_clients_of_mixed_sizes(ranks: int) -> None:
    with serving("Jitter", ranks=ranks) as service:

        def client(seed: int) -> None:
            rng = random.Random(seed)
            for n in rng.sample(range(3 * ranks + 2), 3 * ranks + 2) + [rng.randrange(60) for _ in range(8)]:
                items = [rng.randrange(10**6) for _ in range(n)]
                assert service.outputs(items) == [2 * item for item in items]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))


def test_a_batch_is_shared_evenly_and_no_forward_sees_more_than_max_batch_size() -> None:
    with serving("WhichRank", ranks=2) as service:
        answer = service.infer(list(range(8)))
        assert [output["rank"] for output in answer.json()["outputs"]] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert answer.headers["x-phalanx-ranks"] == "0*4,1*4"
        assert service.infer([1]).headers["x-phalanx-ranks"] == "0*1"
        answer = service.infer(list(range(10_000)))
        outputs, told = answer.json()["outputs"], []
        *runs, rest = answer.headers["x-phalanx-ranks"].split(",")
        for rank, count in (run.split("*") for run in runs):
            told += [int(rank)] * int(count)
        assert (len(runs), rest) == (100, "...")
        assert told == [output["rank"] for output in outputs[: len(told)]]
        assert [output["item"] for output in outputs] == list(range(10_000))
        assert max(output["seen"] for output in outputs) == 32


@pytest.mark.long
def test_bodies_that_a_small_ring_has_and_has_no_room_for_are_answered_alike_even_over_a_death() -> None:
    """Two of the six bodies fit into it at a time; a rank is killed with both kinds in flight."""
    with serving("Double", ranks=2, ring_bytes="300KiB", max_batch_size=2048) as service:
        ring = until(lambda: next(iter(service.run_dir.glob("ring-*")), None))

        def client(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(6):
                array = rng.normal(size=(10_000 + seed, 3)).astype(np.float32)
                array = np.asfortranarray(array) if seed % 3 == 0 else array  # which is cut up as it lies in the ring
                answer = service.client.post("/infer", content=npy(array), headers=NPY)
                assert answer.status_code == 200, answer.text
                assert np.array_equal(np.load(io.BytesIO(answer.content)), 2 * array)

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(client, seed) for seed in range(6)]
            until(lambda: service.metric("phalanx_steps_total") > 20)
            os.kill(service.pids()[1], signal.SIGKILL)
            for one in clients:
                one.result()
        assert ring.stat().st_blocks
    assert not ring.exists()


def test_a_body_of_millions_of_items_is_refused_before_they_are_made(obedient: Service) -> None:
    answer = post(obedient, b'{"inputs":[' + b"0," * (2 << 20) + b"0]}")
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:phalanx:error:too-large")
    assert "more than the limit of 10000 items" in answer.json()["detail"]


def test_json_and_npy_give_the_same_numbers(double: Service) -> None:
    array = np.random.default_rng(0).normal(size=(37, 3)).astype(np.float32)
    as_npy = double.client.post("/infer", content=npy(array), headers=NPY)
    assert as_npy.headers["content-type"] == "application/x-npy"
    from_npy = np.load(io.BytesIO(as_npy.content))
    from_json = np.array(double.outputs(array.tolist()), np.float32)
    assert from_npy.dtype == np.float32
    assert np.array_equal(from_npy, 2 * array)
    assert np.array_equal(from_json, from_npy)
    columns = double.client.post("/infer", content=npy(np.asfortranarray(array)), headers=NPY)
    assert columns.content == as_npy.content


def test_the_answer_takes_the_form_that_accept_asks_for(double: Service) -> None:
    body = {"inputs": [[1, 2, 3], [4, 5, 6]]}
    answer = double.client.post("/infer", json=body, headers={"accept": "application/x-npy"})
    assert np.load(io.BytesIO(answer.content)).tolist() == [[2, 4, 6], [8, 10, 12]]
    answer = double.client.post("/infer", content=npy(np.ones((2, 3))), headers=NPY | {"accept": "application/json"})
    assert answer.json()["outputs"] == [[2.0, 2.0, 2.0]] * 2
    assert double.client.post("/infer", json=body, headers={"accept": "text/html"}).status_code == 406


def test_nothing_in_nothing_out(obedient: Service) -> None:
    answer = obedient.infer([])
    assert (answer.status_code, answer.json()["outputs"]) == (200, [])


def test_a_group_that_idles_longer_than_its_collectives_may_wait_still_answers(double: Service) -> None:
    pids = double.pids()
    quiet = time.monotonic() + 6
    until(lambda: time.monotonic() > quiet, 10)
    assert double.outputs([[1, 2, 3]]) == [[2.0, 4.0, 6.0]]
    assert double.pids() == pids


# ---- what comes with an answer


def test_an_answer_carries_its_request_id_and_its_timings(obedient: Service) -> None:
    answer = obedient.client.post("/infer", json={"inputs": [1]}, headers={"x-request-id": "mine-1"})
    assert answer.json()["id"] == answer.headers["x-request-id"] == "mine-1"
    timing = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert set(timing) == {"queue", "forward", "collect", "total"}
    assert float(timing["total"]) >= float(timing["forward"]) >= 0


def test_parameters_reach_predict_and_unknown_ones_are_refused(obedient: Service) -> None:
    assert obedient.outputs(["a"], parameters={"sleep": 0.01}) == ["a"]
    answer = obedient.infer(["a"], parameters={"slep": 1})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:phalanx:error:invalid-parameters"
    assert "'slep'" in answer.json()["detail"]
    assert "sleep" in answer.json()["detail"]


# ---- outcomes per item


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        ({"do": "raise", "n": 7}, "model-error"),
        ({"do": "drop"}, "model-error"),
        ({"do": "double"}, "model-error"),
        ({"do": "lambda"}, "unencodable-result"),
        ({"do": "nan"}, "non-finite-result"),
    ],
)
def test_only_the_item_fails_whose_result_is_bad(obedient: Service, order: dict, kind: str) -> None:
    answer = obedient.infer([*range(40), order, *range(40, 63)])
    assert answer.status_code == 207
    body = answer.json()
    assert body["outputs"] == [*range(40), None, *range(40, 63)]
    assert [(error["index"], error["type"]) for error in body["errors"]] == [(40, kind)]
    assert obedient.outputs(["next"]) == ["next"]


def test_none_an_empty_list_and_five_megabytes_are_results(obedient: Service) -> None:
    size = 5_000_000
    outputs = obedient.outputs([1, {"do": "none"}, {"do": "empty"}, {"do": "big", "bytes": size}, 2])
    assert outputs == [1, None, [], "x" * size, 2]


def test_a_slow_rank_holds_its_step_and_mixes_nothing_up(obedient: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        slow = pool.submit(obedient.outputs, list(range(100)), parameters={"rank": 1, "sleep": 0.3})
        others = [pool.submit(obedient.outputs, [[n, k] for k in range(5)]) for n in range(12)]
        assert slow.result() == list(range(100))
        for n, other in enumerate(others):
            assert other.result() == [[n, k] for k in range(5)]


def test_one_bad_item_among_three_concurrent_clients_fails_alone(digits: Service) -> None:
    images, labels = samples()

    def client(k: int):
        items: list = [*images, *images][:64]
        if k == 1:
            items[20] = "a seven, I think"
        return digits.infer(items)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(client, range(3)))
    assert [answer.status_code for answer in answers] == [200, 207, 200]
    want = [*labels, *labels][:64]
    for k, answer in enumerate(answers):
        got = [output and output["digit"] for output in answer.json()["outputs"]]
        assert got == [None if k == 1 and i == 20 else digit for i, digit in enumerate(want)]
    [error] = answers[1].json()["errors"]
    assert (error["index"], error["type"]) == (20, "invalid-item")


def test_when_every_item_raises_each_has_its_error_and_the_group_lives(obedient: Service) -> None:
    pids = obedient.pids()
    answer = obedient.infer([{"do": "raise", "n": n} for n in range(64)])
    assert answer.status_code == 500
    errors = answer.json()["errors"]
    assert [error["index"] for error in errors] == list(range(64))
    assert all(f"item {error['index']}" in error["detail"] for error in errors)
    assert obedient.pids() == pids


def test_a_non_finite_result_travels_as_it_is_in_npy(double: Service) -> None:
    huge = np.full((2, 3), 3e38, np.float32)
    answer = double.client.post("/infer", content=npy(huge), headers=NPY)
    assert np.isinf(np.load(io.BytesIO(answer.content))).all()
    answer = double.infer([[1, 2, 3], [3e38, 0, 0]])
    assert answer.status_code == 207
    assert answer.json()["errors"][0]["type"] == "non-finite-result"


# ---- refusals


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("null", "null"),
        ('"four"', "str"),
        ("[[1,2],[3,4]]", "array"),
        (json.dumps(list(range(16)) * 4 + [1]), "65"),
        ("[" + "1," * 63 + "1e400]", "range"),
        ("[" + "1," * 63 + "1e39]", "finite"),
        ("[" + "1," * 63 + "9" * 400 + "]", ""),
        ("[" + "1," * 63 + "17]", "0"),
        ("[" + "1," * 63 + "true]", "bool"),
    ],
)
def test_an_item_that_the_model_does_not_take_is_422_with_the_reason(digits: Service, item: str, said: str) -> None:
    answer = post(digits, b'{"inputs": [%s]}' % item.encode())
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "urn:phalanx:error:invalid-item"
    assert said in problem["detail"]
    assert problem["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"inputs": [[1, 2',
        b'{"inputs": [1,]}',
        b'{"inputs": ["\\q"]}',
        b'{"inputs": ["\xff"]}',
        b'{"inputs": [NaN]}',
        b'{"input": [1]}',
        b'{"inputs": {"a": 1}}',
        b"[1, 2]",
        b'{"inputs": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
    ],
)
def test_a_broken_body_is_400_and_the_service_goes_on(obedient: Service, body: bytes) -> None:
    started = time.monotonic()
    answer = post(obedient, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "urn:phalanx:error:malformed-body"
    assert time.monotonic() - started < 1
    assert obedient.outputs(["next"]) == ["next"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-pickle"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-encoding": "br"}, 415),
        ({"accept": "image/png"}, 406),
        ({"x-request-timeout": "soon"}, 400),
        ({"x-request-timeout": "-1"}, 400),
    ],
)
def test_headers_that_cannot_be_served_are_refused(obedient: Service, headers: dict[str, str], status: int) -> None:
    answer = obedient.client.post("/infer", content=b'{"inputs": [1]}', headers=JSON | headers)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_npy_with_objects_is_refused_unread(double: Service) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    answer = double.client.post("/infer", content=file.getvalue(), headers=NPY)
    assert answer.status_code == 400
    assert "object" in answer.json()["detail"]


def test_too_many_items_and_too_many_bytes_are_413(obedient: Service) -> None:
    answer = obedient.infer([0] * 10_001)
    assert answer.status_code == 413
    assert "10000" in answer.json()["detail"]
    head = b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n"
    assert raw(obedient, head, shut=True).startswith(b"HTTP/1.1 413")


def test_a_body_that_stops_coming_is_408_and_the_connection_closes(obedient: Service) -> None:
    head = b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    answer = raw(obedient, head + b'{"inputs": [1')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()
    assert obedient.outputs(["next"]) == ["next"]


def test_a_body_cut_by_a_closed_connection_reaches_no_queue_and_is_counted(obedient: Service) -> None:
    before = obedient.metric("phalanx_aborted_requests_total")
    steps = obedient.metric("phalanx_steps_total")
    with socket.create_connection(("127.0.0.1", obedient.port)) as sock:
        sock.sendall(
            b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
    until(lambda: obedient.metric("phalanx_aborted_requests_total") == before + 1, 5)
    assert obedient.metric("phalanx_steps_total") == steps
    assert obedient.info()["queue"] == {"items": 0, "bytes": 0, "waiting_items": 0}


def test_what_is_not_http_gets_a_plain_400(obedient: Service) -> None:
    assert raw(obedient, b"\x16\x03\x01 this is not HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert obedient.outputs(["next"]) == ["next"]


def test_a_deadline_is_kept_and_the_late_items_are_dropped(obedient: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(obedient.outputs, list(range(4)), parameters={"sleep": 1.0})
        until(lambda: obedient.info()["queue"]["items"] == 4)
        started = time.monotonic()
        answer = obedient.client.post("/infer", json={"inputs": ["late"] * 200}, headers={"x-request-timeout": "0.2"})
        assert answer.status_code == 504
        assert answer.json()["type"] == "urn:phalanx:error:deadline-exceeded"
        assert time.monotonic() - started < 0.8
        assert slow.result() == list(range(4))
    assert obedient.info()["queue"]["items"] == 0


# ---- what else is served


def test_unknown_paths_and_methods_are_problems(digits: Service) -> None:
    for answer, status in ((digits.client.get("/nothing"), 404), (digits.client.get("/infer"), 405)):
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status


def test_health_info_and_docs(digits: Service) -> None:
    assert digits.client.get("/livez").json() == {"status": "alive"}
    assert digits.client.get("/readyz").json() == {"status": "ready"}
    info = digits.info()
    assert info["groups"]["0"]["model"]["inputs"] == {"dtype": "float32", "shape": [64]}
    assert [rank["device"] for rank in info["groups"]["0"]["ranks"]] == ["cpu", "cpu"]
    schema = digits.client.get("/openapi.json").json()
    assert {"/infer", "/livez", "/readyz", "/info", "/metrics"} <= set(schema["paths"])
    page = digits.client.get("/docs").text
    assert "http://" not in page.replace(f"http://127.0.0.1:{digits.port}", "")
    assert "https://" not in page


def test_a_rank_runs_the_next_step_while_another_has_not_finished_the_one_before(
    obedient: Service, tmp_path: Path
) -> None:
    flag = str(tmp_path / "flag")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        # rank 1 waits in the first step for what rank 0 does in the second; their parameters keep them apart
        first = pool.submit(obedient.outputs, ["a", {"do": "await", "path": flag}])
        until(lambda: obedient.info()["queue"] | {"bytes": 0} == {"items": 2, "bytes": 0, "waiting_items": 0})
        second = pool.submit(obedient.outputs, [{"do": "touch", "path": flag}, "b"], parameters={"sleep": 0.0})
        assert second.result(20)[1] == "b"
        assert first.result(20)[0] == "a"


@pytest.mark.long
def test_a_model_whose_ranks_talk_to_one_another_is_not_disturbed_by_the_collect() -> None:
    with serving("Together", ranks=2) as service, concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(service.outputs, list(range(4))) for _ in range(200)]
        assert all(answer.result(60) == [2] * 4 for answer in answers)
