"""The model contract, and finding and loading a model that keeps it; it knows nothing of batches, ranks or the queue."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from workers.errors import InvalidParameters, ModelLoadError

EMBEDDED = {"digits": "workers.models.digits:Digits"}
DEFAULT_MAX_BATCH_SIZE = 64
NO_EXAMPLE = object()
DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
)  # those that JSON numbers and npy rows can fill


@dataclass(frozen=True)
class TensorSpec:
    """A model that says `inputs = TensorSpec("float32", (64,))` gets its items as one tensor `[n, 64]` on its device.

    `None` in `shape` stands for any size, equal within a step. An item with a number outside `minimum`..`maximum` is refused.
    """

    dtype: str
    shape: tuple[int | None, ...]
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"TensorSpec: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if not all(size is None or (isinstance(size, int) and size >= 0) for size in self.shape):
            raise ValueError(f"TensorSpec: shape {self.shape!r} holds something other than sizes and None")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('any' if size is None else str(size) for size in self.shape)}]"


class Model:
    """A user's model object behind the contract, checked once at load."""

    def __init__(self, name: str, instance: Any, max_batch_size: int = 0) -> None:
        """`max_batch_size` 0 = the model's own. ModelLoadError where `instance` breaks the contract."""
        self.name = name
        self.max_batch_size = max_batch_size or getattr(instance, "max_batch_size", DEFAULT_MAX_BATCH_SIZE)
        self.inputs: TensorSpec | None = getattr(instance, "inputs", None)
        self.example: object = getattr(instance, "example", NO_EXAMPLE)
        self.predict: Callable[..., Any] = _method(name, instance, "predict", required=True)
        self.preprocess: Callable[[Any], Any] | None = _method(name, instance, "preprocess")
        self.postprocess: Callable[[Any], Any] | None = _method(name, instance, "postprocess")
        if not isinstance(self.max_batch_size, int) or self.max_batch_size < 1:
            raise ModelLoadError(f"{name}: max_batch_size is {self.max_batch_size!r}, not a positive integer")
        if self.inputs is not None and not isinstance(self.inputs, TensorSpec):
            raise ModelLoadError(f"{name}: inputs is a {type(self.inputs).__name__}, not a workers.model.TensorSpec")
        self._parameters = _parameters(self.predict)

    @property
    def has_example(self) -> bool:
        return self.example is not NO_EXAMPLE

    def check(self, parameters: Mapping[str, object]) -> None:
        """InvalidParameters where predict's signature does not take exactly these."""
        known, needed, any_name = self._parameters
        if not any_name:
            for name in parameters:
                if name not in known:
                    takes = f"it takes {', '.join(known)}" if known else "it takes none"
                    raise InvalidParameters(f"{self.name} has no parameter {name!r} ({takes})")
        for name in needed:
            if name not in parameters:
                raise InvalidParameters(f"{self.name} needs the parameter {name!r}")


def load(where: str, device: torch.device, max_batch_size: int = 0) -> Model:
    """Load `package.module:Class`, `path/to/file.py:Class` or the name of an embedded model onto `device`.

    Raises ModelLoadError with one sentence that says what is wrong.
    """
    cls = _find(where)
    try:
        instance = cls(device)
    except Exception as error:
        raise ModelLoadError(f"{where}: {cls.__name__}.__init__ raised {_said(error)}") from error
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
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and not key.startswith("_")]
        raise ModelLoadError(f"{place} has no class {name!r} (it has {', '.join(classes) or 'none'})")
    if not inspect.isclass(found):
        raise ModelLoadError(f"{place}:{name} is a {type(found).__name__}, not a class")
    if not callable(getattr(found, "predict", None)):
        raise ModelLoadError(f"{place}:{name} has no method predict(self, items)")
    return found


def _file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ModelLoadError(f"no such file: {place} (looked for {path})")
    _append(path.parent)
    spec = importlib.util.spec_from_file_location(f"model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelLoadError(f"importing {place} raised {_said(error)}") from error
    return module


def _package(place: str) -> ModuleType:
    _append(Path(os.getcwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise ModelLoadError(f"no module {place!r} (looked in {os.getcwd()} and the installed packages)") from error
        raise ModelLoadError(f"importing {place} raised {_said(error)}") from error
    except Exception as error:
        raise ModelLoadError(f"importing {place} raised {_said(error)}") from error


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


def _parameters(predict: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Names that predict takes besides the items, those without a default, and whether it takes any name."""
    try:
        _items, *rest = inspect.signature(predict).parameters.values()
    except (TypeError, ValueError):  # no signature (C code), or predict takes nothing: the first call will tell
        return [], [], True
    named = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    any_name = any(p.kind is p.VAR_KEYWORD for p in rest)
    return [p.name for p in named], [p.name for p in named if p.default is p.empty], any_name


def _said(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
