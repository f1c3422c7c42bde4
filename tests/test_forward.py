"""`workers.forward`: a shard through a model, in which every item has its own outcome."""

from __future__ import annotations

import json
import logging
import math
import re
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from workers import forward, items
from workers.errors import (
    GroupError,
    InvalidItem,
    InvalidParameters,
    MalformedBody,
    ModelError,
    NonFiniteResult,
    NotAcceptable,
    PhalanxError,
    UnencodableResult,
)
from workers.forward import Forward
from workers.items import Encoded, Failures
from workers.model import Model, TensorSpec
from workers.wire import Encoding, Form

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


class Outcome(NamedTuple):
    encoded: Encoded
    failures: Failures

    @property
    def outputs(self) -> list[Any]:
        outputs: list[Any] = json.loads(b"[" + self.encoded.frame + b"]")
        assert len(outputs) == len(self.encoded.lengths)
        return outputs

    @property
    def failed(self) -> list[int]:
        return sorted(self.failures)


def run(
    instance: Any, values: list[Any], *, returns: Encoding = "json", parameters: Any = None, patience: float = 60
) -> Outcome:
    raws = [json.dumps(value).encode() for value in values]
    text = (
        b"" if parameters is None else parameters if isinstance(parameters, bytes) else json.dumps(parameters).encode()
    )
    form = Form("json", returns, text)
    model = Forward(Model(type(instance).__name__, instance), CPU)
    return Outcome(*model.run(b",".join(raws), [len(raw) for raw in raws], form, patience))


def model(predict: Callable[..., Any], **members: Any) -> Any:
    """A model with that predict (which takes the items and no self), and remembers the sizes of its batches."""
    sizes: list[int] = []

    def counted(_self: Any, items: Any, **parameters: Any) -> Any:
        sizes.append(len(items))
        return predict(items, **parameters)

    return type("Made", (), {"predict": counted, "sizes": sizes} | members)()


def boom(items: Any) -> Any:
    raise RuntimeError(f"boom over {len(items)}")


# ---- every item its outcome


def test_results_are_in_the_order_of_the_items() -> None:
    outcome = run(model(lambda items: [item * 2 for item in items]), [3, 1, 2])
    assert outcome.outputs == [6, 2, 4]
    assert outcome.failures == {}


def test_no_items_are_no_results_and_predict_is_not_called() -> None:
    idle = model(boom)
    for returns in ("json", "npy"):
        outcome = run(idle, [], returns=returns)
        assert (outcome.encoded.frame, outcome.encoded.lengths, outcome.failures) == (b"", [], {})
    assert idle.sizes == []


def test_each_stage_fails_its_own_items_and_the_others_are_answered() -> None:
    def preprocess(_self: Any, item: Any) -> Any:
        if item == "value":
            raise ValueError("not a good value")
        if item == "type":
            raise TypeError
        if item == "key":
            return {}["gone"]
        return item

    def predict(items: list[Any]) -> list[Any]:
        if "predict" in items:
            raise RuntimeError("no such thing")
        return items

    def postprocess(_self: Any, result: Any) -> Any:
        return {"postprocess": lambda: 1 / 0, "set": lambda: {1}, "nan": lambda: math.nan}.get(result, lambda: result)()

    given_items = ["ok", "value", "type", "key", "predict", "postprocess", "set", "nan", "fine"]
    made = model(predict, preprocess=preprocess, postprocess=postprocess)
    outcome = run(made, given_items)
    assert outcome.outputs == ["ok", *[None] * 7, "fine"]
    assert {i: (type(error), error.detail) for i, error in outcome.failures.items() if i < 6} == {
        1: (InvalidItem, "not a good value"),
        2: (InvalidItem, "TypeError"),
        3: (ModelError, "preprocess raised KeyError: 'gone'"),
        4: (ModelError, "predict raised RuntimeError: no such thing"),
        5: (ModelError, "postprocess raised ZeroDivisionError: division by zero"),
    }
    assert type(outcome.failures[6]) is UnencodableResult
    assert type(outcome.failures[7]) is NonFiniteResult


def test_items_that_cannot_be_decoded_do_not_reach_the_model() -> None:
    spied = model(lambda items: items + 1, inputs=TensorSpec("float32", (2,)))
    outcome = run(spied, [[1, 2], ["x", 2], [3], [5, 6]])
    assert outcome.outputs == [[2, 3], None, None, [6, 7]]
    assert outcome.failed == [1, 2]
    assert spied.sizes == [2]


