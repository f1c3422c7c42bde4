"""The model contract, and how a model that keeps it is found and loaded; it knows no batches, ranks or queue."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from workers.errors import InvalidParameters, ModelLoadError

EMBEDDED = {"digits": "workers.models.digits:Digits"}
DEFAULT_MAX_BATCH_SIZE = 64
MAX_SAID = 1000  # characters of an exception's text
NO_EXAMPLE = object()
DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
)  # those that JSON numbers and npy rows can fill


@dataclass(frozen=True)
class TensorSpec:
    """A model that says `inputs = TensorSpec("float32", (64,))` gets its items as one tensor `[n, 64]` on its device.

    `None` in `shape` stands for any size, equal within a step. An item with a number outside `minimum`..`maximum` is
    refused.
    """

    dtype: str
    shape: tuple[int | None, ...]
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"TensorSpec: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if not isinstance(self.shape, tuple) or not all(
            size is None or (type(size) is int and size >= 0) for size in self.shape
        ):
            raise ValueError(f"TensorSpec: shape {self.shape!r} is not a tuple of sizes and None")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('any' if size is None else str(size) for size in self.shape)}]"


class File(bytes):
    """An item that came as a file: its bytes, with the name the client gave it, which is only a name."""

    name: str

    def __new__(cls, data: bytes | memoryview, name: str = "") -> File:
        file = super().__new__(cls, data)
        file.name = name
        return file

    def __reduce__(self) -> tuple[type[File], tuple[bytes, str]]:
        return File, (bytes(self), self.name)


class Model:
    """A user's model object behind the contract, checked once at load."""

    def __init__(self, name: str, instance: Any, max_batch_size: int = 0) -> None:
        """`max_batch_size` 0 = the model's own. ModelLoadError where `instance` breaks the contract."""
        self.name = name
        self.max_batch_size: int = max_batch_size or getattr(instance, "max_batch_size", DEFAULT_MAX_BATCH_SIZE)
        self.inputs: TensorSpec | None = getattr(instance, "inputs", None)
        self.example: object = getattr(instance, "example", NO_EXAMPLE)
        self.predict: Callable[..., Any] = _method(name, instance, "predict", required=True)
        self.preprocess: Callable[[Any], Any] | None = _method(name, instance, "preprocess")
        self.postprocess: Callable[[Any], Any] | None = _method(name, instance, "postprocess")
        if type(self.max_batch_size) is not int or self.max_batch_size < 1:
            raise ModelLoadError(f"{name}: max_batch_size is {self.max_batch_size!r}, not a positive integer")
        if self.inputs is not None and not isinstance(self.inputs, TensorSpec):
            raise ModelLoadError(f"{name}: inputs is a {type(self.inputs).__name__}, not a workers.model.TensorSpec")
        if inspect.iscoroutinefunction(self.predict) or inspect.isgeneratorfunction(self.predict):
            raise ModelLoadError(f"{name}.predict is async or a generator: it must return its results")
        self._signature = _signature(self.predict)

    @property
    def has_example(self) -> bool:
        return self.example is not NO_EXAMPLE

    def check(self, parameters: Mapping[str, object]) -> None:
        """InvalidParameters where predict's signature does not take exactly these."""
        known, needed, reserved, any_name = self._signature
        for name in parameters:
            if name in reserved or not (any_name or name in known):
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise InvalidParameters(f"{self.name} has no parameter {name[:100]!r} ({takes})")
        for name in needed:
            if name not in parameters:
                raise InvalidParameters(f"{self.name} needs the parameter {name!r}")


def device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """Where a rank of this host runs; `wanted` is auto, cpu or cuda. ModelLoadError: there are too few GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if count < local_world:
        raise ModelLoadError(f"{local_world} ranks need {local_world} GPUs, and {count} can be seen; lower the ranks")
    return torch.device("cuda", local_rank)


def load(where: str, device: torch.device, max_batch_size: int = 0) -> Model:
    """Load `package.module:Class`, `path/to/file.py:Class` or the name of an embedded model onto `device`.

    Raises ModelLoadError with one sentence that says what is wrong.
    """
    cls = _find(where)
    try:
        instance = cls(device)
    except (Exception, SystemExit) as error:
        raise ModelLoadError(f"{where}: {cls.__name__}.__init__ raised {said(error)}") from error
    return Model(cls.__name__, instance, max_batch_size)


def _find(where: str) -> type[Any]:
    place, colon, name = EMBEDDED.get(where, where).rpartition(":")
    if not colon or not place or not name:
        raise ModelLoadError(
            f"{where!r} names no model: give package.module:Class, path/to/file.py:Class or {', '.join(EMBEDDED)}"
        )
    module = _file(place) if place.endswith(".py") else _package(place)
    found = getattr(module, name, None)
    if found is None:
        classes = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__.startswith(module.__name__) and not key.startswith("_")
        ]
        raise ModelLoadError(f"{place} has no class {name!r} (it has {', '.join(classes) or 'none'})")
    if not inspect.isclass(found):
        raise ModelLoadError(f"{place}:{name} is a {type(found).__name__}, not a class")
    if not callable(getattr(found, "predict", None)):
        raise ModelLoadError(f"{place}:{name} has no method predict(self, items)")
    return found


def _file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    try:
        if not path.is_file():
            raise ModelLoadError(f"no such file: {place} (looked for {path})")
    except OSError as error:  # a folder that this user may not look into
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    _append(path.parent)
    spec = importlib.util.spec_from_file_location(f"model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelLoadError(f"importing {place} raised {said(error)}") from error
    return module


def _package(place: str) -> ModuleType:
    here = Path.cwd()
    _append(here)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (place == missing or place.startswith(missing + ".")):
            raise ModelLoadError(f"no module {place!r} (looked in {here} and the installed packages)") from error
        raise ModelLoadError(f"importing {place} raised {said(error)}") from error


def _append(folder: Path) -> None:
    """At the end: a user's own `app` or `workers` folder must not shadow ours."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _method(name: str, instance: Any, method: str, required: bool = False) -> Any:
    found = getattr(instance, method, None)
    if found is None and not required:
        return None
    if not callable(found):
        raise ModelLoadError(f"{name} has no method {method}" if found is None else f"{name}.{method} is no method")
    return found


class _Signature(NamedTuple):
    known: list[str]  # parameters that predict takes besides the items
    needed: list[str]  # those without a default
    reserved: set[str]  # what would collide with the items or the model itself
    any_name: bool


def _signature(predict: Callable[..., Any]) -> _Signature:
    try:
        items, *rest = inspect.signature(predict).parameters.values()
    except (TypeError, ValueError):  # no signature (C code), or predict takes nothing: the first call will tell
        return _Signature([], [], {"self"}, True)
    named = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return _Signature(
        [p.name for p in named],
        [p.name for p in named if p.default is p.empty],
        {"self"} if items.kind is items.POSITIONAL_ONLY else {"self", items.name},
        any(p.kind is p.VAR_KEYWORD for p in rest),
    )


def said(error: BaseException, kind: bool = True) -> str:
    """What an exception of a user's code says, on one line that every message can carry; never raises."""
    try:
        text = " ".join(str(error)[:MAX_SAID].split())
    except Exception:  # its own text raises
        text = ""
    text = text.encode(errors="replace").decode()  # lone surrogates would fit in no message
    return f"{type(error).__name__}: {text}" if kind and text else text or type(error).__name__
