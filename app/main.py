"""`create_app(settings)`: dispatcher, routes, middleware and error handlers, put together; it decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi_swagger import patch_fastapi
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Route

from app import ops
from app.dispatcher import Dispatcher
from app.door import Door
from app.groups import Group
from app.infer import OPENAPI, Infer
from app.metrics import Metrics
from app.problem import problem
from app.settings import Settings
from workers.errors import InternalError, NoSuchMethod, NoSuchPath, PhalanxError


def create_app(settings: Settings, on_ready: Callable[[Group], None] | None = None) -> FastAPI:
    """The service; `app.state.dispatcher` is its dispatcher. `on_ready` is called with the first group."""
    metrics = Metrics()
    dispatcher = Dispatcher(settings, metrics, on_ready)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await dispatcher.start()
        try:
            yield
        finally:
            await dispatcher.close()

    app = FastAPI(
        title="Phalanx",
        version=version("phalanx"),
        description="One POST, every GPU, the answers in order.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.state.dispatcher = dispatcher
    app.router.routes.append(Route("/infer", Infer(settings, dispatcher, metrics), methods=["POST"]))
    app.include_router(ops.routes(settings, dispatcher, metrics))
    patch_fastapi(app)  # /docs from files that are installed: a GPU host may have no way out
    app.add_middleware(Door, max_body_bytes=settings.max_body_bytes, keys=settings.api_keys())
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    app.openapi = _with_infer(app.openapi)  # type: ignore[method-assign]
    return app


def _with_infer(generate: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The schema with `/infer` in it, which FastAPI does not see: it is a plain ASGI route."""

    def openapi() -> dict[str, Any]:
        schema = generate()
        schema["paths"] = {"/infer": OPENAPI} | schema["paths"]
        return schema

    return openapi


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    kind = {404: NoSuchPath, 405: NoSuchMethod}.get(error.status_code, InternalError)
    what = f"{request.method} {request.url.path}: {error.detail}"
    return _response(request, kind(what), error.headers or {})


async def _failed(request: Request, error: Exception) -> Response:
    # this answer is made outside the door, which would have added the id
    headers = {"x-request-id": getattr(request.state, "request_id", "")}
    return _response(request, InternalError("the front end failed; its log has the stack"), headers)


def _response(request: Request, error: PhalanxError, extra: Any) -> Response:
    status, headers, body = problem(error, getattr(request.state, "request_id", ""))
    names = {name.decode(): value.decode() for name, value in headers if name != b"content-length"}
    return Response(body, status, {**extra, **names})
