"""One request of a client, without I/O: what to send, whether its answer is final, when to ask again."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import numpy as np

from app import answers
from app.answers import Came, ItemsFailed, Outcomes
from app.chunks import Array, Chunk, Parts, body, encode
from workers.errors import MalformedBody, NotAcceptable, RequestError, TooLarge

ASK_AGAIN = {0, 429, 502, 503}  # 0: no answer came; 502 says a proxy that it got none
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds
CONNECT_TIMEOUT = 5.0  # seconds
GRACE = 1.0  # seconds over the deadline for the service's own 504 to arrive


@dataclass
class Policy:
    """How a client asks."""

    timeout: float  # seconds for a request, with its retries
    retries: int  # times to ask again
    chunk_items: int
    chunk_bytes: int
    model: str | None = None
    npy: bool = True  # answers may be arrays; false from when the service has said that they cannot be


class Ask:
    """What is the same in all requests of one `infer` or `map`. ValueError: what no request can say."""

    def __init__(
        self,
        policy: Policy,
        items: object,
        parameters: Mapping[str, Any] | None,
        timeout: float | None,
        request_id: str | None,
    ) -> None:
        self.policy = policy
        self.timeout = policy.timeout if timeout is None else timeout
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"a time-out is a positive number of seconds, not {self.timeout}")
        if parameters and isinstance(items, np.ndarray):
            raise ValueError("an npy body has no room for parameters: send the array as a list, array.tolist()")
        self.parameters = encode(parameters) if parameters else b""
        self.id = request_id or uuid4().hex
        self._count = itertools.count(1)

    def all(self, outcomes: Outcomes) -> list[Any] | Array:
        """The outputs; ItemsFailed where some are missing."""
        if outcomes.errors:
            raise ItemsFailed(*outcomes, self.id)
        return outcomes.outputs

    def call(self, chunk: Chunk) -> Call:
        """The next of the requests; from the second on their ids have a number behind."""
        n = next(self._count)
        return Call(self, chunk, self.id if n == 1 else f"{self.id}-{n}")


@dataclass
class Call:
    """One chunk until each of its items has an outcome.

    While there is something `unanswered`: wait for `pause` seconds, send `request`, and `settle` what came of it.
    """

    ask: Ask
    chunk: Chunk
    id: str
    pause: float = 0.0
    _unanswered: list[Parts] = field(init=False)
    _answered: list[Outcomes] = field(init=False, default_factory=list)
    _deadline: float | None = field(init=False, default=None)
    _retries: int = field(init=False, default=0)
    _arrays: bool = field(init=False, default=False)  # the answer was asked for as an array

    def __post_init__(self) -> None:
        self._unanswered = [] if self.chunk.failures and not len(self.chunk.parts) else [self.chunk.parts]

    @property
    def unanswered(self) -> bool:
        return bool(self._unanswered)

    def request(self, now: float) -> dict[str, Any]:
        """Arguments for `httpx.Client.request`."""
        if self._deadline is None:
            self._deadline = now + self.ask.timeout
        left = max(self._deadline - now, 0.001)
        arguments = body(self._unanswered[0], self.ask.parameters)
        self._arrays = isinstance(self.chunk.parts, np.ndarray) and self.ask.policy.npy
        json, npy = "application/json", "application/x-npy, application/json;q=0.5"
        arguments["headers"] |= {
            "accept": npy if self._arrays else json,
            "x-request-id": self.id,
            "x-request-timeout": f"{left:.3f}",
        }
        if self.ask.policy.model is not None:
            arguments["params"] = {"model": self.ask.policy.model}
        timeout = httpx.Timeout(left + GRACE, connect=min(left, CONNECT_TIMEOUT))
        return {"method": "POST", "url": "/infer", "timeout": timeout, **arguments}

    def settle(self, came: Came, now: float) -> None:
        """Takes in an answer, or that none came. RequestError: it is final, and not about single items."""
        parts = self._unanswered[0]
        self.pause = 0.0
        try:
            self._answer(answers.outcomes(came, len(parts), arrays=self._arrays))
        except NotAcceptable:
            if not self._arrays:
                raise
            self.ask.policy.npy = False
        except (MalformedBody, TooLarge) as error:
            half = len(parts) // 2
            if half:  # whatever is at fault shall fail alone, and limits may be lower than the chunk
                self._unanswered[0:1] = [parts[:half], parts[half:]]
                self._deadline = None
            elif len(parts):
                self._answer(answers.failed(error))
            else:
                raise
        except RequestError as error:
            error.request_id = error.request_id or self.id
            if error.status not in ASK_AGAIN or self._retries == self.ask.policy.retries:
                raise
            self.pause = _pause(error, self._retries)
            if self._deadline is None or now + self.pause >= self._deadline:
                raise
            self._retries += 1

    def outcomes(self) -> Outcomes:
        """Of the whole chunk, once nothing is unanswered."""
        answer = answers.join(self._answered)
        failures = self.chunk.failures
        if not failures:
            return answer
        outputs: list[Any] = [None] * len(self.chunk)
        sent = [i for i in range(len(outputs)) if i not in failures]
        for i, output in zip(sent, answer.outputs, strict=True):
            outputs[i] = output
        return Outcomes(outputs, failures | {sent[i]: error for i, error in answer.errors.items()})

    def _answer(self, outcomes: Outcomes) -> None:
        del self._unanswered[0]
        self._answered.append(outcomes)
        self._deadline, self._retries = None, 0


def _pause(error: RequestError, retries: int) -> float:
    """Seconds, with chance in them so that clients who were refused together do not come back together."""
    chance = random.random()
    if error.retry_after is not None:
        return error.retry_after * (1 + chance / 4)
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(retries, 10)) * (1 + chance) / 2