def test_a_legitimate_null_is_a_result() -> None:
    outcome = run(model(lambda items: [None, {"a": None}]), [1, 2])
    assert outcome.outputs == [None, {"a": None}]
    assert outcome.failures == {}


# ---- what predict may return


@pytest.mark.parametrize(
    "returned",
    [
        [[1.5, 2], [3, 4]],
        ([1.5, 2], [3, 4]),
        [(1.5, 2), torch.tensor([3.0, 4])],
        torch.tensor([[1.5, 2], [3, 4]]),
        torch.tensor([[1.5, 2], [3, 4]], requires_grad=True),
        torch.tensor([[1.5, 2], [3, 4]], dtype=torch.bfloat16),
        torch.tensor([[1.5, 3], [2, 4]]).t(),
        np.array([[1.5, 2], [3, 4]]),
        np.array([[1.5, 3], [2, 4]]).T,
        np.array([[1.5, 2], [3, 4]], ">f4"),
        [np.array([1.5, 2]), np.array([3, 4], "f2")],
    ],
)
def test_results_may_be_a_list_a_tuple_an_array_or_a_tensor(returned: Any) -> None:
    outcome = run(model(lambda items: returned), ["a", "b"])
    assert outcome.outputs == [[1.5, 2], [3, 4]]
    assert outcome.failures == {}


@pytest.mark.parametrize("returned", [torch.tensor([1.5, 2]), np.array([1.5, 2]), [1.5, torch.tensor(2.0)]])
def test_a_result_may_be_one_number(returned: Any) -> None:
    assert run(model(lambda items: returned), ["a", "b"]).outputs == [1.5, 2]


class Pair(NamedTuple):
    values: Any
    indices: Any


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "NoneType"),
        ("ab", "str"),
        (b"ab", "bytes"),
        ({"a": 1, "b": 2}, "dict"),
        ({1, 2}, "set"),
        (7, "int"),
        (range(2), "range"),
        ((item for item in "ab"), "generator"),
        (map(str, "ab"), "map"),
        (torch.tensor(1.0), "Tensor"),
        (np.array(1.0), "ndarray"),
        (torch.tensor([[1.0, 2], [3, 4]]).max(dim=1), "max"),
        (Pair([1, 2], [0, 0]), "Pair"),
    ],
)
def test_anything_else_that_predict_returns_is_a_clear_error(returned: Any, kind: str) -> None:
    outcome = run(model(lambda items: returned), ["a", "b"], patience=0)
    assert outcome.failed == [0, 1]
    assert all(isinstance(error, ModelError) for error in outcome.failures.values())
    assert re.match(f"predict returned a {kind}(, not a list| without axes)", outcome.failures[0].detail)


@pytest.mark.parametrize("wrap", [list, tuple, torch.tensor, np.array])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_number_of_results_is_an_error_with_both_numbers(count: int, wrap: Callable[[list[int]], Any]) -> None:
    outcome = run(model(lambda items: wrap([1] * count)), ["a", "b", "c"], patience=0)
    assert outcome.failed == [0, 1, 2]
    assert isinstance(outcome.failures[0], ModelError)
    assert f"{count} results for 3 items" in outcome.failures[0].detail


def test_items_that_predict_drops_are_found_and_fail_alone() -> None:
    outcome = run(model(lambda items: [item for item in items if item != "drop"]), ["a", "b", "drop", "c"])
    assert outcome.outputs == ["a", "b", None, "c"]
    assert "0 results for 1 items" in outcome.failures[2].detail


def test_postprocess_gets_rows_of_the_kind_that_predict_returned() -> None:
    seen = []

    def postprocess(_self: Any, result: Any) -> Any:
        seen.append(type(result))
        return result.sum()

    rows = [[1.0, 2], [3, 4]]
    for returned in (torch.tensor(rows, requires_grad=True), np.array(rows), [torch.tensor(row) for row in rows]):
        assert run(model(lambda items, returned=returned: returned, postprocess=postprocess), [0, 0]).outputs == [3, 7]
    assert seen == [torch.Tensor] * 2 + [np.ndarray] * 2 + [torch.Tensor] * 2
    halves = torch.tensor(rows, dtype=torch.bfloat16)
    dtype = {"postprocess": lambda _self, result: str(result.dtype)}
    assert run(model(lambda items: halves, **dtype), [0, 0]).outputs == ["torch.bfloat16"] * 2


