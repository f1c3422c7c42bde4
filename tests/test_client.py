"""`app.client` as its users meet it: on real services, and on sockets that refuse, drop and stall."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from app.call import Ask, Call, Policy
from app.chunks import Chunk
from app.client import AsyncClient, Client, File, ItemError, ItemsFailed, RequestError, StrangeAnswer, Unreachable
from tests.service import Service, free_port, samples
from tests.stub import Seen, Stub, drop, echo, problem, stub
from workers.errors import (
    DeadlineExceeded,
    Draining,
    InvalidItem,
    InvalidParameters,
    ModelError,
    NoSuchModel,
    QueueFull,
)

pytestmark = pytest.mark.timeout(60)

RAISE = {"do": "raise", "n": 1}


@pytest.fixture
def told() -> Iterator[Stub]:
    with stub() as service:
        yield service


def client(service: Service | Stub, **given: object) -> Client:
    return Client(service.url if isinstance(service, Stub) else str(service.client.base_url), **given)


# ---- on a real service


def test_the_shipped_digits_come_back_in_order(digits: Service) -> None:
    images, labels = samples()
    with client(digits) as phalanx:
        assert [output["digit"] for output in phalanx.infer(images)] == labels


def test_an_array_is_answered_by_an_array_over_several_requests(double: Service) -> None:
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    with client(double, chunk_items=4) as phalanx:
        answer = phalanx.infer(rows)
        assert isinstance(answer, np.ndarray)
        assert answer.dtype == np.float32
        assert np.array_equal(answer, rows * 2)
        assert np.array_equal(list(phalanx.map(rows, concurrency=2)), rows * 2)
        assert phalanx.infer(rows[:0]).shape[0] == 0
    with client(double, chunk_bytes=25) as phalanx:
        assert np.array_equal(phalanx.infer(rows), rows * 2)


def test_an_array_is_answered_by_a_list_where_the_results_are_no_rows(digits: Service) -> None:
    images, labels = samples()
    with client(digits) as phalanx:
        for _ in range(2):
            assert [output["digit"] for output in phalanx.infer(np.array(images, np.float32))] == labels
        assert not phalanx._policy.npy  # the second time it did not try


def test_failed_items_are_told_by_their_place_in_the_callers_list(obedient: Service) -> None:
    items = [RAISE if i in (1, 5, 8) else i for i in range(9)]
    with client(obedient, chunk_items=4) as phalanx:
        with pytest.raises(ItemsFailed, match="3 of 9 items failed; item 1: The model failed") as caught:
            phalanx.infer(items, request_id="mine")
        assert caught.value.outputs == [0, None, 2, 3, 4, None, 6, 7, None]
        assert {i: type(error) for i, error in caught.value.errors.items()} == dict.fromkeys((1, 5, 8), ModelError)
        assert "as told by item 1" in caught.value.errors[5].detail
        assert (caught.value.status, caught.value.type, caught.value.request_id) == (207, "items-failed", "mine")
        outputs, errors = phalanx.outcomes(items)
        assert outputs == caught.value.outputs
        assert list(errors) == [1, 5, 8]
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (copy.outputs, str(copy)) == (caught.value.outputs, str(caught.value))


def test_items_all_of_which_fail_are_told_like_some(obedient: Service) -> None:
    with client(obedient) as phalanx, pytest.raises(ItemsFailed) as caught:
        phalanx.infer([RAISE, RAISE])
    assert caught.value.outputs == [None, None]
    assert list(caught.value.errors) == [0, 1]


def test_parameters_arrive_and_wrong_ones_refuse_the_whole_request(obedient: Service) -> None:
    with client(obedient) as phalanx:
        assert phalanx.infer([1], parameters={"sleep": 0.001}) == [1]
        with pytest.raises(InvalidParameters, match="nope") as caught:
            phalanx.infer([1], parameters={"nope": 1})
    assert isinstance(caught.value, RequestError)
    assert (caught.value.status, caught.value.type) == (422, "invalid-parameters")


def test_a_deadline_is_the_services_own_answer(obedient: Service) -> None:
    with client(obedient) as phalanx, pytest.raises(DeadlineExceeded) as caught:
        phalanx.infer([{"do": "sleep", "seconds": 0.6}], timeout=0.1, request_id="late")
    assert (caught.value.status, caught.value.request_id) == (504, "late")


def test_map_reads_an_endless_iterable_no_further_than_it_must(obedient: Service) -> None:
    read = 0

    def numbers() -> Iterator[object]:
        nonlocal read
        for read in itertools.count():
            yield RAISE if read == 7 else read

    with client(obedient) as phalanx:
        results = phalanx.map(numbers(), concurrency=3, chunk_items=5)
        first = list(itertools.islice(results, 40))
        assert read < 40 + 4 * 5
        results.close()
    assert first[:7] + first[8:] == [*range(7), *range(8, 40)]
    assert isinstance(first[7], ModelError)


def test_threads_share_a_client(obedient: Service) -> None:
    answers: dict[int, object] = {}
    with client(obedient, chunk_items=3) as phalanx:
        threads = [threading.Thread(target=lambda n=n: answers.update({n: phalanx.infer([n] * 10)})) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {n: [n] * 10 for n in range(8)}


def test_the_asynchronous_client_does_the_same(obedient: Service, double: Service) -> None:
    async def numbers() -> AsyncIterator[int]:
        for n in itertools.count():
            yield n

    async def scene() -> None:
        async with AsyncClient(str(obedient.client.base_url), chunk_items=4) as phalanx:
            assert await phalanx.infer(list(range(10))) == list(range(10))
            with pytest.raises(ItemsFailed) as caught:
                await phalanx.infer([0, 1, 2, 3, 4, RAISE])
            assert list(caught.value.errors) == [5]
            outputs, errors = await phalanx.outcomes([RAISE, 1])
            assert (outputs, list(errors)) == ([None, 1], [0])
            got = []
            async for outcome in phalanx.map(numbers(), concurrency=2):
                got.append(outcome)
                if len(got) == 30:
                    break
            assert got == list(range(30))
            assert [outcome async for outcome in phalanx.map(range(9))] == list(range(9))
        async with AsyncClient(str(double.client.base_url), chunk_items=2) as phalanx:
            rows = np.ones((5, 3), np.float32)
            assert np.array_equal(await phalanx.infer(rows), rows * 2)

    asyncio.run(scene())


# ---- refusals and faults


def test_what_a_request_carries(told: Stub) -> None:
    with client(told, api_key="secret", chunk_items=2) as phalanx:
        assert phalanx.infer([1, 2, 3], request_id="mine", timeout=7, parameters={"a": 1}) == [1, 2, 3]
    first, second = sorted(told.seen, key=lambda seen: seen.headers["x-request-id"])
    assert first.headers["authorization"] == "Bearer secret"
    assert 6 < float(first.headers["x-request-timeout"]) <= 7
    assert [one.headers["x-request-id"] for one in (first, second)] == ["mine", "mine-2"]
    assert (first.items, second.items, second.parameters) == ([1, 2], [3], {"a": 1})


@pytest.mark.parametrize(
    "fault",
    [
        drop,
        problem(429, "queue-full", retry_after="0"),
        problem(503, "draining", retry_after="0"),
        lambda seen: (503, {"retry-after": "0"}, b"Too many connections."),
        lambda seen: (502, {"retry-after": "0"}, b"<html>Bad gateway</html>"),
    ],
)
def test_a_request_is_sent_again_after(told: Stub, fault: object) -> None:
    told.script.extend([fault, fault])
    with client(told) as phalanx:
        assert phalanx.infer(["a", "b"]) == ["a", "b"]
    assert [seen.items for seen in told.seen] == [["a", "b"]] * 3
    assert len({seen.headers["x-request-id"] for seen in told.seen}) == 1


def test_the_asynchronous_client_sends_again_too(told: Stub) -> None:
    async def scene() -> None:
        told.script.extend([drop, problem(429, "queue-full", retry_after="0")])
        async with AsyncClient(told.url) as phalanx:
            assert await phalanx.infer([1]) == [1]

    asyncio.run(scene())


def test_retry_after_is_waited_for(told: Stub) -> None:
    told.script.append(problem(429, "queue-full", retry_after="1"))
    began = time.monotonic()
    with client(told) as phalanx:
        assert phalanx.infer([1]) == [1]
    assert 1 <= time.monotonic() - began < 5


def test_after_the_last_retry_the_error_is_raised(told: Stub) -> None:
    told.always = problem(503, "draining", retry_after="0")
    with client(told, retries=2) as phalanx, pytest.raises(Draining, match="why") as caught:
        phalanx.infer([1])
    assert len(told.seen) == 3
    error = caught.value
    assert (error.status, error.type, error.title, error.detail) == (503, "draining", "The draining", "why")
    assert (error.request_id, error.retry_after) == ("of-the-stub", 0)


def test_what_would_pass_the_timeout_is_not_waited_for(told: Stub) -> None:
    told.always = problem(429, "queue-full", retry_after="30")
    began = time.monotonic()
    with client(told) as phalanx, pytest.raises(QueueFull):
        phalanx.infer([1], timeout=10)
    assert time.monotonic() - began < 5


def test_a_refused_connection_is_tried_again_and_then_raised() -> None:
    with Client(f"http://127.0.0.1:{free_port()}", retries=1) as phalanx, pytest.raises(Unreachable, match="refused"):
        phalanx.infer([1])


def test_a_service_that_never_answers_costs_no_more_than_the_timeout(told: Stub) -> None:
    gone = threading.Event()
    told.always = lambda seen: gone.wait(20) and None
    began = time.monotonic()
    with client(told) as phalanx, pytest.raises(DeadlineExceeded):
        phalanx.infer([1], timeout=0.2)
    assert time.monotonic() - began < 5
    assert len(told.seen) == 1
    gone.set()


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"content-type": "text/html"}, b"<html>Welcome</html>"),
        (200, {"content-type": "application/json"}, b'{"outputs": [1, 2, 3]}'),
        (200, {"content-type": "application/x-npy"}, b"\x93NUMPY"),
        (207, {}, b'{"outputs": [null], "errors": [{"index": 4, "type": "model-error"}]}'),
        (404, {}, b'{"type": "about:blank", "title": "Not Found"}'),
        (307, {"location": "https://example.org/"}, b""),
    ],
)
def test_an_answer_that_is_not_of_phalanx_is_no_result(told: Stub, answer: tuple) -> None:
    told.always = lambda seen: answer
    with client(told) as phalanx, pytest.raises(StrangeAnswer) as caught:
        phalanx.infer([1])
    assert caught.value.status == answer[0]
    assert len(told.seen) == 1


def test_a_chunk_over_the_services_limits_is_halved_and_what_is_too_large_fails_alone(told: Stub) -> None:
    def at_most_two(seen: Seen) -> tuple:
        fits = len(seen.items) <= 2 and "big" not in seen.items
        return echo(seen) if fits else problem(413, "too-large")(seen)

    told.always = at_most_two
    with client(told) as phalanx:
        assert phalanx.infer(list(range(9))) == list(range(9))
        outputs, errors = phalanx.outcomes([0, 1, "big", 3, 4])
    assert outputs == [0, 1, None, 3, 4]
    assert (errors[2].type, errors[2].status) == ("too-large", 413)
    assert isinstance(errors[2], ItemError)


def test_an_error_that_is_not_known_keeps_what_it_says(told: Stub) -> None:
    errors = [{"index": 0, "type": "out-of-luck", "title": "Out of luck", "detail": "Friday"}]
    told.always = lambda seen: (207, {}, json.dumps({"outputs": [None, 1], "errors": errors}).encode())
    with client(told) as phalanx:
        _, told_errors = phalanx.outcomes([0, 1])
    assert (told_errors[0].type, told_errors[0].title, str(told_errors[0])) == ("out-of-luck", "Out of luck", "Friday")


def test_in_an_answer_of_arrays_with_failures_the_rest_are_arrays(told: Stub) -> None:
    errors = [{"index": 1, "type": "model-error", "title": "", "detail": ""}]
    told.always = lambda seen: (207, {}, json.dumps({"outputs": [[1.0], None, [3.0]], "errors": errors}).encode())
    with client(told) as phalanx:
        outputs, _ = phalanx.outcomes(np.zeros((3, 1)))
    assert outputs[1] is None
    assert np.array_equal(outputs[2], np.array([3.0]))


# ---- what is sent


def test_files_are_parts_of_a_form_in_order(told: Stub, tmp_path: Path) -> None:
    path = tmp_path / 'a "quoted" name.png'
    path.write_bytes(b"\x89PNG\r\n--\0")
    with client(told, chunk_bytes=20) as phalanx:
        outputs = phalanx.infer([path, File("b.txt", b"text"), File("c.bin", bytes(15))], parameters={"size": 3})
    assert outputs == ["a %22quoted%22 name.png", "b.txt", "c.bin"]
    told.seen.sort(key=lambda seen: len(seen.headers["x-request-id"]))
    assert told.seen[0].items == [("a %22quoted%22 name.png", b"\x89PNG\r\n--\0"), ("b.txt", b"text")]
    assert told.seen[1].items == [("c.bin", bytes(15))]
    assert {seen.parameters["size"] for seen in told.seen} == {3}


def test_arrays_within_items_are_json(told: Stub) -> None:
    with client(told) as phalanx:
        assert phalanx.infer([np.float32(0.1), {"a": np.eye(2, dtype=int).T}, ()]) == [0.1, {"a": [[1, 0], [0, 1]]}, []]


def test_an_item_that_cannot_be_sent_fails_alone(told: Stub, tmp_path: Path) -> None:
    with client(told, chunk_items=2) as phalanx:
        outputs, errors = phalanx.outcomes([1, object(), tmp_path / "missing", object(), 5, File("", b"")])
        assert outputs == [1, None, None, None, 5, None]
        assert all(isinstance(error, InvalidItem) for error in errors.values())
        assert "missing" in errors[2].detail
        assert list(errors) == [1, 2, 3, 5]


def test_no_items_need_no_request(told: Stub) -> None:
    with client(told) as phalanx:
        assert phalanx.infer([]) == []
        assert list(phalanx.map(iter(()))) == []
    assert told.seen == []


@pytest.mark.parametrize(
    ("items", "given", "error"),
    [
        ("one", {}, TypeError),
        (File("one", b""), {}, TypeError),
        (np.array(["a"]), {}, TypeError),
        (np.array(1.0), {}, TypeError),
        (np.ones((2, 2)), {"parameters": {"a": 1}}, ValueError),
        ([1], {"timeout": 0}, ValueError),
    ],
)
def test_what_no_request_can_say_is_refused_at_once(told: Stub, items: object, given: dict, error: type) -> None:
    with client(told) as phalanx, pytest.raises(error):
        phalanx.infer(items, **given)
    assert told.seen == []


# ---- when to ask again, without a clock


def refused(call: Call, answer: httpx.Response | httpx.TransportError, now: float = 0.0) -> float:
    call.request(now)
    call.settle(answer, now)
    return call.pause


def a_call(timeout: float = 60.0, retries: int = 6) -> Call:
    return Ask(Policy(timeout, retries, 8, 800), [1], None, None, None).call(Chunk([b"1"]))


def test_pauses_grow_and_are_never_the_same() -> None:
    call = a_call(timeout=1000)
    pauses = [refused(call, httpx.ReadError("reset")) for _ in range(6)]
    assert all(low <= pause <= 2 * low for low, pause in zip((0.125, 0.25, 0.5, 1, 2, 4), pauses, strict=True))
    with pytest.raises(Unreachable, match="ReadError: reset"):
        refused(call, httpx.ReadError("reset"))
    assert len({refused(a_call(), httpx.ReadError("reset")) for _ in range(9)}) > 1


def test_a_date_in_retry_after_is_no_number_of_seconds() -> None:
    answer = httpx.Response(503, headers={"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}, content=b"")
    assert 0.125 <= refused(a_call(), answer) <= 0.25


def test_the_time_left_shrinks_with_every_try() -> None:
    call = a_call(timeout=10)
    refused(call, httpx.ReadError("reset"), now=100.0)
    assert call.request(104.0)["headers"]["x-request-timeout"] == "6.000"
    with pytest.raises(Unreachable):
        call.settle(httpx.ReadError("reset"), 109.99)


def test_a_fault_on_this_side_is_not_tried_again() -> None:
    with pytest.raises(httpx.LocalProtocolError):
        refused(a_call(), httpx.LocalProtocolError("no such header"))


def test_files_reach_a_real_model_with_their_names_and_parameters(obedient: Service, tmp_path: Path) -> None:
    path = tmp_path / "second.bin"
    path.write_bytes(b"\r\n--b\r\n")
    with Client(str(obedient.client.base_url), chunk_items=2) as client:
        found = client.infer([File("né.png", b"1"), path, File("third", b"")], parameters={"sleep": 0})
    assert [(one["name"], one["size"]) for one in found] == [("né.png", 1), ("second.bin", 7), ("third", 0)]


def test_nan_is_refused_and_not_sent_as_null(told: Stub) -> None:
    with client(told) as phalanx:
        outputs, errors = phalanx.outcomes([1, float("nan"), {"a": [np.float32("inf")]}, None])
        assert outputs == [1, None, None, None]
        assert sorted(errors) == [1, 2]
        assert "NaN" in errors[1].detail
        with pytest.raises(ValueError, match="NaN"):
            phalanx.infer([1], parameters={"sleep": float("nan")})
    with pytest.raises(ValueError, match="not the address"):
        Client("127.0.0.1:8000")


def test_a_client_of_one_of_several_models_names_it_in_every_request(told: Stub) -> None:
    with Client(told.url, model="A&b=%c", chunk_items=1) as client:
        assert client.infer([1, 2]) == [1, 2]

    async def scene() -> None:
        async with AsyncClient(told.url, model="A&b=%c") as client:
            assert await client.infer([3]) == [3]

    asyncio.run(scene())
    assert {seen.path for seen in told.seen} == {"/infer?model=A%26b%3D%25c"}
    assert len(told.seen) == 3


def test_a_model_that_is_not_there_is_not_asked_for_again(told: Stub) -> None:
    told.script.append(problem(404, "no-such-model"))
    with Client(told.url, model="A") as client, pytest.raises(NoSuchModel, match="why"):
        client.infer([1])
