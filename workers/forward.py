"""A shard through the model: decode, preprocess, micro-batches, bisection, out of memory, encode; it knows no group and no queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from workers import items
from workers.errors import GroupError, InvalidItem, ModelError, PhalanxError
from workers.items import Encoded, Failures
from workers.model import NO_EXAMPLE, Model
from workers.wire import Buffer, Form

log = logging.getLogger("workers")


class Forward:
    """One rank's model on its device."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model
        self.device = device

    def run(self, frame: Buffer, lengths: Sequence[int], form: Form, patience: float) -> tuple[Encoded, Failures]:
        """The results of the items in `frame`, encoded, and the errors of those that have none.

        `patience` bounds, in seconds, the search for the items that make a batch raise. GroupError: the device is lost.
        """
        size = len(lengths)
        try:
            parameters = _parameters(form.parameters)
            self.model.check(parameters)
        except PhalanxError as error:
            refused: Failures = dict.fromkeys(range(size), error)
            return items.encode([], refused, size, form.returns), refused
        decoded = items.decode(frame, lengths, form, self.model.inputs)
        return self._finish(decoded.values, decoded.index, decoded.failures, size, form, parameters, patience)

    def run_example(self, patience: float) -> tuple[Encoded, Failures]:
        """The model's example as a shard of one item, as JSON; no items where the model has none."""
        form = Form("json", "json")
        example = self.model.example
        if example is NO_EXAMPLE:
            return items.encode([], {}, 0, "json"), {}
        if self.model.inputs is not None:
            failures: Failures = {}
            text = items.encode([example], failures, 1, "json")
            if failures:
                return text, failures
            return self.run(text.frame, text.lengths, form, patience)
        return self._finish([example], [0], {}, 1, form, {}, patience)

    def _finish(
        self,
        values: torch.Tensor | list[Any],
        index: list[int],
        failures: Failures,
        size: int,
        form: Form,
        parameters: dict[str, Any],
        patience: float,
    ) -> tuple[Encoded, Failures]:
        values, index = self._preprocess(values, index, failures)
        with torch.inference_mode():
            answers = _Answers(self.model, values, parameters, time.monotonic() + patience, self.device)
            answers.collect()
        for k, error in answers.errors.items():
            failures[index[k]] = error
        results: Sequence[Any] | np.ndarray
        if isinstance(answers.whole, np.ndarray) and len(index) == size and self.model.postprocess is None:
            results = answers.whole
        else:
            results = [None] * size
            for k, result in answers.results():
                try:
                    results[index[k]] = result if self.model.postprocess is None else self.model.postprocess(result)
                except Exception as error:
                    failures[index[k]] = _model_error("postprocess", error)
        return items.encode(results, failures, size, form.returns), failures

    def _preprocess(
        self, values: torch.Tensor | list[Any], index: list[int], failures: Failures
    ) -> tuple[torch.Tensor | list[Any], list[int]]:
        if self.model.preprocess is None:
            return values, index
        ready, kept = [], []
        for i, value in zip(index, values, strict=True):
            try:
                ready.append(self.model.preprocess(value))
                kept.append(i)
            except (ValueError, TypeError) as error:
                failures[i] = InvalidItem(str(error) or type(error).__name__)
            except Exception as error:
                failures[i] = _model_error("preprocess", error)
        alike = ready and all(
            isinstance(value, torch.Tensor) and value.shape == ready[0].shape and value.dtype == ready[0].dtype
            for value in ready
        )
        return (torch.stack(ready) if alike and self.model.inputs is not None else ready), kept


class _Answers:
    """The model's results for the items of a shard, found in micro-batches; of a batch that raises, by halving it."""

    def __init__(
        self,
        model: Model,
        values: torch.Tensor | list[Any],
        parameters: dict[str, Any],
        give_up: float,
        device: torch.device,
    ) -> None:
        self.model = model
        self.values = values
        self.parameters = parameters
        self.give_up = give_up
        self.device = device
        self.micro_batch = model.max_batch_size
        self.parts: list[tuple[int, Sequence[Any] | np.ndarray]] = []
        self.errors: Failures = {}

    @property
    def whole(self) -> Sequence[Any] | np.ndarray | None:
        """All results, where one micro-batch held them."""
        return self.parts[0][1] if len(self.parts) == 1 and not self.errors else None

    def results(self) -> list[tuple[int, Any]]:
        return [(start + k, result) for start, part in self.parts for k, result in enumerate(part)]

    def collect(self) -> None:
        # a stack, so that the halves of a batch come before what follows it
        waiting: list[tuple[int, int, bool]] = [(0, len(self.values), False)]
        while waiting:
            start, stop, suspect = waiting.pop()
            if stop - start > self.micro_batch:
                waiting += [(start + self.micro_batch, stop, suspect), (start, start + self.micro_batch, suspect)]
            elif stop > start:
                try:
                    self.parts.append((start, self._predict(start, stop)))
                except torch.OutOfMemoryError as error:
                    self._shrink(stop - start)
                    if stop - start == 1:
                        self.errors[start] = _model_error("predict", error)
                    else:
                        waiting.append((start, stop, suspect))
                except ModelError as error:
                    middle = (start + stop) // 2
                    if stop - start == 1 or (suspect and time.monotonic() > self.give_up):
                        self.errors.update(dict.fromkeys(range(start, stop), error))
                    else:
                        waiting += [(middle, stop, True), (start, middle, True)]

    def _predict(self, start: int, stop: int) -> Sequence[Any] | np.ndarray:
        batch = self.values[start:stop]
        if isinstance(batch, torch.Tensor):
            batch = batch.to(self.device)
        try:
            return _results(self.model.predict(batch, **self.parameters), stop - start)
        except (torch.OutOfMemoryError, ModelError):
            raise
        except torch.AcceleratorError as error:  # the device's context is gone: no later call would work
            raise GroupError(f"the device failed: {error}") from error
        except Exception as error:
            log.warning("predict raised on %d items", stop - start, exc_info=stop - start == 1)
            raise _model_error("predict", error) from error

    def _shrink(self, failed: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.micro_batch = max(1, failed // 2)
        log.warning("out of device memory on %d items, going on with micro-batches of %d", failed, self.micro_batch)


def _results(returned: Any, count: int) -> Sequence[Any] | np.ndarray:
    if isinstance(returned, torch.Tensor):
        tensor = returned.detach()
        returned = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()
    if isinstance(returned, np.ndarray) and returned.ndim == 0 or not isinstance(returned, np.ndarray | list | tuple):
        raise ModelError(
            f"predict returned a {type(returned).__name__}; it must return a list, tuple, array or tensor of {count} results"
        )
    if len(returned) != count:
        raise ModelError(f"predict returned {len(returned)} results for {count} items")
    return returned


def _parameters(text: bytes) -> dict[str, Any]:
    value = msgspec.json.decode(text) if text else None
    return value if isinstance(value, dict) else {}


def _model_error(where: str, error: Exception) -> ModelError:
    return ModelError(f"{where} raised {type(error).__name__}: {error}")