def test_postprocess_may_write_into_what_predict_made() -> None:
    made = model(lambda items: items * 2, inputs=TensorSpec("float32", ()), postprocess=lambda _self, row: row.add_(1))
    assert run(made, [1, 2]).outputs == [3, 5]


def test_preprocess_that_makes_tensors_of_one_form_gives_a_model_with_a_spec_one_tensor() -> None:
    shapes: list[Any] = []

    def predict(items: Any) -> list[int]:
        shapes.append(tuple(items.shape) if isinstance(items, torch.Tensor) else len(items))
        return [0] * len(items)

    double = {"preprocess": lambda _self, item: torch.cat([item, item])}
    run(model(predict, inputs=TensorSpec("float32", (2,)), **double), [[1, 2], [3, 4]])
    run(model(predict, preprocess=lambda _self, item: torch.tensor(item)), [[1, 2], [3, 4]])
    for uneven in (lambda _self, item: item[: int(item[0])], lambda _self, item: item.half() if item[0] > 1 else item):
        run(model(predict, inputs=TensorSpec("float32", (2,)), preprocess=uneven), [[1, 2], [2, 4]])
    assert shapes == [(2, 4), 2, 2, 2]


# ---- npy answers


def test_an_npy_answer_holds_rows_and_npy_has_nan() -> None:
    outcome = run(model(lambda items: torch.tensor([[1.0, math.nan], [3, 4]])), [0, 0], returns="npy")
    assert outcome.failures == {}
    assert outcome.encoded.rows == [("<f4", (2,))]
    assert np.array_equal(np.frombuffer(outcome.encoded.frame, "<f4"), [1, math.nan, 3, 4], equal_nan=True)


def test_in_an_npy_answer_a_failed_item_has_no_bytes() -> None:
    outcome = run(model(lambda items: items, inputs=TensorSpec("float32", ())), [1, "x", 3], returns="npy")
    assert outcome.failed == [1]
    assert outcome.encoded.lengths == [4, 0, 4]
    assert np.frombuffer(outcome.encoded.frame, "<f4").tolist() == [1, 3]


def test_a_result_that_is_no_row_is_not_acceptable_as_npy() -> None:
    outcome = run(model(lambda items: [1.0, {"a": 1}]), [0, 0], returns="npy")
    assert isinstance(outcome.failures[1], NotAcceptable)


# ---- parameters


def scaled(items: list[Any], factor: int = 1, *, offset: int = 0) -> list[int]:
    return [factor * item + offset for item in items]


class Scaled:
    def predict(self, items: list[int], factor: int = 1, *, offset: int = 0) -> list[int]:
        return scaled(items, factor, offset=offset)


class Open:
    def predict(self, items: list[int], **parameters: Any) -> list[Any]:
        return [parameters for _ in items]


def test_parameters_are_keyword_arguments_of_predict() -> None:
    assert run(Scaled(), [1, 2], parameters={"factor": 3, "offset": 1}).outputs == [4, 7]
    assert run(Scaled(), [1, 2]).outputs == [1, 2]
    assert run(Open(), [1], parameters={"a": [None, {"b": 1.5}]}).outputs == [{"a": [None, {"b": 1.5}]}]


@pytest.mark.parametrize(
    ("instance", "parameters", "names"),
    [
        (Scaled(), {"scale": 3}, ["'scale'", "factor, offset"]),
        (Scaled(), {"items": [1]}, ["'items'"]),
        (Scaled(), {"self": 1}, ["'self'"]),
        (Open(), {"items": [1]}, ["'items'"]),
        (Open(), {"self": 1}, ["'self'"]),
        (Scaled(), b'{"factor":1e400}', ["range", "parameters"]),
    ],
)
def test_parameters_that_the_model_does_not_take_refuse_all_items(
    instance: Any, parameters: Any, names: list[str]
) -> None:
    outcome = run(instance, [1, 2], parameters=parameters)
    assert outcome.encoded.frame == b"null,null"
    assert [type(error) for error in outcome.failures.values()] == [InvalidParameters] * 2
    assert all(name in outcome.failures[0].detail for name in names), outcome.failures[0].detail


