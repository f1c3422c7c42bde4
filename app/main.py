"""`create_app(settings)`: dispatcher, routes, middleware and error handlers, put together; it decides nothing."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi_swagger import patch_fastapi
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Route

from app import ops, page, v2
from app.dispatcher import Dispatcher
from app.door import OPEN_PATHS, App, Door, Receive, Send
from app.groups import Group
from app.infer import OPENAPI, Infer
from app.intake import Intake
from app.metrics import Metrics
from app.problem import told
from app.settings import Settings
from app.tracing import Tracing
from workers.errors import InternalError, NoSuchMethod, NoSuchPath, PhalanxError


class Service(FastAPI):
    """FastAPI, but for the hot paths: a POST for inference meets the door and its route, and nothing else between.

    FastAPI's machinery costs more than all that a small request needs.
    """

    infer: App
    v2: App

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path == "/infer":
            await self.infer(scope, receive, send)
        elif v2.INFER.fullmatch(path):
            await self.v2(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    settings: Settings, on_ready: Callable[[Group], None] | None = None, beside: str | None = None
) -> Service:
    """The service; `app.state.dispatcher` is its dispatcher. `on_ready` is called with the first group.

    `beside` is the group that is started with it: where no models are listed, its model is the one to serve.
    """
    metrics = Metrics()
    tracing = Tracing()
    dispatcher = Dispatcher(settings, metrics, on_ready, beside)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await dispatcher.start()
        try:
            yield
        finally:
            await dispatcher.close()
            intake.close()
            tracing.close()

    app = Service(
        title="Phalanx",
        version=version("phalanx"),
        description="One POST, every GPU, the answers in order.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    app.state.dispatcher = dispatcher
    intake = Intake(settings, dispatcher, metrics, tracing)
    files = page.routes()
    door = functools.partial(
        Door,
        max_body_bytes=settings.max_body_bytes,
        keys=settings.api_keys(),
        open_paths=OPEN_PATHS | {route.path for route in files},
        refused=intake.refused,
        leaving=lambda: dispatcher.draining,
    )
    infer, protocol = Infer(intake, dispatcher, settings.max_items), v2.V2(intake, dispatcher, settings.max_items)
    app.infer, app.v2 = door(infer), door(protocol)
    hot: dict[str, App] = {"/infer": infer, **dict.fromkeys(v2.OPENAPI, protocol)}
    for path, route in hot.items():
        app.router.routes.append(Route(path, route, methods=["POST"]))  # of what comes here, it refuses the method
    app.include_router(v2.routes(protocol, dispatcher))
    app.include_router(ops.routes(settings, dispatcher, metrics))
    app.router.routes.extend(files)
    patch_fastapi(app)  # /docs from files that are installed: a GPU host may have no way out
    app.add_middleware(door)
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(PhalanxError, _refused)
    app.openapi = _with_infer(app.openapi)  # type: ignore[method-assign]
    return app


def _with_infer(generate: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The schema with the hot paths in it, which FastAPI does not see: they are plain ASGI routes."""

    def openapi() -> dict[str, Any]:
        schema = generate()
        schema["paths"] = {"/infer": OPENAPI} | schema["paths"] | v2.OPENAPI
        return schema

    return openapi


async def _refused(request: Request, error: Exception) -> Response:
    given: Mapping[str, str] = {}
    if isinstance(error, HTTPException | StarletteHTTPException):
        kind = {404: NoSuchPath, 405: NoSuchMethod}.get(error.status_code, InternalError)
        given = error.headers or {}
        error = kind(f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, PhalanxError)
    status, headers, body = told(request.url.path)(error, request.state.request_id)
    names = {name.decode(): value.decode() for name, value in headers if name != b"content-length"}
    return Response(body, status, {**given, **names})
