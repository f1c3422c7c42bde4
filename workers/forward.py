"""A shard through the model: decode, preprocess, micro-batches, bisection, out of memory, encode; it knows no group."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from workers import items
from workers.errors import GroupError, InvalidItem, InvalidParameters, ModelError, PhalanxError
from workers.items import Encoded, Failures
from workers.model import NO_EXAMPLE, Model, said
from workers.wire import Buffer, Form, offsets

log = logging.getLogger("workers")

Values: TypeAlias = torch.Tensor | list[Any]
Results: TypeAlias = Sequence[Any] | np.ndarray


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

        def decode(chosen: Sequence[int]) -> items.Decoded:
            """Made anew each time: predict may have written into the last."""
            if len(chosen) == size:
                return items.decode(frame, lengths, form, self.model.inputs)
            slices = [memoryview(frame)[places[i] : places[i] + lengths[i]] for i in chosen]
            part = (b"," if form.accepts == "json" else b"").join(slices)
            return items.decode(part, [lengths[i] for i in chosen], form, self.model.inputs)

        places = offsets(lengths, form.accepts)
        return self._finish(decode, size, form, parameters, patience)

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
        return self._finish(lambda _: items.Decoded([copy.deepcopy(example)], [0]), 1, form, {}, patience)

    def _finish(
        self,
        decode: Callable[[Sequence[int]], items.Decoded],
        size: int,
        form: Form,
        parameters: dict[str, Any],
        patience: float,
    ) -> tuple[Encoded, Failures]:
        decoded = decode(range(size))
        failures = decoded.failures
        values, index = self._preprocess(decoded.values, decoded.index, failures)

        def fresh(start: int, stop: int) -> Values:
            again = decode(index[start:stop])
            return self._preprocess(again.values, again.index, {})[0]

        answers = _Answers(self.model, values, fresh, parameters, time.monotonic() + patience, self.device)
        answers.collect()
        for k, error in answers.errors.items():
            failures[index[k]] = error
        postprocess = self.model.postprocess
        if isinstance(answers.whole, np.ndarray) and len(index) == size and postprocess is None:
            return items.encode(answers.whole, failures, size, form.returns), failures
        results: list[Any] = [None] * size
        with torch.inference_mode():  # what predict made there cannot be written to elsewhere
            for k, result in answers.results():
                try:
                    results[index[k]] = result if postprocess is None else postprocess(result)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    failures[index[k]] = _model_error("postprocess", error)
        return items.encode(results, failures, size, form.returns), failures

    def _preprocess(self, values: Values, index: list[int], failures: Failures) -> tuple[Values, list[int]]:
        if self.model.preprocess is None:
            return values, index
        ready, kept = [], []
        for i, value in zip(index, values, strict=True):
            try:
                ready.append(self.model.preprocess(value))
                kept.append(i)
            except (ValueError, TypeError) as error:
                failures[i] = InvalidItem(said(error, kind=False))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
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
        values: Values,
        fresh: Callable[[int, int], Values],
        parameters: dict[str, Any],
        give_up: float,
        device: torch.device,
    ) -> None:
        self.model = model
        self.values = values
        self.fresh = fresh  # values start to stop once more: the first forward that saw them may have changed them
        self.parameters = parameters
        self.give_up = give_up
        self.device = device
        self.micro_batch = model.max_batch_size
        self.parts: list[tuple[int, Results]] = []
        self.errors: Failures = {}

    @property
    def whole(self) -> Results | None:
        """All results, where one micro-batch held them."""
        return self.parts[0][1] if len(self.parts) == 1 and not self.errors else None

    def results(self) -> list[tuple[int, Any]]:
        return [(start + k, result) for start, part in self.parts for k, result in enumerate(part)]

    def collect(self) -> None:
        # a stack, so that the halves of a batch come before what follows it
        waiting: list[tuple[int, int, bool]] = [(0, len(self.values), False)]
        while waiting:
            start, stop, seen = waiting.pop()
            if stop - start > self.micro_batch:
                waiting += [(start + self.micro_batch, stop, seen), (start, start + self.micro_batch, seen)]
            elif stop > start:
                try:
                    self.parts.append((start, self._predict(start, stop, seen)))
                    continue
                except torch.OutOfMemoryError as error:
                    halve, failed = True, _model_error("predict", error)
                    self._shrink(stop - start)
                except ModelError as error:
                    # a new error: this one's traceback would keep the tensors of the forward that failed
                    halve, failed = time.monotonic() < self.give_up, ModelError(said(error, kind=False))
                if halve and stop - start > 1:
                    middle = (start + stop) // 2
                    waiting += [(middle, stop, True), (start, middle, True)]
                else:
                    self.errors.update(dict.fromkeys(range(start, stop), failed))
        if self.errors:
            log.warning("no result for %d of %d items: %s", len(self.errors), len(self.values), failed)

    def _predict(self, start: int, stop: int, seen: bool) -> Results:
        try:
            batch = self.fresh(start, stop) if seen else self.values[start:stop]
            if len(batch) != stop - start:
                raise ModelError("preprocess refused on a second try what it had taken")
            if isinstance(batch, torch.Tensor):
                batch = batch.to(self.device)
            with torch.inference_mode():
                returned = self.model.predict(batch, **copy.deepcopy(self.parameters))
                results = _results(returned, stop - start, self.model.postprocess is not None)
        except (torch.OutOfMemoryError, ModelError):
            raise
        except torch.AcceleratorError as error:  # the device's context is gone: no later call would work
            raise GroupError(f"the device failed: {said(error)}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a SystemExit is no less an error of these items alone
            if stop - start == 1 and not self.errors:  # one stack a shard is enough
                log.warning("predict raised", exc_info=True)
            raise _model_error("predict", error) from error
        return results if stop - start == len(self.values) else _kept(results)

    def _shrink(self, failed: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.micro_batch = max(1, failed // 2)
        log.warning("out of device memory on %d items, going on with micro-batches of %d", failed, self.micro_batch)


def _results(returned: Any, count: int, as_tensors: bool) -> Results:
    """What predict returned, checked; rows of a tensor as tensors on the CPU, or all of it as an array."""
    kind = type(returned)
    if isinstance(returned, torch.Tensor | np.ndarray) and returned.ndim == 0:
        raise ModelError(f"predict returned a {kind.__name__} without axes; its first axis must be that of the items")
    # no subclass of tuple: torch.max(...), for one, returns a pair that is not two results
    if not isinstance(returned, torch.Tensor | np.ndarray | list) and kind is not tuple:
        raise ModelError(f"predict returned a {kind.__name__}, not a list, tuple, array or tensor of {count} results")
    if len(returned) != count:
        raise ModelError(f"predict returned {len(returned)} results for {count} items")
    results: Results = returned
    if isinstance(returned, torch.Tensor):
        results = returned.detach().cpu().unbind() if as_tensors else items.array(returned)
    return results


def _kept(results: Results) -> Results:
    """A copy: the model may return the same memory for every batch."""
    try:
        copied: Results = copy.deepcopy(results)
    except Exception:  # nor has it a form in any answer
        return results
    return copied


def _parameters(text: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = items.value(text or b"{}", dict[str, Any], "parameters")
    except InvalidItem as error:
        raise InvalidParameters(str(error)) from error
    return found


def _model_error(where: str, error: BaseException) -> ModelError:
    return ModelError(f"{where} raised {said(error)}")