@pytest.mark.parametrize(
    "parameters",
    [b'{"a":"\\ud800"}', b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"],
)
def test_parameters_that_are_no_json_within_the_limits_are_malformed(parameters: bytes) -> None:
    outcome = run(Open(), [1, 2], parameters=parameters)
    assert [type(error) for error in outcome.failures.values()] == [MalformedBody] * 2


# ---- micro-batches and bisection


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_exactly_the_items_that_raise_fail_and_no_batch_is_too_large(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 40))
    bad = data.draw(st.sets(st.integers(0, n - 1)) if n else st.just(set()))
    limit = data.draw(st.integers(1, 16))
    spec = data.draw(st.sampled_from([None, TensorSpec("int64", ())]))

    def predict(items: Any) -> Any:
        if bad & set(map(int, items)):
            raise KeyError("one of them")
        return [int(item) * 10 for item in items]

    made = model(predict, max_batch_size=limit, inputs=spec)
    outcome = run(made, list(range(n)))
    assert outcome.failed == sorted(bad)
    assert outcome.outputs == [None if i in bad else i * 10 for i in range(n)]
    assert max(made.sizes, default=0) <= limit
    assert len(made.sizes) <= max(0, 2 * n - 1)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
def test_one_item_that_raises_is_found_in_two_forwards_a_halving(n: int) -> None:
    for bad in range(n):
        made = model(lambda items, bad=bad: boom(items) if bad in items else items)
        assert run(made, list(range(n))).failed == [bad]
        assert len(made.sizes) <= 2 * math.ceil(math.log2(n)) + 2


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(forward, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def raising(self, bad: set[int], seconds: float) -> Callable[[Any], Any]:
        def predict(items: Any) -> Any:
            self.now += seconds
            return boom(items) if bad & set(items) else items

        return predict


def test_the_search_ends_with_its_patience_and_what_is_unresolved_takes_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    made = model(clock.raising({3, 9}, seconds=1))
    outcome = run(made, list(range(16)), patience=3.5)
    # 16 items at second 1, 0-7 at 2, 0-3 at 3, 0-1 at 4: good; then 2-3 raises too late, 4-7 is good, 8-15 raises
    assert made.sizes == [16, 8, 4, 2, 2, 4, 8]
    assert outcome.failed == [2, 3, *range(8, 16)]
    assert outcome.failures[2].detail == "predict raised RuntimeError: boom over 2"
    assert outcome.failures[8].detail == "predict raised RuntimeError: boom over 8"


def test_a_forward_that_raises_after_all_patience_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves of a forward that took most of the step's time would not end before the step's deadline."""
    clock = Clock(monkeypatch)
    made = model(clock.raising({3}, seconds=20))
    outcome = run(made, list(range(8)), patience=7.5)
    assert made.sizes == [8]
    assert outcome.failed == list(range(8))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 64), st.sets(st.integers(0, 63), min_size=1), st.floats(0.001, 40))
def test_a_search_never_takes_a_step_over_its_deadline(n: int, bad: set[int], seconds: float) -> None:
    """A forward of constant cost that ends within the deadline of a step, 40 s, of which a quarter is the patience."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        run(model(clock.raising(bad, seconds)), list(range(n)), patience=10)
    assert clock.now <= 40


def test_a_shard_that_fails_leaves_one_stack_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "workers"):
        run(model(boom), list(range(16)))
    assert len(caplog.records) == 2
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    assert "16 of 16" in caplog.text


# ---- memory


def hungry(limit: int) -> Callable[[Any], Any]:
    """Runs out of memory over more than `limit` items, and over the item 99 alone."""

    def predict(items: Any) -> Any:
        if len(items) > limit or 99 in items:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return [item + 1 for item in items]

    return predict


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 100])
def test_out_of_memory_halves_the_micro_batch_and_goes_on(limit: int) -> None:
    made = model(hungry(limit), max_batch_size=12)
    outcome = run(made, list(range(30)), patience=0)  # not a search for culprits: patience does not matter
    assert outcome.failures == {}
    assert outcome.outputs == list(range(1, 31))
    assert sum(size > limit for size in made.sizes) <= math.ceil(math.log2(12))


