"""`workers.items`: JSON values and npy rows to values or a tensor, and results back, item by item."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import math
import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from workers import items
from workers.errors import InvalidItem, NonFiniteResult, NotAcceptable, PhalanxError, UnencodableResult
from workers.items import Decoded
from workers.model import TensorSpec
from workers.wire import Encoding, Form

pytestmark = pytest.mark.timeout(60)
quick = settings(deadline=None, max_examples=60)

NAN, INF = float("nan"), float("inf")
SPEC_DTYPES = ["int8", "int64", "uint8", "uint64", "float16", "bfloat16", "float32", "float64", "bool"]


def decoded(*texts: str, spec: TensorSpec | None) -> Decoded:
    raws = [text.encode() for text in texts]
    return items.decode(b",".join(raws), [len(raw) for raw in raws], Form("json", "json"), spec)


def why(text: str, spec: TensorSpec | None, good: str | None = None) -> PhalanxError:
    """Why an item between two good ones is refused; they must not suffer from it."""
    good = good or zeros(spec)
    got = decoded(good, text, good, spec=spec)
    assert got.index == [0, 2]
    assert list(got.failures) == [1]
    return got.failures[1]


def zeros(spec: TensorSpec | None) -> str:
    if spec is None:
        return "0"
    zeros = torch.zeros([1 if size is None else size for size in spec.shape], dtype=getattr(torch, spec.dtype))
    return json.dumps(zeros.tolist())


# ---- JSON numbers to a tensor: against an oracle in plain Python


def shape_of(value: Any, shape: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """The shape that `value` has, read as `shape` asks for; None where it has another."""
    if not shape:
        return None if isinstance(value, list) else ()
    if not isinstance(value, list) or shape[0] not in (None, len(value)):
        return None
    inner = {shape_of(one, shape[1:]) for one in value} or {tuple(size or 0 for size in shape[1:])}
    (first, *others) = inner
    return None if first is None or others else (len(value), *first)


def leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


def number(value: Any, dtype: torch.dtype) -> Any:
    """`value` in `dtype`; None where it is not such a number."""
    if dtype is torch.bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not dtype.is_floating_point:
        fits = isinstance(value, int) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
        return value if fits else None
    try:
        narrow = torch.tensor(float(value), dtype=torch.float64)
    except OverflowError:
        return None
    if dtype is torch.bfloat16:
        narrow = narrow.float()
    return narrow.to(dtype).item() if narrow.to(dtype).isfinite() else None


def oracle(texts: list[str], spec: TensorSpec) -> dict[int, tuple[tuple[int, ...], list[Any]]]:
    """Of each good item its shape and numbers."""
    good: dict[int, tuple[tuple[int, ...], list[Any]]] = {}
    first = None
    for i, text in enumerate(texts):
        value = json.loads(text)
        shape = shape_of(value, spec.shape)
        if shape is None:
            continue
        numbers = [number(leaf, getattr(torch, spec.dtype)) for leaf in leaves(value)]
        kinds = [number(leaf, torch.float64 if "float" in spec.dtype else torch.int64) for leaf in leaves(value)]
        if spec.dtype not in ("bool", "uint64") and None in kinds:
            continue
        if spec.dtype in ("bool", "uint64") and None in numbers:
            continue
        first = first or shape  # the first that could be read decides what `None` stands for
        if shape == first and None not in numbers:
            good[i] = shape, numbers
    return good


LITERALS = (
    "0 1 -1 7 127 128 255 256 300 65504 65520 9007199254740993 9223372036854775807 9223372036854775808 "
    "-9223372036854775808 -9223372036854775809 18446744073709551615 18446744073709551616 1180591620717411303424 "
    "-0.0 0.1 1.0 1.5 -2.5e-3 1E5 1e+2 5e-324 1e-46 1e-400 1e308 1.7976931348623157e308 1e39 3.4e38 3.4028236e38 "
    "1e400 -1e400 123456789012345678901234567890.5"
).split()
JUNK = ["true", "false", "null", '"1"', '"a,[b]"', '"\\""', "{}", '{"0":1}', "[]", "[[]]", "[1]", "[[1,2],[3]]"]
shapes = st.lists(st.sampled_from([0, 1, 1, 2, 2, 3]), max_size=4).map(tuple)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[str], TensorSpec]:
    """Items for a spec: most of them good, some with a wrong leaf, some of the same numbers in another nesting."""
    shape = draw(shapes)
    dtype = draw(st.sampled_from(SPEC_DTYPES))
    free = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    spec = TensorSpec(dtype, tuple(None if any_size else size for size, any_size in zip(shape, free, strict=True)))
    tame = (
        ["true", "false"] if dtype == "bool" else ["0", "1", "100"] if "int" in dtype else ["0.5", "-0.0", "1", "7e-4"]
    )
    leaf = st.sampled_from(tame)
    wild = (
        st.sampled_from(LITERALS + JUNK)
        | st.integers().map(str)
        | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    )
    space = draw(st.sampled_from(["", " ", "\n", "\t \r\n"]))

    def render(shape: tuple[int, ...]) -> str:
        if not shape:
            return draw(leaf)
        inner = f"{space},{space}".join(render(shape[1:]) for _ in range(shape[0]))
        return f"[{space}{inner}{space}]"

    def one() -> str:
        text = render(shape)
        spoil = draw(st.sampled_from(["no", "no", "no", "leaf", "nesting", "size", "anything"]))
        if spoil == "leaf":
            tokens = text.replace("[", " [ ").replace("]", " ] ").replace(",", " , ").split()
            places = [i for i, token in enumerate(tokens) if token not in "[],"]
            if places:
                tokens[draw(st.sampled_from(places))] = draw(wild)
            return space.join(tokens)
        if spoil == "nesting":
            numbers = [str(leaf) for leaf in text.replace("[", " ").replace("]", " ").replace(",", " ").split()]
            other = draw(st.sampled_from(["[{}]", "[[{}]]", "[[],{}]", "[{},[]]"]))
            return other.format(",".join(numbers)) if numbers else draw(st.sampled_from(["[]", "[[]]", "[[],[]]"]))
        if spoil == "size":
            return render(tuple(draw(st.integers(0, 3)) for _ in shape))
        if spoil == "anything":
            return draw(wild)
        return text

    return [one() for _ in range(draw(st.integers(1, 4)))], spec


@settings(deadline=None, max_examples=150)
@given(steps())
@example((["[[1,2],[3]]", "[[1,2],[3,4]]"], TensorSpec("float32", (2, 2))))
@example((["[[1],[2,3]]", "[[1,2,3]]"], TensorSpec("float32", (None, None))))
@example((["[]", "[[1,2,3]]"], TensorSpec("bool", (None, 3))))
@example((["[]", "[]"], TensorSpec("bool", (None, 3))))
def test_items_become_the_tensor_that_plain_python_makes_of_them(step: tuple[list[str], TensorSpec]) -> None:
    texts, spec = step
    got = decoded(*texts, spec=spec)

    expected = oracle(texts, spec)
    assert got.index == list(expected)
    assert sorted(got.failures) == [i for i in range(len(texts)) if i not in expected]
    assert all(isinstance(error, InvalidItem) and error.detail for error in got.failures.values())
    if expected:
        assert isinstance(got.values, torch.Tensor)
        assert got.values.dtype is getattr(torch, spec.dtype)
        for tensor, (shape, numbers) in zip(got.values, expected.values(), strict=True):
            assert tuple(tensor.shape) == shape
            assert repr(tensor.flatten().tolist()) == repr(numbers)  # in which -0.0 is not 0.0


def test_numbers_get_into_a_tensor_without_a_python_object_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "value", None)  # the careful way
    for dtype in ("uint8", "int64", "uint64", "float16", "bfloat16", "float32", "float64"):
        got = decoded("[[1, 2],[3,4 ]]", " [[5,6],[7,8]]", spec=TensorSpec(dtype, (2, None)))
        assert torch.equal(got.values, torch.arange(1, 9).to(getattr(torch, dtype)).view(2, 2, 2))


def test_a_whole_number_stands_for_itself_in_a_float_tensor_and_minus_zero_is_zero() -> None:
    got = decoded("[-0, 9007199254740993]", spec=TensorSpec("float64", (2,)))
    assert got.values.tolist() == [[0.0, 9007199254740992.0]]


@pytest.mark.parametrize("dtype", "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())
def test_whole_numbers_fit_from_the_least_to_the_greatest_and_no_further(dtype: str) -> None:
    limits = torch.iinfo(getattr(torch, dtype))
    least, greatest = limits.min, limits.max  # type: ignore[attr-defined]
    got = decoded(*map(str, (least, least - 1, greatest, greatest + 1)), spec=TensorSpec(dtype, ()))
    assert got.values.tolist() == [least, greatest]
    assert got.values.dtype is getattr(torch, dtype)
    assert got.index == [0, 2]


@pytest.mark.parametrize(
    ("dtype", "shape", "text", "names"),
    [
        ("float32", (2,), "[1,2,3]", ["[3]", "float32[2]"]),
        ("float32", (2,), "[[1,2]]", ["float", "array"]),
        ("float32", (2,), "7", ["array", "int", "float32[2]"]),
        ("float32", (2, 2), "[1,2,3,4]", ["array", "int"]),
        ("float32", (2, 2), "[[1,2],[3]]", ["unequal", "float32[2, 2]"]),
        ("float32", (None, 2), "[[1,2],[3]]", ["unequal", "float32[any, 2]"]),
        ("float32", (2,), '[1,"2"]', ["float", "str", "item[1]"]),
        ("float32", (2,), "[null,2]", ["float", "null", "item[0]"]),
        ("float32", (2,), "[true,2]", ["float", "bool", "item[0]"]),
        ("float32", (2,), '{"a":1}', ["array", "object"]),
        ("float32", (2,), "[1,1e400]", ["range"]),
        ("float32", (2,), "[1,1e39]", ["finite", "float32"]),
        ("float16", (), "70000", ["finite", "float16"]),
        ("bfloat16", (), "3.4e38", ["finite", "bfloat16"]),
        ("uint8", (), "300", ["fit", "uint8"]),
        ("uint8", (), "-1", ["fit", "uint8"]),
        ("uint64", (), "18446744073709551616", ["fit", "uint64"]),
        ("int64", (), str(2**70), ["fit", "int64"]),
        ("int64", (), "1.5", ["int", "float"]),
        ("int64", (), "1.0", ["int", "float"]),
        ("int64", (), "9" * 5000, ["range"]),
        ("bool", (), "1", ["bool", "int"]),
    ],
)
def test_a_refusal_says_what_is_wrong(dtype: str, shape: tuple[int | None, ...], text: str, names: list[str]) -> None:
    error = why(text, TensorSpec(dtype, shape))
    assert isinstance(error, InvalidItem)
    assert all(name in error.detail for name in names), error.detail
    assert len(error.detail) < 200


def test_a_number_outside_the_bounds_of_the_spec_is_refused_with_the_bounds() -> None:
    spec = TensorSpec("float32", (2,), minimum=0, maximum=16)
    assert "outside 0..16" in why("[0,16.5]", spec).detail
    assert "outside 0..16" in why("[-0.25,0]", spec).detail
    assert decoded("[0,16]", spec=spec).index == [0]
    assert "outside -inf..16" in why("[17]", TensorSpec("uint8", (1,), maximum=16)).detail
    assert "outside 0.5..inf" in why("[0.25]", TensorSpec("float16", (None,), minimum=0.5), good="[1]").detail
    assert "finite" in why("[1e39]", TensorSpec("float32", (1,), maximum=16)).detail


def test_sizes_that_are_free_must_be_equal_within_a_step() -> None:
    got = decoded('["x"]', "[1,2]", "[1,2,3]", "[3,4]", spec=TensorSpec("float32", (None,)))
    assert got.index == [1, 3]
    assert got.values.tolist() == [[1, 2], [3, 4]]
    assert "[3]" in got.failures[2].detail
    assert "[2]" in got.failures[2].detail
    assert "str" in got.failures[0].detail


def test_no_items_are_a_tensor_of_no_items() -> None:
    assert decoded(spec=TensorSpec("float32", (2, 3))).values.shape == (0, 2, 3)
    assert decoded(spec=None).values == []


def test_a_model_may_write_into_its_tensor() -> None:
    decoded("[1,2]", spec=TensorSpec("float64", (2,))).values.add_(1)
    decoded("[1,2]", '"x"', spec=TensorSpec("float64", (2,))).values.add_(1)


# ---- JSON values

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@quick
@given(st.lists(json_values, max_size=5), st.sampled_from([None, 1]))
def test_without_a_spec_items_are_the_values_of_their_json(values: list[Any], indent: int | None) -> None:
    got = decoded(*(json.dumps(value, indent=indent) for value in values), spec=None)
    assert got.values == values
    assert got.index == list(range(len(values)))
    assert got.failures == {}


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\x"', "nul", "1e400", "9" * 5000])
@pytest.mark.parametrize("spec", [None, TensorSpec("float32", (1,))])
def test_what_is_no_json_value_fails_alone(text: str, spec: TensorSpec | None) -> None:
    error = why(text, spec)
    assert isinstance(error, InvalidItem)
    assert error.detail


def nested(opening: str, depth: int) -> str:
    closing = {"[": "]", '{"a":': "}"}[opening]
    return opening * depth + ("1" if opening == '{"a":' else "") + closing * depth


@pytest.mark.parametrize("spec", [None, TensorSpec("float32", (1,))])
@pytest.mark.parametrize("depth", [65, 300, 1100, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_an_item_nested_deeper_than_64_fails_alone(opening: str, depth: int, spec: TensorSpec | None) -> None:
    error = why(nested(opening, depth), spec)
    assert isinstance(error, InvalidItem)
    assert "64" in error.detail


@pytest.mark.parametrize(
    "text",
    [
        nested("[", 64),
        nested('{"a":', 64),
        json.dumps("[" * 100),
        json.dumps(["[" * 100, '"[' * 100, "\\" * 3 + '"' + "[" * 100]),
        json.dumps([[]] * 100),
        json.dumps({"[{" * 50: [{}] * 70}),
        json.dumps("é[" * 100, ensure_ascii=False),
    ],
)
def test_brackets_side_by_side_or_inside_strings_are_no_depth(text: str) -> None:
    assert decoded(text, spec=None).values == [json.loads(text)]


@quick
@given(json_values, st.integers(58, 68))
def test_depth_is_counted_as_a_parser_would(value: Any, wrapped: int) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    text = "[" * wrapped + json.dumps(value) + "]" * wrapped
    got = decoded(text, spec=None)
    assert bool(got.failures) == (depth(value) + wrapped > 64)


# ---- npy rows


def rows(array: np.ndarray, spec: TensorSpec | None) -> Decoded:
    form = Form("npy", "npy", b"", (array.dtype.str, array.shape[1:]))
    return items.decode(array.tobytes(), [array[0].nbytes if len(array) else 0] * len(array), form, spec)


CASTS = {  # of the same kind, or widening
    "bool": "bool uint8 int8 int64 uint64 float16 bfloat16 float32 float64",
    "uint8": "uint8 int8 int16 int64 uint64 float16 bfloat16 float32 float64",
    "int64": "int64 int8 float32 float64 float16 bfloat16",
    "float16": "float16 bfloat16 float32 float64",
    "float64": "float16 bfloat16 float32 float64",
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", SPEC_DTYPES)
@pytest.mark.parametrize("given_dtype", CASTS)
def test_rows_are_cast_within_their_kind_or_to_a_wider_one(given_dtype: str, dtype: str, order: str) -> None:
    array = np.array([[0, 1], [1, 1]], np.dtype(given_dtype).newbyteorder(order))
    got = rows(array, TensorSpec(dtype, (2,)))
    if dtype in CASTS[given_dtype].split():
        assert torch.equal(got.values, torch.tensor([[0, 1], [1, 1]], dtype=getattr(torch, dtype)))
    else:
        assert got.index == []
        assert [type(error) for error in got.failures.values()] == [InvalidItem, InvalidItem]
        assert given_dtype in got.failures[0].detail
        assert f"{dtype}[2]" in got.failures[0].detail


@quick
@given(st.data())
def test_rows_of_any_values_become_the_same_numbers_or_fail_alone(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]))
    dtype = data.draw(st.sampled_from(SPEC_DTYPES))
    raw = data.draw(st.binary(min_size=6 * 8, max_size=6 * 8))
    array = np.frombuffer(raw, source)[:6].reshape(3, 2)
    target = getattr(torch, dtype)
    got = rows(array, TensorSpec(dtype, (2,)))
    if not np.can_cast(array.dtype, "float32" if dtype == "bfloat16" else dtype, "same_kind"):
        assert got.index == []
        return
    expected = [[number(float(x) if source[0] == "f" else int(x), target) for x in row] for row in array]
    good = [i for i, row in enumerate(expected) if None not in row]
    assert got.index == good
    assert sorted(got.failures) == [i for i in range(3) if i not in good]
    assert got.values.tolist() == [expected[i] for i in good]


def test_rows_with_numbers_that_are_not_finite_in_the_models_dtype_fail_alone() -> None:
    got = rows(np.array([1.0, NAN, INF, 1e39, -2.0]), TensorSpec("float32", ()))
    assert got.index == [0, 4]
    assert got.values.tolist() == [1, -2]
    assert all("finite" in error.detail for error in got.failures.values())


def test_rows_without_numbers_are_items_all_the_same() -> None:
    assert rows(np.zeros((2, 0)), TensorSpec("float32", (None,))).values.shape == (2, 0)
    assert rows(np.zeros((0, 3)), TensorSpec("float32", (3,))).values.shape == (0, 3)
    assert len(rows(np.zeros((2, 0, 3)), None).values) == 2
    assert rows(np.zeros((0, 3)), None).values == []


def test_rows_of_another_shape_are_refused_with_both_shapes() -> None:
    got = rows(np.zeros((2, 3, 1)), TensorSpec("float32", (3, None, 1)))
    assert sorted(got.failures) == [0, 1]
    assert "[3, 1]" in got.failures[0].detail
    assert "float32[3, any, 1]" in got.failures[0].detail


def test_without_a_spec_rows_are_arrays_that_torch_can_read_and_the_model_may_write_into() -> None:
    first, second = rows(np.array([[1, 2], [3, 4]], ">f4"), None).values
    torch.from_numpy(first).add_(1)
    assert first.tolist() == [2, 3]
    assert second.tolist() == [3, 4]


def test_a_bool_that_is_neither_0_nor_1_is_true() -> None:
    form = Form("npy", "npy", b"", ("|b1", (3,)))
    for spec in (TensorSpec("bool", (3,)), TensorSpec("float32", (3,)), None):
        (row,) = items.decode(b"\x00\x01\xff", [3], form, spec).values
        assert bytes(np.asarray(row).astype("u1")) == b"\x00\x01\x01"


# ---- results to JSON


class Colour(enum.Enum):
    RED = "red"
    WRONG = NAN


@dataclasses.dataclass
class Box:
    label: str
    score: Any
    unset: dataclasses.InitVar[int] = 0
    _private: float = NAN
    seen: Any = dataclasses.field(default=None)
    shared: Any = None

    @functools.cached_property
    def area(self) -> float:
        return INF


@dataclasses.dataclass(slots=True)
class Slim:
    score: Any
    _private: float = NAN


def encoded(results: Any, encoding: Encoding = "json", size: int | None = None) -> tuple[items.Encoded, items.Failures]:
    failures: items.Failures = {}
    return items.encode(results, failures, len(results) if size is None else size, encoding), failures


def text_of(result: Any) -> str:
    """Between two others, which must not suffer."""
    done, failures = encoded([0, result, 2])
    assert not failures
    assert done.lengths[::2] == [1, 1]
    text = done.frame.decode()
    assert text == f"0,{text[2:-2]},2"
    assert done.lengths[1] == len(done.frame) - 4
    return text[2:-2]


def refusal_of(result: Any) -> PhalanxError:
    done, failures = encoded([0, result, 2])
    assert done.frame == b"0,null,2"
    assert done.lengths == [1, 4, 1]
    assert list(failures) == [1]
    return failures[1]


def f32(*numbers: float, **options: Any) -> torch.Tensor:
    return torch.tensor(numbers, **{"dtype": torch.float32} | options)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "null"),
        ({"a": None}, '{"a":null}'),
        ({"label": "null", "p": 0.5}, '{"label":"null","p":0.5}'),
        ({7: "a", None: 2, True: 3}, '{"7":"a","null":2,"true":3}'),
        ((1, [2.5, "x"]), '[1,[2.5,"x"]]'),
        (-0.0, "-0.0"),
        (2**64 - 1, "18446744073709551615"),
        (collections.OrderedDict(a=1), '{"a":1}'),
        (Colour.RED, '"red"'),
        (Box("cat", 0.5), '{"label":"cat","score":0.5,"seen":null,"shared":null}'),
        (Slim(1), '{"score":1}'),
        (np.float32(0.1), "0.1"),
        (np.float64(0.1), "0.1"),
        (np.int8(-3), "-3"),
        (np.bool_(True), "true"),
        (np.array(3.5), "3.5"),
        (np.array([[1, 2], [3, 4]]).T, "[[1,3],[2,4]]"),
        (np.arange(6)[::2], "[0,2,4]"),
        (np.array([1.5, 2], ">f4"), "[1.5,2.0]"),
        ({"deep": [np.array([1, 2], ">u2")]}, '{"deep":[[1,2]]}'),
        (np.zeros((2, 0)), "[[],[]]"),
        (np.array(["a", "b"]), '["a","b"]'),
        (np.array([{"a": 1}, None], object), '[{"a":1},null]'),
        (torch.tensor(3.5), "3.5"),
        ([torch.tensor(1), torch.tensor(2.5)], "[1,2.5]"),
        (f32(1, 2.5, dtype=torch.bfloat16), "[1.0,2.5]"),
        (f32(1, 2.5).to(torch.float8_e4m3fn), "[1.0,2.5]"),
        (f32(1, 2, requires_grad=True), "[1.0,2.0]"),
        (f32(1, 2, requires_grad=True) * 2, "[2.0,4.0]"),
        (torch.arange(6).view(2, 3).t(), "[[0,3],[1,4],[2,5]]"),
        (torch.arange(6)[1::2], "[1,3,5]"),
        (torch.tensor([1 + 2j]).conj().imag, "[-2.0]"),
        (torch.tensor([True]), "[true]"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), "[18446744073709551615]"),
        (torch.nn.Parameter(torch.ones(1)), "[1.0]"),
    ],
)
def test_a_result_is_written_as_it_is(result: Any, text: str) -> None:
    assert text_of(result) == text


@pytest.mark.parametrize("dtype", "i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 ?".split())
@pytest.mark.parametrize("order", "<>")
def test_arrays_of_every_dtype_and_layout_are_written_right(dtype: str, order: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(np.dtype(dtype).newbyteorder(order))
    for view in (array, array.T, array[::2, ::-1], array[1:, 1:], array[0], array[:, 1], array[0, 0]):
        assert json.loads(text_of(view)) == view.tolist()
        assert json.loads(text_of({"a": [view]})) == {"a": [view.tolist()]}


@pytest.mark.parametrize(
    "result",
    [
        NAN,
        -INF,
        [1.0, {"deep": (None, [NAN])}],
        {"null": None, "x": INF},
        {NAN: 1},
        np.float16("nan"),
        np.array([1, NAN]),
        np.array([[1, INF]]).T,
        np.array([1, NAN], ">f8"),
        np.array([1.0, NAN], object),
        np.array(NAN),
        torch.tensor(NAN),
        f32(1, NAN, dtype=torch.bfloat16),
        f32(1, NAN).to(torch.float8_e5m2),
        [torch.tensor([1.0]), {"a": torch.tensor([INF])}],
        Colour.WRONG,
        {Colour.WRONG: 1},
        Box("cat", NAN),
        Box("cat", 1, seen=[np.float32(INF)]),
        Slim({"x": NAN}),
        collections.OrderedDict(a=NAN),
    ],
)
def test_nan_and_infinity_are_refused_wherever_they_hide(result: Any) -> None:
    error = refusal_of(result)
    assert isinstance(error, NonFiniteResult)
    assert "NaN" in error.detail


def test_a_member_that_json_does_not_show_may_be_nan_and_one_that_it_shows_may_not() -> None:
    box = Box("null", None)
    assert text_of(box).startswith('{"label":"null","score":null')
    assert box.area == INF  # a cached property is a member from here on
    assert isinstance(refusal_of(box), NonFiniteResult)


def loop() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("result", "names"),
    [
        ({1, 2}, ["set"]),
        (b"x", ["bytes"]),
        ({"deep": [b"x"]}, ["dict", "bytes"]),
        (object(), ["object"]),
        ((i for i in ()), ["generator"]),
        (1j, ["complex"]),
        (np.array([1j]), ["complex"]),
        (loop(), ["list", "ecursion"]),
        (functools.reduce(lambda inner, _: [inner], range(300), []), ["ecursion"]),
        ("\ud800", ["str", "surrogates"]),
        ({(1, 2): 3}, ["dict", "key"]),
        ({np.int64(1): 3}, ["dict", "key"]),
        (np.longdouble(1), ["longdouble"]),
        (np.array([1, 2], np.longdouble), ["ndarray"]),
        (np.datetime64("NaT"), ["datetime64"]),
        (torch.eye(2).to_sparse(), ["Tensor", "parse"]),
        (torch.empty(2, device="meta"), ["Tensor", "meta"]),
    ],
)
def test_what_json_cannot_say_is_that_items_error_and_names_the_type(result: Any, names: list[str]) -> None:
    error = refusal_of(result)
    assert isinstance(error, UnencodableResult)
    assert all(name in error.detail for name in names), error.detail


results_of_models = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["null", "NaN", '"', "\x00", "é", "[null]"])
    | st.floats(width=32).map(np.float64)
    | st.lists(st.floats(), max_size=3).map(lambda numbers: np.array(numbers, float))
    | st.lists(st.floats(), max_size=3).map(lambda numbers: torch.tensor(numbers, dtype=torch.float64)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "null", "b"]), inner, max_size=3)
    ),
    max_leaves=10,
)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return all(map(finite, value)) if isinstance(value, list) else not isinstance(value, float) or math.isfinite(value)


@settings(deadline=None, max_examples=120)
@given(st.lists(results_of_models, max_size=4))
def test_every_result_comes_back_as_it_was_or_fails_for_nan(results: list[Any]) -> None:
    done, failures = encoded(results)
    outputs = json.loads(b"[" + done.frame + b"]")
    assert len(done.lengths) == len(results)
    assert len(done.frame) == sum(done.lengths) + max(0, len(results) - 1)
    for i, (result, output) in enumerate(zip(map(plain, results), outputs, strict=True)):
        if finite(result):
            assert output == result
            assert i not in failures
        else:
            assert output is None
            assert isinstance(failures[i], NonFiniteResult)


def test_results_of_items_that_failed_before_are_not_looked_at() -> None:
    earlier = InvalidItem("as it was")
    for encoding in ("json", "npy"):
        failures: items.Failures = {0: earlier, 2: earlier}
        done = items.encode([object(), np.float64(1), {NAN}], failures, 3, encoding)
        assert failures == {0: earlier, 2: earlier}
        assert done.frame == (b"null,1.0,null" if encoding == "json" else np.float64(1).tobytes())
    assert items.encode([], dict.fromkeys(range(3), earlier), 3, "json").frame == b"null,null,null"
    assert items.encode([], dict.fromkeys(range(3), earlier), 3, "npy").lengths == [0, 0, 0]


# ---- results to npy


def row_of(result: Any) -> np.ndarray:
    done, failures = encoded([0, result, 2], "npy")
    assert not failures
    dtype, shape = done.rows[1]
    assert done.rows[0] == done.rows[2]
    return np.frombuffer(done.frame[done.lengths[0] : -done.lengths[2]], dtype).reshape(shape)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1.5, np.array(1.5)),
        (True, np.array(True)),
        ([1, 2], np.array([1, 2])),
        ([[1.5], [2.5]], np.array([[1.5], [2.5]])),
        (NAN, np.array(NAN)),
        (np.float32(0.1), np.array(0.1, "f4")),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T),
        (np.array([1, INF], ">f4"), np.array([1, INF], ">f4")),
        (np.zeros((0, 2), "f4"), np.zeros((0, 2), "f4")),
        (torch.tensor(2.5), np.array(2.5, "f4")),
        (torch.tensor([2.5, NAN]), np.array([2.5, NAN], "f4")),
        (f32(1, 2.5, dtype=torch.bfloat16), np.array([1, 2.5], "f4")),
        (f32(1, 2, requires_grad=True), np.array([1, 2], "f4")),
        (torch.arange(6).view(2, 3).t(), np.arange(6).reshape(2, 3).T),
        (torch.tensor([1 + 2j]).conj().imag, np.array([-2], "f4")),
        (torch.tensor(7, dtype=torch.uint16), np.array(7, "u2")),
    ],
)
def test_a_result_is_an_npy_row_with_its_dtype_and_shape(result: Any, expected: np.ndarray) -> None:
    row = row_of(result)
    assert row.dtype == expected.dtype
    assert row.shape == expected.shape
    assert np.array_equal(row, expected, equal_nan=row.dtype.kind == "f")


@pytest.mark.parametrize(
    "result",
    [
        None,
        "text",
        {"a": 1},
        {1, 2},
        b"x",
        2**70,
        1j,
        [[1, 2], [3]],
        loop(),
        np.array(["a"]),
        np.array([1], "M8[s]"),
        np.longdouble(1),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        [f32(1, requires_grad=True) * 2],
    ],
)
def test_what_is_no_npy_row_is_not_acceptable_as_one(result: Any) -> None:
    _done, failures = encoded([0, result, 2], "npy")
    assert list(failures) == [1]
    assert isinstance(failures[1], NotAcceptable)
    assert type(result).__name__ in failures[1].detail


def test_rows_of_unequal_form_keep_their_own() -> None:
    done, failures = encoded([1, 2.5, [1, 2]], "npy")
    assert not failures
    assert done.rows == [("<i8", ()), ("<f8", ()), ("<i8", (2,))]
    assert done.lengths == [8, 8, 16]


@pytest.mark.parametrize("dtype", "i1 u8 f2 f4 >f4 ?".split())
def test_an_array_of_all_results_is_one_row_form(dtype: str) -> None:
    whole = np.arange(12).reshape(3, 4).astype(dtype)
    for results in (whole, whole.T, whole[:, 0], whole[::2], np.asfortranarray(whole)):
        done, failures = encoded(results, "npy")
        assert not failures
        assert done.rows == [(results.dtype.str, results.shape[1:])]
        assert done.lengths == [results[0].nbytes] * len(results)
        assert np.array_equal(np.frombuffer(done.frame, results.dtype).reshape(results.shape), results)
    assert encoded(np.array([[1, NAN]]), "npy")[1] == {}
    assert [type(error) for error in encoded(np.array([1, 2], np.longdouble), "npy")[1].values()] == [NotAcceptable] * 2
    assert encoded(whole, "json")[0].frame == b",".join(
        json.dumps(row, separators=(",", ":")).encode() for row in whole.tolist()
    )


@quick
@given(st.randoms(use_true_random=False))
def test_what_is_decoded_and_encoded_again_is_the_same_bytes(rng: random.Random) -> None:
    array = np.frombuffer(rng.randbytes(48), rng.choice(["<i2", ">i4", "<f4", ">f8", "|u1"]))
    array = array.reshape(rng.choice([(-1,), (2, -1), (1, -1, 2)]))
    done, failures = encoded(rows(array, None).values, "npy")
    assert not failures
    back = np.frombuffer(done.frame, done.rows[0][0])
    assert np.array_equal(back, array.ravel(), equal_nan=array.dtype.kind == "f")


def test_a_whole_number_beyond_64_bits_is_written_as_it_is() -> None:
    result = {"n": [10**22, -(2**70)], "x": np.float32(0.5)}
    encoded = items.encode([result, 2**64], {}, 2, "json")
    assert json.loads(b"[" + encoded.frame + b"]") == [{"n": [10**22, -(2**70)], "x": 0.5}, 2**64]


def test_nan_beside_a_whole_number_beyond_64_bits_is_an_error() -> None:
    failures: items.Failures = {}
    assert items.encode([[10**22, float("nan")]], failures, 1, "json").frame == b"null"
    assert "no JSON form" in failures[0].detail
