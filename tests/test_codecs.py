"""`app.codecs` and `app.outputs`: whatever a client sends, a clear error or its items; and answers, joined in order."""

from __future__ import annotations

import io
import json
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from app import codecs, outputs
from app.codecs import Cut
from app.outputs import Span
from workers import wire
from workers.errors import InvalidItem, MalformedBody, NonFiniteResult, NotAcceptable, PoisonItem, UnsupportedMediaType
from workers.wire import Encoding, Form

pytestmark = pytest.mark.timeout(60)
quick = settings(deadline=None, max_examples=60)
NAN = float("nan")


def cut(body: bytes, accepts: Encoding = "json", returns: Encoding = "json") -> Cut:
    return codecs.cut(body, accepts, returns)


def texts(one: Cut) -> list[bytes]:
    return [bytes(memoryview(item)) for item in one.items.slices(0, len(one.items))]


def malformed(body: bytes, accepts: Encoding = "json") -> str:
    with pytest.raises(MalformedBody) as caught:
        cut(body, accepts)
    assert caught.value.detail
    assert len(caught.value.detail) < 700
    return caught.value.detail


# ---- content negotiation


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        (b"application/json", "json"),
        (b"Application/JSON ; Charset=UTF-8", "json"),
        (b'application/json;charset="utf-8"', "json"),
        (b"application/json; charset=utf8; x=y", "json"),
        (b"application/json; profile=x", "json"),
        (b"application/x-npy", "npy"),
        (b" APPLICATION/X-NPY; version=1", "npy"),
    ],
)
def test_a_body_is_what_its_content_type_says(content_type: bytes, encoding: Encoding) -> None:
    assert codecs.request_media(content_type) == encoding


@pytest.mark.parametrize(
    ("content_type", "names"),
    [
        (None, "without Content-Type"),
        (b"", "without Content-Type"),
        (b"text/json", "'text/json'"),
        (b"application/json-patch+json", "'application/json-patch+json'"),
        (b"multipart/mixed; boundary=application/json", "'multipart/mixed'"),
        (b"application/json, application/x-npy", "application/json, application/x-npy"),
        (b"application/json; charset=latin-1", "latin-1"),
        (b"application/json; charset=utf-16", "utf-16"),
        (b"application/json; charset=utf-16; x=utf-8", "utf-16"),
        (b"\xff\x00", "not supported"),
    ],
)
def test_other_content_types_are_refused_by_name(content_type: bytes | None, names: str) -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        codecs.request_media(content_type)
    assert names in caught.value.detail


@pytest.mark.parametrize(
    ("accept", "of_json", "of_npy"),
    [
        (None, "json", "npy"),
        (b"", "json", "npy"),
        (b"*/*", "json", "npy"),
        (b"application/*;q=0.2", "json", "npy"),
        (b"text/html,application/xhtml+xml,*/*;q=0.8", "json", "npy"),
        (b"application/json", "json", "json"),
        (b"APPLICATION/X-NPY", "npy", "npy"),
        (b"application/x-npy, application/json", "json", "npy"),
        (b"application/x-npy;q=0.9 , application/json;q=0.8", "npy", "npy"),
        (b"application/x-npy; q=0.1, application/json; Q=0.2", "json", "json"),
        (b"application/x-npy;q=0.5, */*;q=0.4", "npy", "npy"),
        (b"application/x-npy;q=0.5, */*;q=0.9", "json", "json"),
        (b"application/json;q=0, */*", "npy", "npy"),
        (b"application/json;q=0.000, application/*;q=0.1", "npy", "npy"),
        (b"application/json;version=1;q=0.5, application/x-npy;q=1.000", "npy", "npy"),
        (b"text/html;q=1, application/json;q=0.001", "json", "json"),
        (b", application/json,,", "json", "json"),
    ],
)
def test_the_answer_takes_the_form_that_is_liked_best(
    accept: bytes | None, of_json: Encoding, of_npy: Encoding
) -> None:
    assert codecs.answer_media(accept, "json") == of_json
    assert codecs.answer_media(accept, "npy") == of_npy