def test_an_item_that_alone_is_too_large_for_the_memory_fails_alone() -> None:
    outcome = run(model(hungry(64)), [1, 2, 99, 4])
    assert outcome.outputs == [2, 3, None, 5]
    assert isinstance(outcome.failures[2], ModelError)
    assert "out of memory" in outcome.failures[2].detail


def test_a_lost_device_is_the_end_of_the_group() -> None:
    def predict(items: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with pytest.raises(GroupError, match="device-side assert"):
        run(model(predict), [1, 2])


def test_a_failed_forward_keeps_none_of_its_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """Not while its halves run, and not as long as the errors live."""
    caplog.set_level(logging.CRITICAL, "workers")  # else pytest keeps the stack that is logged
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def predict(items: Any) -> Any:
        alive.append(sum(ref() is not None for ref in made))
        activations = torch.ones(8)
        made.append(weakref.ref(activations))
        return boom(items)

    outcome = run(model(predict), list(range(4)))
    assert outcome.failed == [0, 1, 2, 3]
    assert alive == [0] * 7
    assert all(ref() is None for ref in made)
    assert all(
        error.__traceback__ is error.__cause__ is error.__context__ is None for error in outcome.failures.values()
    )


def test_predict_gets_an_item_as_it_was_however_often_and_whatever_it_did_to_its_tensor() -> None:
    def predict(items: torch.Tensor) -> torch.Tensor:
        items.mul_(10)
        if 30 in items:
            raise RuntimeError("three is too much")
        return items

    made = model(predict, inputs=TensorSpec("float32", ()))
    outcome = run(made, [1, 2, 3, 4, 5])
    assert outcome.outputs == [10, 20, None, 40, 50]
    assert outcome.failed == [2]


@pytest.mark.parametrize(
    "wrap", [lambda out: out, list, lambda out: out.numpy(), lambda out: [{"row": row} for row in out]]
)
def test_a_model_may_answer_every_batch_in_the_same_memory(wrap: Callable[[torch.Tensor], Any]) -> None:
    out = torch.zeros(2, 1)

    def predict(items: torch.Tensor) -> Any:
        out[: len(items), 0] = items
        return wrap(out[: len(items)])

    outputs = run(model(predict, inputs=TensorSpec("float32", ()), max_batch_size=2), [1, 2, 3, 4, 5]).outputs
    assert [output["row"] if isinstance(output, dict) else output for output in outputs] == [[1], [2], [3], [4], [5]]


def test_what_cannot_be_copied_fails_no_other_item() -> None:
    made = model(lambda items: [(n for n in ()) if item == 1 else item for item in items], max_batch_size=2)
    outcome = run(made, [0, 1, 2, 3])
    assert outcome.outputs == [0, None, 2, 3]
    assert isinstance(outcome.failures[1], UnencodableResult)


def test_predict_may_empty_the_list_that_it_gets() -> None:
    def predict(batch: list[Any]) -> list[Any]:
        batch = batch
        results = [batch.pop(0) for _ in range(len(batch))]
        if "bad" in results:
            raise ValueError("bad")
        return results

    assert run(model(predict), ["a", "bad", "b", "c"]).outputs == ["a", None, "b", "c"]


def test_what_predict_did_to_items_before_it_raised_is_not_seen_when_they_run_again() -> None:
    def predict(items: Any) -> Any:
        for item in items:
            item["x"] *= 2
            if item["x"] < 0:
                raise ValueError("negative")
        return [item["x"] for item in items]

    values = [{"x": 1}] * 6 + [{"x": -1}] + [{"x": 1}] * 7
    assert run(model(predict), values).outputs == [2] * 6 + [None] + [2] * 7
    doubled = model(predict, preprocess=lambda self, item: {"x": 10 * item["x"]})
    assert run(doubled, values).outputs == [20] * 6 + [None] + [20] * 7


def test_what_predict_did_to_its_parameters_is_not_seen_by_the_next_forward() -> None:
    def predict(items: Any, nest: Any) -> Any:
        nest.append(1)
        if -1 in items:
            raise ValueError("negative")
        return [len(nest)] * len(items)

    assert run(model(predict), [1, 1, 1, -1, 1], parameters={"nest": []}).outputs == [1, 1, 1, None, 1]


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_an_exit_in_a_model_is_that_items_error(error: BaseException) -> None:
    def predict(items: Any) -> Any:
        if "out" in items:
            raise error
        return items

    assert run(model(predict), ["a", "out", "b"]).outputs == ["a", None, "b"]


# ---- errors with a text of their own


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("two\nlines\tand more"), "RuntimeError: two lines and more"),
        (RuntimeError("\udcff"), "RuntimeError: ?"),
        (RuntimeError(), "RuntimeError"),
        (Mute(), "Mute"),
        (StopIteration("s"), "StopIteration: s"),
        (RecursionError("deep"), "RecursionError: deep"),
        (MemoryError(), "MemoryError"),
        (AssertionError("a"), "AssertionError: a"),
    ],
)
def test_what_a_model_says_fits_on_one_line_of_a_message(error: Exception, said: str) -> None:
    def fail(*_: Any) -> Any:
        raise error

    for stage in ("predict", "preprocess", "postprocess"):
        members = {"predict": lambda items: items} | {stage: fail}
        predict = members.pop("predict")
        (failure,) = run(model(predict, **members), [1]).failures.values()
        assert failure.detail == f"{stage} raised {said}"
        failure.detail.encode()


