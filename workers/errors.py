"""Every error Phalanx raises or reports, as one tree; it knows nothing of HTTP libraries, sockets or torch.

PhalanxError
├── RequestError            one whole request is refused or given up
│   ├── MalformedBody         400  the body is not what its content type promises
│   ├── MalformedHeader       400  a header says nothing that can be understood
│   ├── UnnamedModel          400  several models are served, and the request names none
│   ├── Unauthorized          401  no key, or none that is known
│   ├── NoSuchPath            404  nothing is served there
│   ├── NoSuchModel           404  no model of that name is served
│   ├── NoSuchMethod          405  the path does not take this method
│   ├── NotAcceptable         406  the answer cannot take the form that was asked for
│   ├── BodyTimeout           408  the body stopped coming
│   ├── TooLarge              413  more bytes or items than the limits allow
│   ├── UnsupportedMediaType  415  a content type or encoding that is not known
│   ├── InvalidParameters     422  the model does not take these parameters
│   ├── QueueFull             429  no room in the queue now
│   ├── Draining              503  the service is shutting down
│   ├── NoGroup               503  no worker group has been there for too long
│   ├── DeadlineExceeded      504  the request's deadline passed
│   ├── InternalError         500  a fault of Phalanx itself
│   ├── Unreachable                a client got no answer
│   ├── StrangeAnswer              a client got an answer that is not one of Phalanx
│   └── (ItemsFailed)              a client got all outcomes, and some are failures: see app/answers.py
├── ItemError               one item has no result; its neighbours are untouched
│   ├── InvalidItem           422  the client's: not what the model takes
│   ├── ModelError            500  the model raised, or returned the wrong number of results
│   ├── UnencodableResult     500  the result has no form in the answer's encoding
│   ├── NonFiniteResult       500  NaN or infinity, which JSON does not have
│   └── PoisonItem            500  the item killed the worker group every time, the last time alone
├── StartError              a command cannot begin, or cannot go on
│   ├── SettingsError              a setting is unknown or has a value that cannot be used
│   ├── ModelLoadError             the model cannot be found or loaded
│   ├── RunDirectoryError          the run directory is taken or unusable
│   ├── ServiceError               the service that files are sent to is not there, or refuses
│   └── ResultsError               the results cannot be written
└── GroupError              this incarnation of the worker group is dead
"""

from __future__ import annotations

from typing import ClassVar


class PhalanxError(Exception):
    """The root; `detail` is one sentence that names what is wrong and may be shown to a client."""

    # Of the class, but for those that a client has from the answer of a service.
    status: int = 500
    type: str = "internal-error"
    title: str = "Internal error"
    retry_after: int | None = None  # seconds, sent as Retry-After

    @property
    def detail(self) -> str:
        return str(self)


class RequestError(PhalanxError):
    """One whole request is refused or given up."""

    request_id: str | None = None  # known to clients


class MalformedBody(RequestError):
    status, type, title = 400, "malformed-body", "The body is malformed"


class MalformedHeader(RequestError):
    status, type, title = 400, "malformed-header", "A header cannot be understood"


class UnnamedModel(RequestError):
    status, type, title = 400, "unnamed-model", "The request must name its model"


class Unauthorized(RequestError):
    status, type, title = 401, "unauthorized", "A valid API key is needed"


class NoSuchPath(RequestError):
    status, type, title = 404, "no-such-path", "Nothing is served there"


class NoSuchModel(RequestError):
    status, type, title = 404, "no-such-model", "No model of that name is served"


class NoSuchMethod(RequestError):
    status, type, title = 405, "no-such-method", "The path does not take this method"


class NotAcceptable(RequestError):
    status, type, title = 406, "not-acceptable", "The answer cannot take the form that was asked for"


class BodyTimeout(RequestError):
    status, type, title = 408, "body-timeout", "The body stopped coming"


class TooLarge(RequestError):
    status, type, title = 413, "too-large", "The request is too large"


class UnsupportedMediaType(RequestError):
    status, type, title = 415, "unsupported-media-type", "The content type is not supported"


class InvalidParameters(RequestError):
    status, type, title = 422, "invalid-parameters", "The model does not take these parameters"


class QueueFull(RequestError):
    status, type, title, retry_after = 429, "queue-full", "The queue is full", 1


class Draining(RequestError):
    status, type, title, retry_after = 503, "draining", "The service is shutting down", 5


class NoGroup(RequestError):
    status, type, title, retry_after = 503, "no-worker-group", "No worker group is ready", 5


class DeadlineExceeded(RequestError):
    status, type, title = 504, "deadline-exceeded", "The request's deadline passed"


class InternalError(RequestError):
    """A fault of Phalanx itself: never a wrong answer, always this."""


class Unreachable(RequestError):
    """A client got no answer: the connection was refused, or was dropped."""

    status, type, title = 0, "unreachable", "The service did not answer"


class StrangeAnswer(RequestError):
    """A client got an answer that is not one of Phalanx: a proxy's page, for one. `status` is its own."""

    type, title = "strange-answer", "The answer is not one of Phalanx"


class ItemError(PhalanxError):
    """One item has no result; its neighbours are untouched."""


class InvalidItem(ItemError):
    status, type, title = 422, "invalid-item", "The item is not what the model takes"


class ModelError(ItemError):
    type, title = "model-error", "The model failed on the item"


class UnencodableResult(ItemError):
    type, title = "unencodable-result", "The result cannot be encoded"


class NonFiniteResult(ItemError):
    type, title = "non-finite-result", "The result holds NaN or infinity"


class PoisonItem(ItemError):
    type, title = "poison-item", "The item kills the worker group"


class StartError(PhalanxError):
    """A command cannot begin, or cannot go on; `exit_code` is the process's."""

    exit_code: ClassVar[int] = 1


class SettingsError(StartError):
    """A setting is unknown or has a value that cannot be used; one line a fault."""

    type, title = "settings-error", "The settings cannot be used"
    exit_code = 2


class ModelLoadError(StartError):
    """The model cannot be found or loaded (EX_CONFIG of sysexits.h)."""

    type, title = "model-load-error", "The model cannot be loaded"
    exit_code = 78


class RunDirectoryError(StartError):
    """The run directory is taken by another process, or unusable."""

    type, title = "run-directory-error", "The run directory cannot be used"
    exit_code = 73


class ServiceError(StartError):
    """The service that files are sent to is not there, or refuses or gives up a request (EX_UNAVAILABLE)."""

    type, title = "service-error", "The service cannot be used"
    exit_code = 69


class ResultsError(StartError):
    """The results cannot be written (EX_IOERR)."""

    type, title = "results-error", "The results cannot be written"
    exit_code = 74


class GroupError(PhalanxError):
    """This incarnation of the worker group is dead: exit, do not repair."""


def by_type(slug: str) -> type[PhalanxError]:
    """The error class whose `type` is `slug`; `InternalError` for one that is not known."""
    return _BY_TYPE.get(slug, InternalError)


def _tree(root: type[PhalanxError]) -> list[type[PhalanxError]]:
    return [root, *(node for child in root.__subclasses__() for node in _tree(child))]


_BY_TYPE = {node.type: node for branch in (RequestError, ItemError) for node in _tree(branch)} | {
    InternalError.type: InternalError
}