@pytest.mark.parametrize(
    "accept",
    [b"text/html", b"application/json;q=0", b"*/*;q=0", b"*", b"text/*", b"application/problem+json", b"\xff", b"json"]
    + [b"application/json;q=" + q for q in (b"x", b"nan", b"inf", b"-1", b"2", b"1e0", b"", b"0.5.5")],
)
def test_no_form_that_is_liked_is_not_acceptable(accept: bytes) -> None:
    for default in ("json", "npy"):
        with pytest.raises(NotAcceptable, match="Accept"):
            codecs.answer_media(accept, default)


# ---- JSON bodies


def test_a_body_is_cut_into_its_items_as_they_stand_in_it() -> None:
    one = cut(b'{ "inputs" : [ 1 , "a,]b" ,[ 2, {"c":[]}], null,\n{} ] , "parameters" : { "b" : 2, "a" :"x" } }')
    assert texts(one) == [b"1", b'"a,]b"', b'[ 2, {"c":[]}]', b"null", b"{}"]
    assert one.items.lengths(1, 3) == [6, 14]
    assert [bytes(memoryview(item)) for item in one.items.slices(1, 3)] == [b'"a,]b"', b'[ 2, {"c":[]}]']
    assert one.form == Form("json", "json", b'{"a":"x","b":2}')


@pytest.mark.parametrize(
    "body", [b'{"inputs":[]}', b'{"inputs":[],"parameters":null}', b'{"inputs":[],"parameters":{}}']
)
def test_no_items_and_no_parameters_are_fine(body: bytes) -> None:
    assert len(cut(body).items) == 0
    assert cut(body).form == Form("json", "json")


def test_equal_parameters_are_of_one_form_however_they_are_written() -> None:
    forms = {cut(b'{"parameters":%s,"inputs":[1]}' % text).form for text in (b'{"a":1,"b":2}', b'{"b": 2,\n"a": 1 }')}
    assert len(forms) == 1
    assert cut(b'{"inputs":[1],"parameters":{"a":1}}').form not in forms


@quick
@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_every_json_value_is_an_item(values: list[Any], ascii_only: bool, indent: int | None) -> None:
    one = cut(json.dumps({"inputs": values}, ensure_ascii=ascii_only, indent=indent).encode())
    assert [json.loads(text) for text in texts(one)] == values
    assert one.items.lengths(0, len(values)) == [len(text) for text in texts(one)]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", "empty"),
        (b" \n", "truncated"),
        (b'{"inputs":[1,2}', "byte 14"),
        (b'{"inputs":[1,,2]}', "byte 13"),
        (b'{"inputs":[1]', "truncated"),
        (b'{"inputs":[1]} x', "byte 16"),
        (b'{"inputs":[01]}', "byte"),
        (b'{"inputs":[NaN]}', "byte 11"),
        (b'{"inputs":["\\x"]}', "byte"),
        (b'{"inputs":["\\ud800"]}', ""),
        (b"{'inputs':[1]}", "byte 1"),
        (b'\xef\xbb\xbf{"inputs":[1]}', "byte 0"),
        (b'{"inputs":["\xff"]}', "position 12"),
        (b'{"inputs":["\xed\xa0\x80"]}', "position 12"),
        (b'{"inputs":[1],"\xff":2}', "position 15"),
        ('{"inputs":[1]}'.encode("utf-16"), "position 0"),
        (b"[1,2]", "object"),
        (b"null", "object"),
        (b'"x"', "object"),
        (b"{}", "inputs"),
        (b'{"parameters":{}}', "inputs"),
        (b'{"inputs":{"0":1}}', "array"),
        (b'{"inputs":null}', "array"),
        (b'{"inputs":[1],"parameters":[1]}', "object"),
        (b'{"inputs":[1],"parameters":"x"}', "object"),
        (b'{"inputs":[1],"input":[2]}', "input"),
        (b'{"inputs":[1],"%s":2}' % (b"x" * 10**6), "xxx"),
        (b'{"inputs":' + b"[" * 10**6 + b"]" * 10**6 + b"}", "deep"),
        (b'{"inputs":[1],"parameters":{"a":' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}}", "deep"),
        (b"[" * 10**6, ""),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_broken_body_is_malformed_and_the_place_is_named(body: bytes, names: str) -> None:
    assert names in malformed(body)


