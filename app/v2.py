"""The Open Inference Protocol, version 2, over HTTP: its paths, and which answer each gets; it reads no tensor itself.

`POST …/infer` takes the same way as `/infer`; the protocol has no outcomes of items, so that one that fails fails all.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from app import codecs, tensors
from app.batcher import Hold
from app.catalog import Served
from app.codecs import Cut
from app.dispatcher import Dispatcher
from app.door import Receive, Send
from app.intake import Answer, Fields, Headers, Intake, Scope, timing
from app.problem import plain
from app.steps import Request as Items
from app.tensors import INPUT, OUTPUT, TEXTS, Output
from workers.errors import MalformedBody, MalformedHeader, NoGroup, NoSuchPath, NotAcceptable, PhalanxError
from workers.wire import Form, ModelInfo

VERSION = "1"  # of every model
MODEL = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
INFER = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
EXAMPLE_TIME = 5.0  # seconds for the example that tells what results look like


class V2:
    """The route `infer` as a plain ASGI app, and what the protocol's other paths need of it."""

    def __init__(self, intake: Intake, dispatcher: Dispatcher, max_items: int) -> None:
        self._max_items = max_items
        self._intake = intake
        self._dispatcher = dispatcher
        self._seen: dict[str, tuple[ModelInfo, str, tuple[int, ...]]] = {}  # results: of which model, datatype, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._intake.serve(scope, receive, send, self._answer, plain)

    def model(self, name: str, version: str | None) -> Served:
        """What is served by that name. NoSuchModel, NoSuchPath: nothing. NoGroup: no group has come yet to say it."""
        served = self._dispatcher.find(name)
        if version not in (None, VERSION):
            raise NoSuchPath(f"{served.name} has no version {version[:100]!r}; it has {VERSION!r}")
        return served

    async def describe(self, served: Served) -> dict[str, Any]:
        """Its metadata. What its results are is learned from them: where none were seen yet, from its example's."""
        model = served.info
        if model is None:
            raise NoGroup(f"no worker group has come yet to say what {served.name} takes")
        dtype, shape = _inputs(model)
        ready = self._dispatcher.unreadiness(model.name) is None
        if self._known(model) is None and model.example is not None and ready:
            with contextlib.suppress(PhalanxError):
                await self._run_example(model, model.example)
        datatype, row = self._known(model) or ("FP32", ())
        return {
            "name": model.name,
            "versions": [VERSION],
            "platform": "pytorch",
            "inputs": [{"name": INPUT, "datatype": tensors.datatype(dtype), "shape": [-1, *shape]}],
            "outputs": [{"name": OUTPUT, "datatype": datatype, "shape": [-1, *row]}],
        }

    async def _answer(self, scope: Scope, receive: Receive, hold: Hold, began: float) -> Answer:
        where = INFER.fullmatch(scope["path"])
        assert where is not None  # says app.main
        served = self.model(**where.groupdict())
        name, model = served.name, served.info
        if model is not None:  # else what it takes its group will say, which the request waits for
            _inputs(model)
        headers = dict(scope["headers"])
        json_size = _json_size(headers)
        deadline = self._intake.deadline(began, headers)
        body, block = await self._intake.body(scope, headers, receive, hold, ring=json_size is not None)
        asked = await self._intake.aside(len(body), tensors.read, body, json_size, self._max_items, block)
        hold.take_bytes(asked.made)
        deadline = min(deadline, began + asked.timeout)
        request, output = await self._run(
            model, asked.cut, lambda cut: self._intake.results(scope, cut, name, hold, deadline)
        )
        members = {"model_name": name, "model_version": VERSION} | ({} if asked.id is None else {"id": asked.id})
        text, json_size = await self._intake.aside(
            sum(map(len, output.pieces)), tensors.write, members, output, asked.binary
        )
        media = b"application/json" if json_size is None else b"application/octet-stream"
        fields: Fields = [(b"content-type", media), (b"content-length", b"%d" % len(text))]
        fields.append((b"server-timing", timing(request, began)))
        if json_size is not None:
            fields.append((b"inference-header-content-length", b"%d" % json_size))
        return 200, fields, text

    async def _run(
        self, model: ModelInfo | None, cut: Cut, results: Callable[[Cut], Awaitable[Items]]
    ) -> tuple[Items, Output]:
        """Results as a tensor; if they are no numbers, run once more, as texts.

        Raises the error of the first item that failed. `results` is what runs a cut.
        """
        known = self._known(model)
        if known is None or known[0] != TEXTS:
            try:
                request = _whole(await results(cut))
            except NotAcceptable as error:
                error.__traceback__ = None  # it would keep the body until the next full garbage collection
            else:
                output = tensors.rows(request.spans)
                if output is None:
                    datatype, row = known or ("FP32", ())
                    return request, Output(datatype, (0, *(max(size, 0) for size in row)), [])
                if not cut.form.parameters:
                    self._learn(model, output)
                return request, output
        form = cut.form
        request = _whole(await results(Cut(cut.items, Form(form.accepts, "json", form.parameters, form.row))))
        output = tensors.texts(request.spans)
        if not form.parameters:
            self._learn(model, output)
        return request, output

    async def _run_example(self, model: ModelInfo, example: bytes) -> None:
        hold = self._dispatcher.account.open()

        async def results(cut: Cut) -> Items:
            request = self._dispatcher.submit(
                cut, model.name, f"example of {model.name}", time.monotonic() + EXAMPLE_TIME
            )
            await request.future
            return request

        try:
            hold.take_items(1)
            await self._run(model, codecs.cut(b'{"inputs":[%s]}' % example, "json", "npy"), results)
        finally:
            hold.release()

    def _known(self, model: ModelInfo | None) -> tuple[str, tuple[int, ...]] | None:
        """Datatype and shape of one result; -1 is a size that varies."""
        seen = None if model is None else self._seen.get(model.name)
        return None if seen is None or seen[0] is not model else seen[1:]

    def _learn(self, model: ModelInfo | None, output: Output) -> None:
        """The first answer decides, so that an odd one changes nothing for others, but for sizes that vary.

        Parameters may make it odd: such an answer tells of no other. Nor does one of a model that was not known yet.
        """
        if model is None:
            return
        known, row = self._known(model), output.shape[1:]
        if known is None:
            self._seen[model.name] = model, output.datatype, row
        elif known[0] == output.datatype and len(known[1]) == len(row):
            self._seen[model.name] = (
                model,
                known[0],
                tuple(a if a == b else -1 for a, b in zip(row, known[1], strict=True)),
            )


