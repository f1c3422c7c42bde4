"""The Open Inference Protocol: `app.tensors` alone, Triton's own client, each rule of the protocol by hand, noise."""

from __future__ import annotations

import concurrent.futures
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from app import tensors
from app.outputs import Span
from tests.service import Service, samples, serving, until
from workers.errors import MalformedBody, NonFiniteResult, TooLarge, UnencodableResult
from workers.ring import Block, Ring
from workers.wire import Place

pytestmark = pytest.mark.timeout(60)

MODEL = "/v2/models/Double"
DTYPES = {name: np.dtype(dtype) for name, dtype in tensors.DTYPES.items()}


def tensor(shape: Any = (2, 3), datatype: Any = "FP32", **members: Any) -> dict[str, Any]:
    return {"name": "input", "shape": shape, "datatype": datatype, "data": [1, 2, 3, 4, 5, 6]} | members


def body(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": inputs or [tensor()], **members}).encode()


def post(service: Service, content: bytes, path: str = f"{MODEL}/infer", **headers: str) -> httpx.Response:
    return service.client.post(path, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()})


def binary(raw: bytes, shape: Any, datatype: str, **members: Any) -> tuple[bytes, int]:
    """A body with `raw` behind its JSON, and the JSON's length."""
    given = {"name": "input", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
    head = body(given, **members)
    return head + raw, len(head)


def read(content: bytes, json_size: int | None, block: Block | None = None, max_items: int = 2**63) -> tensors.Asked:
    return tensors.read(content, json_size, max_items, block)


def read_rows(content: bytes, json_size: int | None = None) -> np.ndarray:
    """The tensor that a body was read as."""
    cut = read(content, json_size).cut
    assert cut.form.row is not None
    dtype, shape = cut.form.row
    raw = b"".join(cut.items.slices(0, len(cut.items)))
    assert cut.items.lengths(0, len(cut.items)) == [math.prod(shape) * np.dtype(dtype).itemsize] * len(cut.items)
    return np.frombuffer(raw, dtype).reshape(len(cut.items), *shape)


def error_of(answer: httpx.Response, status: int) -> str:
    """What an answer with that status says; there is nothing else in it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    [(key, text)] = answer.json().items()
    assert key == "error"
    assert text
    return text


# ---- a body to rows


@pytest.mark.parametrize(("datatype", "dtype"), DTYPES.items())
def test_every_datatype_is_read_from_json_flat_and_nested_and_from_bytes(datatype: str, dtype: np.dtype) -> None:
    if dtype.kind == "f":
        numbers = np.array([[0, 1, -2.5], [1024, 0.125, 1]], dtype)
    elif dtype.kind == "b":
        numbers = np.array([[True, False, True], [False, False, True]])
    else:
        limits = np.iinfo(dtype)
        numbers = np.array([[limits.min, limits.max, 0], [1, 2, 3]], dtype)
    flat, nested = numbers.ravel().tolist(), numbers.tolist()
    for found in (
        read_rows(body(tensor(datatype=datatype, data=flat))),
        read_rows(body(tensor(datatype=datatype, data=nested))),
        read_rows(*binary(numbers.tobytes(), [2, 3], datatype)),
    ):
        assert found.dtype == dtype
        assert np.array_equal(found, numbers)


def test_bf16_is_read_as_the_float32_that_it_is() -> None:
    numbers = np.array([[1, -2.5], [3e38, 0.1]], ml_dtypes.bfloat16)
    assert np.array_equal(read_rows(*binary(numbers.tobytes(), [2, 2], "BF16")), numbers.astype(np.float32))


@pytest.mark.parametrize(("shape", "data"), [([0, 3], []), ([2, 0], []), ([2, 0], [[], []]), ([0], [])])
def test_tensors_without_numbers_are_read(shape: list[int], data: list) -> None:
    assert read_rows(body(tensor(shape, data=data))).shape == tuple(shape)
    assert read_rows(*binary(b"", shape, "FP32")).shape == tuple(shape)


def test_the_protocols_own_parameters_are_not_the_models() -> None:
    own = {"binary_data_output": True, "timeout": 1500, "priority": 3}
    asked = read(body(parameters=own | {"factor": 2, "sequence_id": 7}), None)
    assert asked.cut.form.parameters == b'{"factor":2,"sequence_id":7}'
    assert (asked.binary, asked.timeout) == (True, 0.0015)
    wish = [{"name": "output", "parameters": {"binary_data": False}}]
    assert not read(body(parameters=own, outputs=wish), None).binary


BAD = {
    "no JSON": (b"{", "truncated"),
    "nothing": (b"", "truncated"),
    "another kind of JSON": (b"[1]", "object"),
    "nested without end": (b'{"inputs":[' + b"[" * 100_000, "object"),
    "no UTF-8": (b'{"inputs":[{"name":"\xff"}]}', "UTF-8"),
    "a lone surrogate": (b'{"id":"\\ud800","inputs":[]}', ""),
    "no inputs": (b"{}", "inputs"),
    "an empty list of inputs": (b'{"inputs":[]}', "has 0"),
    "two inputs": (body(tensor(), tensor()), "has 2"),
    "an id that is no string": (body(id=7), "str"),
    "another input": (body(tensor(name="x")), "'x'"),
    "another output": (body(outputs=[{"name": "logits"}]), "'logits'"),
    "a shape of strings": (body(tensor(["2"])), "int"),
    "a shape of bools": (body(tensor([True, 6])), "bool"),
    "a shape that is none": (body(tensor(6)), "array"),
    "no axis": (body(tensor([])), "first axis"),
    "a negative size": (body(tensor([-1, 6])), "[-1, 6]"),
    "two negative sizes": (body(tensor([-2, -3])), "[-2, -3]"),
    "too many axes": (body(tensor([1] * 33, data=[1])), "shape"),
    "more numbers than there can be": (body(tensor([2**40, 2**40])), "shape"),
    "a size beyond 64 bits": (body(tensor([2**70])), ""),
    "nothing, beyond 64 bits": (body(tensor([2**62, 0], data=[])), "shape"),
    "a terabyte": (body(tensor([2**40])), "has 1099511627776 numbers, and data 6"),
    "too few numbers": (body(tensor([2, 4])), "FP32[2, 4] has 8 numbers, and data 6"),
    "rows of unequal length": (body(tensor(data=[[1, 2], [3, 4, 5, 6]])), "nested"),
    "transposed": (body(tensor(data=[[1, 2], [3, 4], [5, 6]])), "nested"),
    "a number where there is none": (body(tensor([0], data=[5])), "numbers"),
    "none where there is one": (body(tensor([1], data=[])), "numbers"),
    "arrays of nothing with something in one": (body(tensor([2, 0], data=[[], [5]])), "numbers"),
    "a comma in a string among numbers": (body(tensor([2], data=["1,2"])), "numbers"),
    "an object": (body(tensor(data={"a": 1})), "array"),
    "a scalar": (body(tensor([1], data=1)), "array"),
    "a string among numbers": (body(tensor([2], data=[1, "2"])), "numbers"),
    "null among numbers": (body(tensor([2], data=[1, None])), "numbers"),
    "true among numbers": (body(tensor([2], data=[1, True])), "numbers"),
    "fractions for whole numbers": (body(tensor([2], "INT32", data=[1, 2.5])), "numbers"),
    "NaN": (body(tensor([2], data=[1, math.nan])), ""),
    "a number beyond float64": (b'{"inputs":[{"name":"input","shape":[1],"datatype":"FP64","data":[1e999]}]}', ""),
    "a number that does not fit": (body(tensor([2], "UINT8", data=[1, 256])), "does not fit"),
    "a negative unsigned": (body(tensor([2], "UINT64", data=[1, -1])), "numbers"),
    "numbers that are no bools": (body(tensor([2], "BOOL", data=[1, 2])), "does not fit"),
    "strings that are no bools": (body(tensor([2], "BOOL", data=["true", "false"])), "numbers"),
    "bytes": (body(tensor([1], "BYTES", data=["abc"])), "BYTES"),
    "an unknown datatype": (body(tensor(datatype="float32")), "'float32'"),
    "no data": (b'{"inputs":[{"name":"input","shape":[1],"datatype":"FP32"}]}', "binary_data_size"),
    "shared memory": (body(tensor(parameters={"shared_memory_region": "r"})), "shared memory"),
    "classification": (body(outputs=[{"name": "output", "parameters": {"classification": 3}}]), "classification"),
    "a flag that is none": (body(parameters={"binary_data_output": "yes"}), "bool"),
    "a negative timeout": (body(parameters={"timeout": -1}), "timeout"),
    "a timeout beyond float64": (body(parameters={"timeout": 10**400}), "timeout"),
    "a timeout that is half a character": (b'{"parameters":{"timeout":"\\ud8"},"inputs":[]}', ""),
    "bytes without the header": (binary(b"abcd", [1], "FP32")[0], "trailing"),
    "a size without bytes": (body(tensor(data=[], parameters={"binary_data_size": 24})), "only one"),
}


def test_too_many_items_are_refused_before_their_numbers_are_read() -> None:
    with pytest.raises(TooLarge, match="7 items are over the limit of 6"):
        read(body(tensor([7], data=["no number"] * 7)), None, max_items=6)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_numbers_of_any_length_are_read_in_pieces_of_text(nested: bool) -> None:
    numbers = np.arange(300_000, dtype=np.float32).reshape(3, 1000, 100)  # 2 MB of text: several pieces
    given = numbers.tolist() if nested else numbers.ravel().tolist()
    np.testing.assert_array_equal(read_rows(body(tensor([3, 1000, 100], data=given))), numbers)
    flat = numbers.ravel().tolist()
    for i in (0, 150_000, 299_999):
        with pytest.raises(MalformedBody, match="numbers"):
            read(body(tensor([300_000], data=[*flat[:i], None, *flat[i + 1 :]])), None)


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD)
def test_a_bad_body_is_refused_with_the_reason(content: bytes, said: str) -> None:
    with pytest.raises(MalformedBody) as caught:
        read(content, None)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "shape", "datatype", "said"),
    [
        (b"abc", [1], "FP32", "has 4 bytes, and binary_data_size is 3"),
        (b"abcd", [1], "BF16", "has 2 bytes"),
        (b"", [2**59], "INT8", f"has {2**59} bytes"),
        (b"\1\0\0\0a", [1], "BYTES", "BYTES"),
    ],
)
def test_bytes_that_do_not_fill_the_tensor_are_refused(raw: bytes, shape: list, datatype: str, said: str) -> None:
    with pytest.raises(MalformedBody, match=said):
        read(*binary(raw, shape, datatype))


def test_bytes_must_be_all_that_follows_the_json() -> None:
    content, size = binary(b"abcd", [1], "FP32")
    for wrong, said in ((len(content) + 1, "and the body has"), (size - 1, "truncated"), (size + 1, "trailing")):
        with pytest.raises(MalformedBody, match=said):
            read(content, wrong)
    for more in (b"e", b"efgh"):
        with pytest.raises(MalformedBody, match="binary_data_size is 4, and by"):
            read(content + more, size)
    with pytest.raises(MalformedBody, match="says whose"):
        read(body() + b"abcd", len(body()))


def test_bytes_in_the_ring_stay_there_and_json_lets_it_go(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 4096)
    content, size = binary(bytes(range(24)), [2, 3], "FP32")
    block = ring.take(len(content))
    assert block is not None
    block.view[:] = content
    cut = read(block.view, size, block).cut
    assert cut.items.place(1, 2) == Place("ring", block.start + size + 12, 12)
    block.view[:size] = body().ljust(size)
    assert read(block.view[:size], size, block).cut.items.place(0, 2) is None
    del block, cut
    ring.close()


# ---- results to an answer


def span(array: np.ndarray, start: int = 0) -> Span:
    lengths = [array[0].nbytes] * len(array)
    return Span(start, lengths, memoryview(array.tobytes()), [(array.dtype.str, array.shape[1:])])


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.dtype(">f4"), np.dtype(">i2")])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 1, 2)])
def test_results_are_joined_in_order_in_both_forms(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)).reshape(shape) % 2).astype(dtype)
    output = tensors.rows([span(array[:2]), span(array[2:], 2)])
    assert output is not None
    text, size = tensors.write({"id": "1"}, output, binary=False)
    answer = json.loads(text)
    assert size is None
    assert answer["id"] == "1"
    [told] = answer["outputs"]
    assert (told["name"], told["datatype"], told["shape"]) == ("output", output.datatype, list(shape))
    assert told["data"] == array.ravel().tolist()
    text, size = tensors.write({}, output, binary=True)
    [told] = json.loads(text[:size])["outputs"]
    assert told["parameters"]["binary_data_size"] == array.nbytes
    assert np.array_equal(np.frombuffer(text[size:], DTYPES[told["datatype"]]), array.ravel())


def test_results_that_make_no_tensor_and_numbers_that_json_has_not_are_errors() -> None:
    with pytest.raises(UnencodableResult, match="unequal form"):
        tensors.rows([span(np.ones((2, 3))), span(np.ones((2, 4)), 2)])
    output = tensors.rows([span(np.array([[1, 2], [3, np.inf], [4, 5]], np.float32))])
    assert output is not None
    with pytest.raises(NonFiniteResult, match="item 1"):
        tensors.write({}, output, binary=False)
    assert tensors.write({}, output, binary=True)


# ---- Triton's client


@pytest.fixture(scope="module")
def client(double: Service) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(f"127.0.0.1:{double.port}", concurrency=8)
    yield client
    client.close()


def tensors_of(array: np.ndarray, binary_data: bool = True) -> list[triton.InferInput]:
    datatype = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    return [triton.InferInput("input", array.shape, datatype).set_data_from_numpy(array, binary_data=binary_data)]


def test_triton_finds_the_server_and_the_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("Double")
    assert client.is_model_ready("Double", "1")
    assert not client.is_model_ready("Double", "2")
    assert not client.is_model_ready("double")  # names are case-sensitive
    server = client.get_server_metadata()
    assert server["name"] == "phalanx"
    assert "binary_tensor_data" in server["extensions"]
    row = {"datatype": "FP32", "shape": [-1, 3]}
    for version in ("", "1"):
        assert client.get_model_metadata("Double", version) == {
            "name": "Double",
            "versions": ["1"],
            "platform": "pytorch",
            "inputs": [{"name": "input", **row}],
            "outputs": [{"name": "output", **row}],
        }


@pytest.mark.parametrize("sent", [True, False], ids=["bytes", "JSON"])
@pytest.mark.parametrize("wanted", [True, False, None], ids=["to bytes", "to JSON", "to what is usual"])
def test_triton_infers_with_bytes_and_json(
    client: triton.InferenceServerClient, sent: bool, wanted: bool | None
) -> None:
    array = np.random.default_rng(0).normal(size=(37, 3)).astype(np.float32)
    outputs = None if wanted is None else [triton.InferRequestedOutput("output", binary_data=wanted)]
    result = client.infer("Double", tensors_of(array, sent), outputs=outputs, request_id="mine", model_version="1")
    assert np.array_equal(result.as_numpy("output"), 2 * array)
    answer = result.get_response()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("mine", "Double", "1")
    assert ("data" in answer["outputs"][0]) == (wanted is False)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8, np.bool_])
def test_what_can_be_cast_to_the_models_dtype_is(client: triton.InferenceServerClient, dtype: type) -> None:
    array = np.ones((4, 3), dtype)
    for sent in (True, False):
        assert np.array_equal(client.infer("Double", tensors_of(array, sent)).as_numpy("output"), np.full((4, 3), 2.0))


def test_an_empty_batch_is_answered(client: triton.InferenceServerClient) -> None:
    client.get_model_metadata("Double")  # which knows a row then
    for sent in (True, False):
        assert client.infer("Double", tensors_of(np.ones((0, 3), np.float32), sent)).as_numpy("output").shape == (0, 3)


def test_bodies_longer_than_a_socket_holds_come_through_the_ring_and_compressed_ones_beside_it(
    client: triton.InferenceServerClient, double: Service
) -> None:
    array = np.random.default_rng(1).normal(size=(6000, 3)).astype(np.float32)
    for sent, compression in ((True, None), (True, "gzip"), (False, None)):
        result = client.infer("Double", tensors_of(array, sent), request_compression_algorithm=compression)
        assert np.array_equal(result.as_numpy("output"), 2 * array)
    until(lambda: double.info()["queue"] == {"items": 0, "bytes": 0, "waiting_items": 0})


def test_triton_waits_for_many_at_a_time_and_each_gets_its_own(client: triton.InferenceServerClient) -> None:
    arrays = [np.full((n % 7 + 1, 3), n, np.float32) for n in range(64)]
    waiting = [client.async_infer("Double", tensors_of(array), request_id=str(n)) for n, array in enumerate(arrays)]
    for n, (array, one) in enumerate(zip(arrays, waiting, strict=True)):
        result = one.get_result(timeout=30)
        assert result.get_response()["id"] == str(n)
        assert np.array_equal(result.as_numpy("output"), 2 * array)


def test_triton_raises_what_we_say(client: triton.InferenceServerClient) -> None:
    array, wide = np.ones((2, 3), np.float32), np.ones((2, 4), np.float32)
    for call, said, status in (
        (lambda: client.infer("Triple", tensors_of(array)), "no model 'Triple'", "404"),
        (lambda: client.infer("Double", tensors_of(array), model_version="2"), "no version '2'", "404"),
        (lambda: client.get_model_metadata("Triple"), "no model 'Triple'", "404"),
        (lambda: client.infer("Double", tensors_of(wide)), "item 0: the item's shape is [4]", "400"),
        (lambda: client.infer("Double", tensors_of(array), parameters={"factor": 2}), "no parameter 'factor'", "400"),
        (lambda: client.infer("Double", tensors_of(array), sequence_id=7, sequence_start=True), "'sequence_", "400"),
        (lambda: client.infer("Double", tensors_of(array), timeout=1), "deadline", "504"),
        (lambda: client.infer("Double", tensors_of(array), request_compression_algorithm="deflate"), "deflate", "415"),
        (lambda: client.get_model_config("Double"), "Not Found", "404"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert said in caught.value.message()
        assert caught.value.status() == status


def test_results_that_are_no_numbers_are_json_texts(digits: Service) -> None:
    images, labels = samples()
    client = triton.InferenceServerClient(f"127.0.0.1:{digits.port}")
    array = np.array(images, np.float32)
    for wanted in (True, False):
        outputs = [triton.InferRequestedOutput("output", binary_data=wanted)]
        texts = client.infer("Digits", tensors_of(array), outputs=outputs).as_numpy("output")
        assert [json.loads(text)["digit"] for text in texts] == labels
    assert client.get_model_metadata("Digits")["outputs"] == [{"name": "output", "datatype": "BYTES", "shape": [-1]}]
    client.close()


# ---- the protocol by hand


def test_health_needs_no_client(double: Service) -> None:
    for path, said in (
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        (f"{MODEL}/ready", {"name": "Double", "ready": True}),
        (f"{MODEL}/versions/1/ready", {"name": "Double", "ready": True}),
    ):
        answer = double.client.get(path)
        assert (answer.status_code, answer.json()) == (200, said)


def test_an_answer_holds_what_the_protocol_says_and_no_more(double: Service) -> None:
    answer = post(double, body(tensor(data=[[1, 2, 3], [4, 5, 6]]), model_name="x"), x_request_id="theirs")
    output = {"name": "output", "datatype": "FP32", "shape": [2, 3], "data": [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]}
    assert answer.json() == {"model_name": "Double", "model_version": "1", "outputs": [output]}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "theirs"
    assert "forward;dur=" in answer.headers["server-timing"]
    assert "inference-header-content-length" not in answer.headers
    assert post(double, body(id="")).json()["id"] == ""
    answer = post(double, body(parameters={"binary_data_output": True}, id="ß"))
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:size])["id"] == "ß"
    assert np.frombuffer(answer.content[size:], "<f4").tolist() == output["data"]


def test_one_bad_item_fails_the_request_and_is_named(double: Service) -> None:
    rows = np.ones((40, 3), np.float32)
    rows[17, 1] = rows[30, 1] = np.nan
    content, size = binary(rows.tobytes(), [40, 3], "FP32")
    answer = post(double, content, inference_header_content_length=str(size))
    assert error_of(answer, 400) == "item 17: a number is not finite in float32"
    huge = body(tensor(data=[1, 1, 1, 3e38, 1, 1]))
    assert "item 1: the result holds NaN or infinity" in error_of(post(double, huge), 500)
    assert post(double, body(tensor(data=[1, 1, 1, 3e38, 1, 1]), parameters={"binary_data_output": True})).is_success


@pytest.mark.parametrize(
    ("shape", "datatype", "said"),
    [
        ([6], "FP32", "item 0: the item's shape is []; the model takes float32[3]"),
        ([1, 6], "FP32", "the item's shape is [6]"),
        ([1, 2, 3], "FP32", "the item's shape is [2, 3]"),
    ],
)
def test_a_tensor_that_the_model_does_not_take_is_400(double: Service, shape: list, datatype: str, said: str) -> None:
    assert said in error_of(post(double, body(tensor(shape, datatype))), 400)


def test_paths_methods_and_headers_that_are_not_served_are_told_as_the_protocol_has_it(double: Service) -> None:
    get = double.client.get
    error_of(get("/v2/nothing"), 404)
    error_of(get("/v2/"), 404)
    error_of(get(f"{MODEL}/versions/2"), 404)
    error_of(get(f"{MODEL}/versions/2/ready"), 404)
    error_of(post(double, body(), f"{MODEL}/versions/2/infer"), 404)
    error_of(post(double, body(), f"{MODEL}/generate"), 404)
    answer = get(f"{MODEL}/infer")
    assert "Method Not Allowed" in error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(post(double, body(), "/v2"), 405)
    error_of(post(double, body(), x_request_timeout="soon"), 400)
    assert "deadline" in error_of(post(double, body(), x_request_timeout="0.000001"), 504)
    for wrong in ("-1", "four", "1e3", "9" * 30, ""):
        error_of(post(double, body(), inference_header_content_length=wrong), 400)
    assert get("/v3").headers["content-type"] == "application/problem+json"


def test_a_model_that_takes_no_tensors_says_so(obedient: Service) -> None:
    for answer in (obedient.client.get("/v2/models/Obedient"), post(obedient, body(), "/v2/models/Obedient/infer")):
        assert "/infer" in error_of(answer, 400)
    assert obedient.client.get("/v2/models/Obedient/ready").is_success


@pytest.mark.long
def test_what_a_result_may_be() -> None:
    with serving("Forms", ranks=1) as service:

        def outputs(form: str = "") -> dict:
            members = {"parameters": {"form": form}} if form else {}
            answer = post(service, body(tensor([2, 2], data=[1, 2, 3, 4]), **members), path)
            assert answer.status_code == 200, answer.text
            return answer.json()["outputs"][0]

        def metadata() -> dict:
            described = service.client.get("/v2/models/Forms").json()
            assert described["inputs"] == [{"name": "input", "datatype": "BF16", "shape": [-1, 2]}]
            return described["outputs"][0]

        path = "/v2/models/Forms/infer"
        assert metadata() == {"name": "output", "datatype": "FP32", "shape": [-1]}  # nothing is known: no example
        assert outputs() == {"name": "output", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.0, 3.0, 4.0]}
        assert metadata()["shape"] == [-1, 2]
        assert outputs("triple")["shape"] == [2, 3]
        assert metadata()["shape"] == [-1, 2]  # what one request asked for does not change what the next one gets
        assert (outputs("half")["datatype"], outputs("half")["data"]) == ("FP16", [1.0, 2.0, 3.0, 4.0])
        assert (outputs("bool")["datatype"], outputs("bool")["data"]) == ("BOOL", [False, True, True, True])
        assert (outputs("big-endian")["datatype"], outputs("big-endian")["data"]) == ("INT32", [1, 2, 3, 4])
        assert (outputs("dict")["datatype"], outputs("dict")["data"]) == ("BYTES", ['{"sum":3.0}', '{"sum":7.0}'])
        assert metadata()["datatype"] == "FP32"
        assert outputs()["datatype"] == "FP32"
        ragged = body(tensor([2, 2], data=[1, 2, 3, 4]), parameters={"form": "ragged"})
        assert "unequal form" in error_of(post(service, ragged, path), 500)
        numbers = np.array([[1, -2.5]], ml_dtypes.bfloat16)
        content, size = binary(numbers.tobytes(), [1, 2], "BF16")
        answer = post(service, content, path, inference_header_content_length=str(size))
        assert answer.json()["outputs"][0]["data"] == [1.0, -2.5]


def test_without_a_group_with_keys_and_with_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    service = Service("unused", verb="app", api_keys_file=keys, max_body_bytes=1000, log_level="error")
    key = {"x_api_key": "secret"}
    try:

        def up() -> bool:
            try:
                return service.client.get("/v2/health/live").json() == {"live": True}
            except httpx.TransportError:
                return False

        until(up, 30, "the front end")
        answer = service.client.get("/v2/health/ready")
        assert answer.status_code == 503
        assert not answer.json()["ready"]
        assert "no worker group" in answer.json()["error"]
        answer = post(service, body())
        error_of(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        error_of(service.client.get("/v2"), 401)
        error_of(service.client.get(MODEL), 401)
        assert service.client.get("/v2", headers={"x-api-key": "secret"}).is_success
        error_of(post(service, b"x" * 1001, **key), 413)
        error_of(post(service, body(), content_encoding="br", **key), 415)
        answer = post(service, body(), **key)
        assert "no worker group" in error_of(answer, 503)
        assert answer.headers["retry-after"] == "5"
        for path in (MODEL, f"{MODEL}/ready"):
            error_of(service.client.get(path, headers={"x-api-key": "secret"}), 503)
        assert service.stop() == 0
    finally:
        service.close()


def test_more_items_than_a_request_may_have_are_413_even_if_they_hold_nothing(double: Service) -> None:
    assert "16384" in error_of(post(double, body(tensor([2**40, 0], data=[]))), 413)


def test_clients_of_both_protocols_share_steps_and_get_their_own(double: Service) -> None:
    def ask(n: int) -> bool:
        if n % 2:
            return double.outputs([[n, 0, 1]]) == [[2.0 * n, 0.0, 2.0]]
        answer = post(double, body(tensor([1, 3], data=[n, 0, 1])))
        return answer.json()["outputs"][0]["data"] == [2.0 * n, 0.0, 2.0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(64)))


# ---- whatever is sent


sizes = st.integers(-3, 4) | st.sampled_from([0, 2**31, 2**40, 2**63, 2**64, 2**200])
values = st.recursive(
    st.integers(-300, 300) | st.floats() | st.booleans() | st.none() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)
inputs = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["input", "input", "input", "x"]),
        "shape": st.lists(sizes, max_size=4) | st.just([2, 3]) | values,
        "datatype": st.sampled_from([*DTYPES, "BF16", "BYTES", "x"]) | values,
    },
    optional={
        "data": values | st.lists(st.integers(0, 2), min_size=6, max_size=6),
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "x"]), st.integers(-1, 30) | values),
    },
)
own = st.sampled_from(["timeout", "priority", "binary_data_output", "x"])
requests = st.fixed_dictionaries(
    {"inputs": st.lists(inputs, max_size=2) | values},
    optional={
        "id": values,
        "parameters": st.dictionaries(own, sizes | values),
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["output", "x"])})) | values,
    },
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests, st.binary(max_size=30), st.sampled_from(["right", "none", "off"]), st.integers(0, 300))
def test_whatever_is_sent_is_answered_or_refused(
    double: Service, request: dict, behind: bytes, header: str, at: int
) -> None:
    head = json.dumps(request).encode()
    size = {"right": {"inference_header_content_length": str(len(head))}, "none": {}}.get(
        header, {"inference_header_content_length": str(at)}
    )
    answer = post(double, head + behind, **size)
    if answer.status_code != 200:
        assert answer.status_code in (400, 413, 504), (answer.status_code, answer.text)  # 504: a timeout of 1 µs
        error_of(answer, answer.status_code)