def test_of_a_key_that_comes_twice_the_last_one_counts_as_everywhere_in_python() -> None:
    body = b'{"inputs":[1,2],"inputs":[3],"parameters":{"a":1,"a":2}}'
    one = cut(body)
    assert [json.loads(text) for text in texts(one)] == json.loads(body)["inputs"]
    assert json.loads(one.form.parameters) == json.loads(body)["parameters"]


@quick
@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda inner: b'{"inputs":[' + inner + b"]}"))
@example(b'{"inputs":[1],"parameters":{"\xff":1}}')
def test_whatever_bytes_come_they_are_items_or_a_malformed_body(body: bytes) -> None:
    try:
        one = cut(body)
    except MalformedBody:
        return
    assert json.loads(b"[" + b",".join(texts(one)) + b"]") == json.loads(body)["inputs"]


def test_a_body_of_very_many_items_is_cut_in_a_moment() -> None:
    one = cut(b'{"inputs":[' + b"1," * 200_000 + b"1]}")
    assert len(one.items) == 200_001
    assert codecs.frame([(one.items, 5, 8)], "json") == (b"1,1,1", [1, 1, 1])


# ---- npy bodies


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a newer version is used
        np.lib.format.write_array(file, array, version)
    return file.getvalue()


def header(text: str | bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    head = text.encode("latin-1") if isinstance(text, str) else text
    return b"\x93NUMPY" + version + len(head).to_bytes(2 if version[0] == 1 else 4, "little") + head + data


def shaped(
    shape: str, descr: str = "'<f4'", fortran: str = "False", data: bytes = b"", version: bytes = b"\x01\x00"
) -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n", data, version)


DTYPES = "|b1 |i1 <i2 >i4 <i8 |u1 >u2 <u4 >u8 <f2 >f4 <f8".split()


@quick
@given(st.data())
def test_an_npy_array_is_cut_into_its_rows(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    rng = random.Random(data.draw(st.integers(0, 99)))
    array = np.frombuffer(rng.randbytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    stored = np.asfortranarray(array) if data.draw(st.booleans()) else array
    version = data.draw(st.sampled_from([None, (1, 0), (2, 0), (3, 0)]))
    one = cut(npy(stored, version), "npy", "npy")

    assert len(one.items) == len(array)
    assert one.form == Form("npy", "npy", b"", (dtype.str, shape[1:]))
    start = data.draw(st.integers(0, len(array)))
    stop = data.draw(st.integers(start, len(array)))
    assert b"".join(one.items.slices(start, stop)) == array[start:stop].tobytes()
    assert one.items.lengths(start, stop) == [array[0].nbytes if len(array) else 0] * (stop - start)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", "header"),
        (b"\x93NUMPY", "header"),
        (b"PK\x03\x04" + b"\0" * 60, "header"),
        (b'{"inputs":[1]}', "header"),
        (npy(np.zeros(4))[:-1], "31"),
        (npy(np.zeros(4)) + b"\0", "33"),
        (npy(np.zeros(4))[:40], "header"),
        (npy(np.array(1.0)), "no axis"),
        (npy(np.array([1 + 2j])), "complex128"),
        (npy(np.array(["a"])), "<U1"),
        (npy(np.array([b"a"])), "|S1"),
        (npy(np.array([1], "M8[s]")), "datetime64"),
        (npy(np.zeros(2, "f4,i4")), "f0"),
        (npy(np.zeros(2, np.longdouble)), "float128"),
        (npy(np.array([{"a": 1}], object)), "object"),
        (shaped("(1,)", "'|O'", data=b"cos\nsystem\n(S'true'\ntR."), "object"),
        (header(b"cos\nsystem\n(S'true'\ntR."), "header"),
        (header(b"__import__('os').system('true')"), "header"),
        (shaped("(2,)", "__import__('os')", data=b"\0" * 8), "header"),
        (shaped("(2,)", "None", data=b"\0" * 16), "header"),
        (shaped("(2,)", "('<f4', (2,))", data=b"\0" * 16), "dtype"),
        (shaped("(2,)", "[('a', '<f4')]", data=b"\0" * 8), "dtype"),
        (shaped("(2,)", "[('a', '<f4')]" + " " * 5000), "header"),
        (shaped("(2,)", f"'{'x' * 3000}'"), "header"),
        (shaped("(-1, -2)", data=b"\0" * 8), "(-1, -2)"),
        (shaped("(2, -1, -1)", data=b"\0" * 8), "(2, -1, -1)"),
        (shaped(f"({2**70},)", data=b"\0" * 8), str(2**70)),
        (shaped(f"({2**70}, 0)"), str(2**70)),
        (shaped(f"(2, 0, {2**70})"), str(2**70)),
        (shaped(f"(2, 0, {2**62})"), str(2**62)),
        (shaped(f"({2**32}, {2**32}, {2**32}, 0)"), str(2**32)),
        (shaped(f"({'9' * 2000}, {'9' * 1900})"), "9" * 100),
        (shaped(f"({'9' * 4000},)"), "header"),  # more digits than Python reads
        (shaped("(1," + "1," * 40 + ")", data=b"\0" * 4), "(1, 1,"),
        (shaped("(1.0,)", data=b"\0" * 4), "shape"),
        (shaped("[1]", data=b"\0" * 4), "shape"),
        (shaped("'1'", data=b"\0" * 4), "shape"),
        (shaped("(2,)", fortran="1", data=b"\0" * 8), "fortran"),
        (shaped("(" * 500 + ")" * 500), "header"),
        (header("{'descr': '<f4', 'fortran_order': False}"), "header"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (0,), 'more': 1}"), "header"),
        (shaped("(2,)", data=b"\0" * 8, version=b"\x04\x00"), "4.0"),
        (shaped("(2,)", data=b"\0" * 8, version=b"\x00\x00"), "0.0"),
        (shaped("(2,)", data=b"\0" * 8, version=b"\x01\x01"), "1.1"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", "header"),
        (b"\x93NUMPY\x01\x00\xff\xff{}", "header"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_hostile_or_broken_npy_body_is_malformed(body: bytes, names: str) -> None:
    assert names in malformed(body, "npy")


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_an_npy_body_with_any_byte_changed_is_malformed_or_as_many_rows_as_it_says(data: st.DataObject) -> None:
    body = bytearray(npy(np.arange(6, dtype="<i2").reshape(3, 2)))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, 90))] = data.draw(
            st.integers(0, 255) | st.sampled_from(b" ()',-0123456789<>|fiuO")
        )
    try:
        one = cut(bytes(body), "npy", "npy")
    except MalformedBody:
        return
    assert one.form.row is not None
    dtype, shape = one.form.row
    rows = np.frombuffer(b"".join(one.items.slices(0, len(one.items))), dtype).reshape(len(one.items), *shape)
    assert wire.encode(wire.Shard(1, one.form, 0, len(rows), one.items.lengths(0, len(rows)), 1.0))


def test_a_size_that_is_written_as_true_is_one() -> None:
    assert cut(shaped("(True, 2)", data=b"\0" * 8), "npy").form.row == ("<f4", (2,))


def test_more_empty_rows_than_memory_are_counted_not_made() -> None:
    one = cut(shaped(f"({10**15}, 0)"), "npy")
    assert len(one.items) == 10**15


# ---- to the ranks and back


class Echo:
    """A group whose results are its items: the layout of a payload frame is the same both ways."""

    def __init__(self, world: int, form: Form) -> None:
        self.world = world
        self.encoding = form.accepts
        self.row = form.row

    def step(self, pieces: Sequence[tuple[Cut, int, int]]) -> list[list[Span]]:
        """Each piece its spans, one a rank that ran some of it."""
        places = [(k, i) for k, (_, start, stop) in enumerate(pieces) for i in range(start, stop)]
        spans: list[list[Span]] = [[] for _ in pieces]
        for share in wire.shares(len(places), self.world):
            mine = [places[i] for i in share]
            parts = [(k, [i for j, i in mine if j == k]) for k in sorted({k for k, _ in mine})]
            cuts = [(pieces[k][0].items, items[0], items[-1] + 1) for k, items in parts]
            frame, lengths = codecs.frame(cuts, self.encoding)
            starts = wire.offsets(lengths, self.encoding)
            at = 0
            for k, items in parts:
                low, high = at, at + len(items)
                text = memoryview(frame)[starts[low] : starts[high - 1] + lengths[high - 1]]
                rows = [self.row] if self.row else []
                spans[k].append(Span(items[0], lengths[low:high], text, rows))
                at = high
        return spans


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_bodies_cut_into_any_pieces_over_any_ranks_join_to_the_same_items(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    encoding: Encoding = data.draw(st.sampled_from(["json", "npy"]))
    rng = random.Random(data.draw(st.integers(0, 99)))
    if encoding == "json":
        values = [
            [rng.choice([f"{k},{i}", [k, i], None, 0.5, {"é]": "\n"}]) for i in range(n)] for k, n in enumerate(sizes)
        ]
        cuts = [cut(json.dumps({"inputs": one}, indent=rng.choice([None, 1])).encode()) for one in values]
    else:
        shape = data.draw(st.sampled_from([(), (2,), (0,), (1, 3)]))
        arrays = [np.frombuffer(rng.randbytes(4 * n * math.prod(shape)), "<i4").reshape(n, *shape) for n in sizes]
        cuts = [cut(npy(array), "npy", "npy") for array in arrays]
    world = data.draw(st.integers(1, 4))
    echo = Echo(world, cuts[0].form)

    spans: list[list[Span]] = [[] for _ in cuts]
    waiting = [(k, 0) for k in range(len(cuts))]
    while waiting:  # a step of some pieces of some bodies, until all of all is done
        chosen = data.draw(st.lists(st.sampled_from(range(len(waiting))), min_size=1, unique=True))
        pieces = []
        for k, start in [waiting[i] for i in chosen]:
            stop = data.draw(st.integers(start + 1, len(cuts[k].items)))
            pieces.append((k, start, stop))
        for (k, _, _), found in zip(pieces, echo.step([(cuts[k], a, b) for k, a, b in pieces]), strict=True):
            spans[k] += found
        rest = [(k, stop) for k, _, stop in pieces if stop < len(cuts[k].items)]
        waiting = [one for i, one in enumerate(waiting) if i not in chosen] + rest

    for k, found in enumerate(spans):
        if encoding == "json":
            answer = json.loads(outputs.join_json(f"r{k}", found, {}, "json"))
            assert answer == {"id": f"r{k}", "outputs": values[k]}
        else:
            assert np.array_equal(np.load(io.BytesIO(outputs.join_npy(found))), arrays[k])


def test_a_rank_without_items_gets_an_empty_frame() -> None:
    assert codecs.frame([], "json") == (b"", [])
    assert codecs.frame([], "npy") == (b"", [])


# ---- joining


def span(start: int, *results: Any) -> Span:
    """npy results as a rank encodes them; None stands for one that failed."""
    rows = [np.asarray(result) for result in results if result is not None]
    texts = [b"" if result is None else np.asarray(result).tobytes() for result in results]
    forms = iter([(row.dtype.str, row.shape) for row in rows])
    own = [("", ()) if result is None else next(forms) for result in results]
    return Span(start, [len(text) for text in texts], memoryview(b"".join(texts)), own)


def json_span(start: int, *texts: bytes) -> Span:
    return Span(start, [len(text) for text in texts], memoryview(b",".join(texts)), [])


def test_a_json_answer_holds_null_and_the_reason_where_an_item_failed() -> None:
    failures = {2: InvalidItem("not é"), 0: PoisonItem("dead")}
    spans = [outputs.null_span(0, 1, "json"), json_span(1, b"[1]", b"null"), json_span(3, b'"x"')]
    assert json.loads(outputs.join_json('id "1"', spans, failures, "json")) == {
        "id": 'id "1"',
        "outputs": [None, [1], None, "x"],
        "errors": [
            {"index": 0, "type": "poison-item", "title": PoisonItem.title, "detail": "dead"},
            {"index": 2, "type": "invalid-item", "title": InvalidItem.title, "detail": "not é"},
        ],
    }


def test_an_answer_without_items_is_an_empty_one() -> None:
    assert outputs.join_json("a", [], {}, "json") == outputs.join_json("a", [], {}, "npy") == b'{"id":"a","outputs":[]}'
    empty = np.load(io.BytesIO(outputs.join_npy([])))
    assert (empty.shape, empty.dtype) == ((0,), np.float32)


def test_an_npy_answer_with_holes_takes_the_json_form() -> None:
    spans = [
        span(0, np.array([1.5, 0.1], "f4"), None),
        outputs.null_span(2, 2, "npy"),
        span(4, np.array(7, ">i2"), np.array([[True]]), np.zeros((2, 0)), np.array([1.5], ">f8"), np.float16(2)),
    ]
    failures = {i: InvalidItem("no") for i in (1, 2, 3)}
    answer = json.loads(outputs.join_json("a", spans, failures, "npy"))
    assert answer["outputs"] == [[1.5, 0.1], None, None, None, 7, [[True]], [[], []], [1.5], 2]
    assert [error["index"] for error in answer["errors"]] == [1, 2, 3]


def test_rows_that_share_one_form_are_told_apart_in_the_json_form() -> None:
    rows = np.arange(6, dtype="<i4").reshape(3, 2)
    shared = Span(1, [8, 8, 8], memoryview(rows.tobytes()), [("<i4", (2,))])
    answer = json.loads(outputs.join_json("a", [span(0, None), shared], {0: InvalidItem("no")}, "npy"))
    assert answer["outputs"] == [None, [0, 1], [2, 3], [4, 5]]


def test_nan_in_an_npy_result_that_must_take_the_json_form_is_that_items_failure() -> None:
    failures: dict[int, Any] = {0: InvalidItem("no")}
    answer = json.loads(outputs.join_json("a", [span(0, None, [1.0, NAN], [2.0, 3.0], math.inf)], failures, "npy"))
    assert answer["outputs"] == [None, None, [2, 3], None]
    assert [error["index"] for error in answer["errors"]] == [0, 1, 3]
    assert isinstance(failures[1], NonFiniteResult)  # told to the caller too, who counts them
    assert isinstance(failures[3], NonFiniteResult)


def test_rows_of_unequal_form_make_no_npy_answer() -> None:
    for other in (np.array([1.0, 2]), np.array([1], "f4"), np.array([[1, 2]], "f4"), np.array([1, 2], ">f4")):
        with pytest.raises(NotAcceptable, match="unequal") as caught:
            outputs.join_npy([span(0, np.array([1, 2], "<f4")), span(1, other)])
        assert "float32[2]" in caught.value.detail


def test_an_npy_answer_is_an_array_as_numpy_writes_it() -> None:
    array = np.array([[1.5, NAN], [math.inf, -0.0]], ">f8")
    whole = Span(0, [16, 16], memoryview(array.tobytes()), [(">f8", (2,))])
    assert outputs.join_npy([whole]) == npy(array, (1, 0))
    rows = outputs.join_npy([span(0, array[0]), span(1, array[1])])
    assert rows == npy(array, (1, 0))


@pytest.mark.parametrize("row", [(), (0,), (3,), (2, 0, 3)])
def test_rows_without_numbers_are_counted_in_an_npy_answer(row: tuple[int, ...]) -> None:
    loaded = np.load(io.BytesIO(outputs.join_npy([span(0, *[np.zeros(row)] * 5)])))
    assert loaded.shape == (5, *row)