def test_what_a_model_says_at_length_is_cut() -> None:
    def predict(items: Any) -> Any:
        raise RuntimeError("x" * 10**6)

    detail = run(model(predict), [1]).failures[0].detail
    assert detail.startswith("predict raised RuntimeError: xxx")
    assert 900 < len(detail) <= 1100


def test_a_model_may_raise_our_own_error_and_is_quoted() -> None:
    def predict(items: Any) -> Any:
        raise ModelError("as the model\nsays: \udcff")

    assert run(model(predict), [1]).failures[0].detail == "as the model says: ?"


# ---- the example


def example_of(instance: Any) -> Outcome:
    return Outcome(*Forward(Model("Made", instance), CPU).run_example(patience=1))


def test_the_example_runs_as_an_item_would() -> None:
    tensor = model(lambda items: items * 2, inputs=TensorSpec("float32", (2,)), example=np.array([1.5, 2]))
    assert example_of(tensor).outputs == [[3, 4]]
    assert example_of(model(lambda items: items, example={"a": 1})).outputs == [{"a": 1}]
    assert example_of(model(lambda items: items, example=None)).outputs == [None]
    assert example_of(model(lambda items: [len(item) for item in items], example=b"abc")).outputs == [3]


def test_a_model_without_an_example_runs_no_item() -> None:
    idle = model(boom)
    assert example_of(idle).outputs == []
    assert idle.sizes == []


def test_an_example_that_fails_says_why() -> None:
    assert "boom" in example_of(model(boom, example=1)).failures[0].detail
    wrong = example_of(model(boom, inputs=TensorSpec("float32", (2,)), example=[1, 2, 3])).failures[0]
    assert "float32[2]" in wrong.detail
    assert isinstance(
        example_of(model(boom, inputs=TensorSpec("float32", (1,)), example=[math.nan])).failures[0], PhalanxError
    )


def test_a_model_that_writes_into_its_example_gets_it_whole_the_next_time() -> None:
    made = model(lambda items: [item.pop("text") for item in items], example={"text": "it works"})
    forward_of_made = Forward(Model("Made", made), CPU)
    for _ in range(2):
        encoded, failures = forward_of_made.run_example(1)
        assert (encoded.frame, failures) == (b'"it works"', {})


# ---- grad


def test_predict_runs_without_grad_and_may_switch_it_on() -> None:
    def predict(items: torch.Tensor) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            inputs = items.clone().requires_grad_()
            (inputs**2).sum().backward()
        return inputs.grad

    assert run(model(predict, inputs=TensorSpec("float32", ())), [1, 2]).outputs == [2, 4]


def test_the_forms_of_one_step_are_those_of_the_rank() -> None:
    """npy in, JSON out."""
    made = Forward(Model("Made", model(lambda items: [float(item.sum()) for item in items])), CPU)
    array = np.arange(6, dtype=">f4").reshape(3, 2)
    encoded, failures = made.run(array.tobytes(), [8] * 3, Form("npy", "json", b"", (">f4", (2,))), 1)
    assert (encoded.frame, failures) == (b"1.0,5.0,9.0", {})
    assert items.encode([], {}, 0, "json").frame == b""
