"""What `phalanx infer` writes, so that a run may end at any byte and go on; it knows neither service nor inputs.

Of an item first its failure is written, if it is one, then its result: so the results say how many items are done, and
of the failures those beyond are cut off.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import orjson

from app import chunks
from app.chunks import Array
from workers.errors import ItemError, NonFiniteResult, SettingsError, UnencodableResult


class Results:
    """JSON lines, one an item: `{"index": …, "output": …}`; null where an item failed.

    `done` items are in it, `failed` of them with a line in the file of errors.
    """

    def __init__(self, file: BinaryIO, errors: Path, total: int) -> None:
        self.done = 0
        self.failed = 0
        self._file = file
        self._errors_path = errors
        self._errors: BinaryIO | None = None
        self._total = total

    def recover(self) -> None:
        """Finds what is done, and cuts off what is torn. SettingsError: this is something else."""
        self._file.truncate(self._whole_items())
        if self.done > self._total:
            raise SettingsError(f"{self._file.name} was changed: it has {self.done} results of {self._total} items")
        self._file.seek(0, os.SEEK_END)
        if self._errors_path.exists():
            end = 0
            with self._errors_path.open("rb+") as file:
                for line in file:
                    if not line.endswith(b"\n") or _index(line, self._errors_path) >= self.done:
                        break
                    self.failed += 1
                    end += len(line)
                file.truncate(end)

    def write(self, name: str | None, outcome: object) -> None:
        """The next item's output or ItemError; `name` is of the file that it was."""
        head = {"index": self.done} | ({"file": name} if name is not None else {})
        try:
            result = self._result(head, outcome)
        except ItemError as error:
            self._errors = self._errors or self._errors_path.open("ab")
            members = {"type": error.type, "title": error.title, "detail": error.detail}
            self._errors.write(orjson.dumps(head | members) + b"\n")
            self._errors.flush()
            self.failed += 1
            result = self._hole(head)
        self.done += 1
        self._file.write(result)
        self._file.flush()

    def finish(self) -> None:
        """After the last item."""

    def close(self) -> None:
        self._file.close()
        if self._errors is not None:
            self._errors.close()

    def _whole_items(self) -> int:
        """Sets `done`; the bytes that they take."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if not line.startswith(b'{"index":%d,' % self.done):
                raise SettingsError(f"{self._file.name} was changed: line {self.done + 1} is not of item {self.done}")
            self.done += 1
            end += len(line)
        return end

    def _result(self, head: dict[str, Any], outcome: object) -> bytes:
        if isinstance(outcome, ItemError):
            raise outcome
        if isinstance(outcome, np.ndarray | np.generic) and not np.isfinite(outcome).all():
            raise NonFiniteResult("the result holds NaN or infinity, which JSON cannot say; -o RESULTS.npy can")
        try:
            return chunks.encode(head | {"output": outcome}) + b"\n"
        except TypeError:  # whole numbers beyond 64 bits
            return msgspec.json.encode(head | {"output": outcome}) + b"\n"

    def _hole(self, head: dict[str, Any]) -> bytes:
        return orjson.dumps(head | {"output": None}) + b"\n"


class ArrayResults(Results):
    """An .npy file of a row an item, of the first one's dtype; NaN, or zeros if that has none, where an item failed.

    Its header speaks of all items from the first result on, so that it is a whole npy file when the run is done.
    """

    _form: Array | None = None  # an empty row
    _held = 0  # items that failed before there was a form

    def finish(self) -> None:
        if self._form is None:
            self._file.write(self._begin(np.empty((), np.float32)))
            self._file.flush()

    def _whole_items(self) -> int:
        self._file.seek(0)
        try:
            np.lib.format.read_magic(self._file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(self._file)
        except ValueError:  # torn, if it is ours
            return 0
        self._form = np.empty(shape[1:], dtype)
        start, size = self._file.tell(), os.fstat(self._file.fileno()).st_size
        self.done = (size - start) // self._form.nbytes if self._form.nbytes else shape[0]
        return start + self.done * self._form.nbytes

    def _result(self, head: dict[str, Any], outcome: object) -> bytes:
        if isinstance(outcome, ItemError):
            raise outcome
        row = np.asarray(outcome)
        if row.dtype.kind not in "biuf":
            raise SettingsError("the model's results are no rows of numbers: -o a .jsonl file")
        if self._form is None:
            return self._begin(row) + row.tobytes()
        if row.shape != self._form.shape:
            raise UnencodableResult(f"the result has shape {list(row.shape)}, others {list(self._form.shape)}")
        with np.errstate(invalid="ignore"):
            cast = row.astype(self._form.dtype)
            if not np.array_equal(cast.astype(row.dtype), row, equal_nan=row.dtype.kind == "f"):
                what = f"the result is {row.dtype}, the first ones {self._form.dtype}, which cannot hold it"
                raise UnencodableResult(f"{what}; -o a .jsonl file can")
        return cast.tobytes()

    def _hole(self, head: dict[str, Any]) -> bytes:
        if self._form is None:
            self._held += 1
            return b""
        blank = np.nan if self._form.dtype.kind == "f" else 0
        return np.full_like(self._form, blank).tobytes()

    def _begin(self, row: Array) -> bytes:
        self._form = np.empty_like(row)
        file = io.BytesIO()
        form = {"descr": row.dtype.str, "fortran_order": False, "shape": (self._total, *row.shape)}
        np.lib.format.write_array_header_1_0(file, form)
        return file.getvalue() + self._hole({}) * self._held


@contextmanager
def opened(path: Path, mark: Mapping[str, Any], total: int, *, resume: bool, force: bool) -> Iterator[Results]:
    """The results of a run over `total` items, of which `mark` tells the inputs; new ones, or as far as they are.

    SettingsError: there are results already, or of other inputs, or they are being written.
    """
    errors, run = (path.with_name(path.name + suffix) for suffix in (".errors.jsonl", ".run.json"))
    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"{path} is being written by another run") from None
        begun = os.fstat(file.fileno()).st_size > 0
        if begun and not (resume or force):
            raise SettingsError(f"{path} exists: --resume goes on with it, --force begins it anew")
        if begun and resume and (not run.exists() or _loaded(run) != mark):
            raise SettingsError(f"{path} is of other inputs, other parameters or no run: --force begins it anew")
        if force:
            file.truncate(0)
        if not begun or force:
            errors.unlink(missing_ok=True)
            new = run.with_name(run.name + ".new")
            new.write_bytes(orjson.dumps(mark))
            new.replace(run)
        results = (ArrayResults if path.suffix == ".npy" else Results)(file, errors, total)
        results.recover()
        try:
            yield results
        finally:
            results.close()
            if results.done < total and not path.stat().st_size:  # it says nothing
                for one in (path, run, errors):
                    one.unlink(missing_ok=True)


def _index(line: bytes, path: Path) -> int:
    try:
        return int(orjson.loads(line)["index"])
    except (ValueError, KeyError, TypeError):
        raise SettingsError(f"{path} was changed: {line[:100]!r} is no failure") from None


def _loaded(path: Path) -> object:
    try:
        return orjson.loads(path.read_bytes())
    except ValueError:
        raise SettingsError(f"{path} was changed: it is not JSON") from None