def routes(protocol: V2, dispatcher: Dispatcher) -> APIRouter:
    """All but `infer`."""
    router = APIRouter(tags=["open inference protocol"])
    server = {"name": "phalanx", "version": version("phalanx"), "extensions": ["binary_tensor_data", "parameters"]}

    def readiness(response: Response, model: str | None = None) -> dict[str, Any]:
        reason = dispatcher.unreadiness(model)
        response.status_code = 200 if reason is None else 503
        return {"ready": reason is None} | ({} if reason is None else {"error": reason})

    @router.get("/v2", summary="Name, version and extensions of the server")
    async def metadata() -> dict[str, Any]:
        return server

    @router.get("/v2/health/live", summary="Is the front-end process alive?")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", summary="Would a request be answered now?", responses=_errors(503))
    async def ready(response: Response) -> dict[str, Any]:
        return readiness(response)

    async def model_metadata(request: Request) -> dict[str, Any]:
        return await protocol.describe(protocol.model(**_where(request)))

    async def model_ready(request: Request, response: Response) -> dict[str, Any]:
        name = protocol.model(**_where(request)).name
        return {"name": name} | readiness(response, name)

    for path in MODEL:
        extra = {"parameters": _parameters(path)}
        router.get(path, summary="Tensors of the model", responses=_errors(400, 404, 503), openapi_extra=extra)(
            model_metadata
        )
        router.get(path + "/ready", summary="Is the model ready?", responses=_errors(404, 503), openapi_extra=extra)(
            model_ready
        )
    return router


def _where(request: Request) -> dict[str, Any]:
    return {"name": request.path_params["model"], "version": request.path_params.get("version")}


def _inputs(model: ModelInfo) -> tuple[str, list[int]]:
    """dtype and shape of an item; -1 is any size. MalformedBody: the model takes no tensors."""
    if model.dtype is None or model.shape is None:
        raise MalformedBody(f"{model.name} takes no tensors, as it has no TensorSpec; POST its items to /infer")
    return model.dtype, [-1 if size is None else size for size in model.shape]


def _json_size(headers: Headers) -> int | None:
    given = headers.get(b"inference-header-content-length")
    if given is not None and not (given.isdigit() and len(given) < 20):
        raise MalformedHeader(
            f"Inference-Header-Content-Length is {given.decode('latin-1')[:100]!r}, no number of bytes"
        )
    return None if given is None else int(given)


def _whole(request: Items) -> Items:
    """`request`, if no item of it failed; else the first one's error."""
    if request.failures:
        i = min(request.failures)
        error = request.failures[i]
        raise type(error)(f"item {i}: {error.detail}")
    return request


# ---- the schema

_STATUSES = {
    400: "The request is broken, or not what the model takes",
    401: "No valid API key",
    404: "No such model or version",
    408: "The body stopped coming",
    413: "Too many bytes or items",
    415: "Unknown encoding",
    429: "No room in the queue now; see Retry-After",
    500: "An item failed, not by the client's fault",
    503: "Not ready",
    504: "The deadline passed",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    content = {"application/json": {"schema": error}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def _parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


_STRING, _ANY = {"type": "string"}, {"type": "object"}
_TENSOR = _object(
    "name shape datatype",
    name=_STRING,
    shape={"type": "array", "items": {"type": "integer", "minimum": 0}, "description": "First the number of items"},
    datatype={"type": "string", "enum": [*tensors.DTYPES, "BF16", TEXTS]},
    parameters=_ANY,
    data={"type": "array", "items": {}, "description": "Flat or nested, row-major; or bytes stand behind the JSON"},
)
_WISH = _object("name", name=_STRING, parameters=_ANY)
_ASKED = _object(
    "inputs",
    id=_STRING,
    parameters=_ANY | {"description": "Keyword arguments of predict, beside the protocol's own"},
    inputs={"type": "array", "items": _TENSOR},
    outputs={"type": "array", "items": _WISH},
)
_ANSWERED = _object(
    "model_name outputs",
    model_name=_STRING,
    model_version=_STRING,
    id=_STRING,
    outputs={"type": "array", "items": _TENSOR},
)
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def _operation(path: str) -> dict[str, Any]:
    return {
        "tags": ["open inference protocol"],
        "summary": "Run a batch, as a tensor, on every rank at once",
        "parameters": _parameters(path),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ASKED}, "application/octet-stream": _BINARY},
        },
        "responses": {
            "200": {
                "description": "The results, as a tensor",
                "content": {"application/json": {"schema": _ANSWERED}, "application/octet-stream": _BINARY},
            },
            **{str(status): about for status, about in _errors(*_STATUSES).items()},
        },
    }


OPENAPI: dict[str, Any] = {path + "/infer": {"post": _operation(path)} for path in MODEL}
