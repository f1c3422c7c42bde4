"""`workers.model`: the contract, and finding and loading a model; every way to get it wrong has one clear sentence."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workers.errors import InvalidParameters, ModelLoadError
from workers.model import Model, TensorSpec, load, said

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
GOOD = """
class Echo:
    def __init__(self, device):
        self.device = device
    def predict(self, items):
        return items
"""


@pytest.fixture(autouse=True)
def imports_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file below a folder that is the current one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    return write


def sentence(where: str, max_batch_size: int = 0) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(where, CPU, max_batch_size)
    text = caught.value.detail
    assert "\n" not in text
    assert len(text) < 1500
    return text


# ---- where models are


def test_a_model_is_found_in_a_file_however_it_is_named(write: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("mine.py", "with space/my model.py", "sub/sub/dots.in.name.py", "json.py", "torch.py", "über.py"):
        path = write(GOOD, name)
        for where in (name, f"./{name}", str(path), f"{path.parent}/../{path.parent.name}/{path.name}"):
            loaded = load(f"{where}:Echo", CPU)
            assert loaded.name == "Echo"
            assert loaded.predict([1]) == [1]
    assert json.loads("1") == 1
    assert importlib.util.find_spec("torch").origin == torch.__file__  # type: ignore[union-attr]


def test_a_colon_in_a_folder_is_part_of_the_path(write: Callable[..., Path]) -> None:
    write(GOOD, "a:b/mine.py")
    assert load("a:b/mine.py:Echo", CPU).name == "Echo"


def test_a_model_is_found_in_a_package_of_the_current_folder(write: Callable[..., Path]) -> None:
    write("", "mypackage/__init__.py")
    write(GOOD, "mypackage/inner.py")
    assert load("mypackage.inner:Echo", CPU).name == "Echo"


def test_an_embedded_model_is_found_by_its_name_alone() -> None:
    assert load("digits", CPU).name == "Digits"


def test_the_model_gets_the_device(write: Callable[..., Path]) -> None:
    write(GOOD)
    assert load("mine.py:Echo", torch.device("meta")).predict.__self__.device == torch.device("meta")  # type: ignore[attr-defined]


def test_a_file_may_import_its_neighbours_and_our_contract(write: Callable[..., Path]) -> None:
    write("SIZE = 5", "folder/neighbour_of_mine.py")
    text = "from neighbour_of_mine import SIZE\nfrom workers.model import TensorSpec\n"
    write(f"{text}{GOOD}\n    inputs = TensorSpec('float32', (SIZE,))", "folder/mine.py")
    assert load("folder/mine.py:Echo", CPU).inputs == TensorSpec("float32", (5,))


@pytest.mark.parametrize("name", ["mine.py", "mine"])
def test_a_users_own_workers_and_app_do_not_shadow_ours(write: Callable[..., Path], tmp_path: Path, name: str) -> None:
    for package in ("workers", "app"):
        write("raise SystemExit('the wrong package')", f"{package}/__init__.py")
    write(f"import workers.errors, app\nassert workers.errors.StartError\n{GOOD}")
    ours = {package: importlib.util.find_spec(package) for package in ("workers", "app")}
    assert load(f"{name}:Echo", CPU).name == "Echo"
    assert sys.path[-1] == str(tmp_path)
    for package, spec in ours.items():
        assert importlib.util.find_spec(package).origin == spec.origin  # type: ignore[union-attr]


def test_a_dataclass_in_a_file_can_find_its_module(write: Callable[..., Path]) -> None:
    write(
        "from __future__ import annotations\nimport dataclasses\n"
        f"@dataclasses.dataclass\nclass Result:\n    x: int\n{GOOD}"
    )
    assert load("mine.py:Echo", CPU).name == "Echo"


# ---- what can be wrong with where it is


@pytest.mark.parametrize("where", ["", ":", "nothing", "mine.py", ":Echo", "mine.py:", "package.module", "Digits"])
def test_what_names_no_model_says_how_to_name_one(where: str) -> None:
    text = sentence(where)
    assert repr(where) in text
    assert "path/to/file.py:Class" in text
    assert "digits" in text


@pytest.mark.parametrize("where", ["gone.py:Echo", "/gone/mine.py:Echo", "~/gone/mine.py:Echo", "folder.py:Echo"])
def test_a_file_that_is_not_there_is_named_with_the_path_that_was_looked_for(
    write: Callable[..., Path], tmp_path: Path, where: str
) -> None:
    (write(GOOD).parent / "folder.py").mkdir()
    place = where.removesuffix(":Echo")
    assert sentence(where) == f"no such file: {place} (looked for {(tmp_path / Path(place).expanduser()).resolve()})"


@pytest.mark.parametrize("place", ["gone_package", "gone_package.inner", "workers.gone", "mine.inner", "path/to/file"])
def test_a_module_that_is_not_there_is_named_with_the_folder_that_was_looked_in(
    write: Callable[..., Path], tmp_path: Path, place: str
) -> None:
    write(GOOD)
    assert sentence(f"{place}:Echo") == f"no module {place!r} (looked in {tmp_path} and the installed packages)"


def test_a_class_that_is_not_there_comes_with_those_that_are(write: Callable[..., Path]) -> None:
    write(
        f"from pathlib import Path\nfrom workers.model import TensorSpec\nclass _Hidden: ...\nclass Other: ...\n{GOOD}"
    )
    assert sentence("mine.py:Eco") == "mine.py has no class 'Eco' (it has Other, Echo)"
    assert sentence("mine:Eco") == "mine has no class 'Eco' (it has Other, Echo)"
    write("", "empty.py")
    assert sentence("empty.py:Echo") == "empty.py has no class 'Echo' (it has none)"


def test_a_package_lists_the_classes_that_it_passes_on(write: Callable[..., Path]) -> None:
    write("from passing.inner import Echo", "passing/__init__.py")
    write(GOOD, "passing/inner.py")
    assert "it has Echo" in sentence("passing:Eco")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def Echo(device): ...", "mine.py:Echo is a function, not a class"),
        ("Echo = 3", "mine.py:Echo is a int, not a class"),
        ("class Echo: ...", "mine.py:Echo has no method predict(self, items)"),
        ("class Echo:\n    predict = 3", "mine.py:Echo has no method predict(self, items)"),
        ("class Echo(:", "importing mine.py raised SyntaxError: invalid syntax (mine.py, line 1)"),
        ("def f():\nx", "importing mine.py raised IndentationError: expected an indented block"),
        ("x = '\0'", "importing mine.py raised"),
        ("import gone_dependency", "importing mine.py raised ModuleNotFoundError: No module named 'gone_dependency'"),
        ("from workers.model import Gone", "importing mine.py raised ImportError: cannot import name 'Gone'"),
        ("1 / 0", "importing mine.py raised ZeroDivisionError: division by zero"),
        ("raise SystemExit('no licence')", "importing mine.py raised SystemExit: no licence"),
        ("import sys; sys.exit()", "importing mine.py raised SystemExit"),
        ("from . import x", "importing mine.py raised ImportError: attempted relative import"),
        ("raise RuntimeError('a\\n  b')", "importing mine.py raised RuntimeError: a b"),
    ],
)
def test_a_file_that_holds_no_such_model_says_why(write: Callable[..., Path], text: str, said: str) -> None:
    write(text)
    assert sentence("mine.py:Echo").startswith(said)


def test_a_dependency_that_is_missing_inside_a_package_is_not_taken_for_the_package(write: Callable[..., Path]) -> None:
    write("import gone_dependency.inner", "lacking.py")
    assert sentence("lacking:Echo") == "importing lacking raised ModuleNotFoundError: No module named 'gone_dependency'"
    write("import lacking.inner", "around/__init__.py")
    assert "gone_dependency" in sentence("around.inner:Echo")


def test_a_package_that_does_not_compile_says_where(write: Callable[..., Path]) -> None:
    write("class Echo(:", "broken_package/__init__.py")
    assert "SyntaxError: invalid syntax (__init__.py, line 1)" in sentence("broken_package.inner:Echo")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def __init__(self, device): raise OSError('weights.bin is not there')", "OSError: weights.bin is not there"),
        ("def __init__(self, device): raise SystemExit(3)", "SystemExit: 3"),
        ("def __init__(self, device): raise KeyError", "KeyError"),
        ("def __init__(self): ...", "TypeError: Echo.__init__() takes 1 positional argument but 2 were given"),
        ("pass", "TypeError: Echo() takes no arguments"),
        ("def __init__(self, device): raise RuntimeError('Error(s) in loading:\\n\\tsize mismatch')", "loading: size"),
    ],
)
def test_a_model_that_raises_when_it_is_made_is_named_with_what_it_said(
    write: Callable[..., Path], body: str, said: str
) -> None:
    write(f"class Echo:\n    {body}\n    def predict(self, items): ...")
    text = sentence("mine.py:Echo")
    assert text.startswith("mine.py:Echo: Echo.__init__ raised ")
    assert said in text


# ---- the contract


class Bare:
    def predict(self, items: Any) -> Any:
        return items


def made(**members: Any) -> Any:
    return type("Made", (Bare,), members)()


def test_a_bare_class_gets_the_defaults() -> None:
    bare = Model("Bare", Bare())
    assert bare.max_batch_size == 64
    assert bare.inputs is bare.preprocess is bare.postprocess is None
    assert not bare.has_example


def test_none_is_an_example_and_no_example_is_none() -> None:
    assert Model("Made", made(example=None)).has_example
    assert Model("Made", made(example=None)).example is None


def test_the_services_batch_size_goes_before_the_models() -> None:
    assert Model("Made", made(max_batch_size=1)).max_batch_size == 1
    assert Model("Made", made(max_batch_size=7), 3).max_batch_size == 3


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", None, True, np.int64(8)])
def test_a_batch_size_that_is_no_positive_integer_is_refused(size: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"^Made: max_batch_size is .*not a positive integer$"):
        Model("Made", made(max_batch_size=size))


@pytest.mark.parametrize("inputs", ["float32", ("float32", (64,)), TensorSpec, torch.float32])
def test_inputs_that_are_no_spec_are_refused(inputs: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"^Made: inputs is a \w+, not a workers.model.TensorSpec$"):
        Model("Made", made(inputs=inputs))


@pytest.mark.parametrize("method", ["preprocess", "postprocess", "predict"])
def test_a_method_that_cannot_be_called_is_refused(method: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^Made.{method} is no method$"):
        Model("Made", made(**{method: 3}))


def test_predict_may_be_any_callable_but_must_return_its_results() -> None:
    assert Model("Made", made(predict=staticmethod(lambda items: items))).predict([1]) == [1]
    assert Model("Made", made(predict=torch.nn.ReLU())).predict(torch.tensor(-1)) == 0

    async def later(self: Any, items: Any) -> Any: ...

    def one_by_one(self: Any, items: Any) -> Any:
        yield from items

    for predict in (later, one_by_one):
        with pytest.raises(ModelLoadError, match=r"^Made.predict is async or a generator: it must return its results$"):
            Model("Made", made(predict=predict))


@pytest.mark.parametrize("dtype", ["float", "complex64", "F32", "", torch.float32, None])
def test_a_spec_of_a_dtype_that_numbers_cannot_fill_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"is not one of bool, uint8, .*float64"):
        TensorSpec(dtype, (1,))


@pytest.mark.parametrize("shape", [64, [64], (1.5,), (-1,), ("64",), (True,), None, "64"])
def test_a_spec_of_a_shape_that_is_no_tuple_of_sizes_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="is not a tuple of sizes and None"):
        TensorSpec("float32", shape)


def test_a_spec_says_what_it_takes() -> None:
    assert str(TensorSpec("float32", (3, None, 0))) == "float32[3, any, 0]"
    assert str(TensorSpec("bool", ())) == "bool[]"


# ---- parameters


def takes(predict: Callable[..., Any]) -> Model:
    return Model("Made", made(predict=predict))


@pytest.mark.parametrize(
    ("predict", "parameters", "detail"),
    [
        (lambda self, items: 0, {}, None),
        (lambda self, items: 0, {"a": 1}, "Made has no parameter 'a' (it takes none)"),
        (lambda self, items, a, *, b=1: 0, {"a": 1}, None),
        (lambda self, items, a, *, b=1: 0, {"b": 1}, "Made needs the parameter 'a'"),
        (lambda self, items, a, *, b=1: 0, {"a": 1, "c": 1}, "Made has no parameter 'c' (it takes a, b)"),
        (lambda self, items, **rest: 0, {"a": 1, "b": 2}, None),
        (lambda self, items, a, **rest: 0, {"b": 2}, "Made needs the parameter 'a'"),
        (lambda self, items, **rest: 0, {"items": 1}, "Made has no parameter 'items' (it takes none)"),
        (lambda self, items, **rest: 0, {"self": 1}, "Made has no parameter 'self' (it takes none)"),
        (lambda self, batch, /, **rest: 0, {"batch": 1}, None),
        (lambda self, *batch: 0, {"batch": 1}, "Made has no parameter 'batch' (it takes none)"),
        (lambda self, items: 0, {"x" * 10**6: 1}, f"Made has no parameter '{'x' * 100}' (it takes none)"),
    ],
)
def test_parameters_are_those_of_predicts_signature(
    predict: Callable[..., Any], parameters: dict[str, int], detail: str | None
) -> None:
    if detail is None:
        takes(predict).check(parameters)
        return
    with pytest.raises(InvalidParameters) as caught:
        takes(predict).check(parameters)
    assert caught.value.detail == detail


def test_a_signature_that_python_cannot_read_takes_any_parameter() -> None:
    takes(max).check({"key": 1})  # type: ignore[arg-type]  # a builtin


# ---- what a user's exception says


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text", "without_kind"),
    [
        (ValueError("one\n two"), "ValueError: one two", "one two"),
        (ValueError(), "ValueError", "ValueError"),
        (Mute(), "Mute", "Mute"),
        (OSError("\udcff"), "OSError: ?", "?"),
        (ValueError("x" * 5000), f"ValueError: {'x' * 1000}", "x" * 1000),
    ],
)
def test_an_exception_is_told_on_one_line(error: Exception, text: str, without_kind: str) -> None:
    assert said(error) == text
    assert said(error, kind=False) == without_kind
