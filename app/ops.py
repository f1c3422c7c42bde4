"""Health, info and metrics: what operators ask for; it decides nothing, it asks the dispatcher."""

from __future__ import annotations

import datetime
import time
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.dispatcher import Dispatcher
from app.groups import Group
from app.metrics import Metrics
from app.settings import Settings
from workers import wire


def routes(settings: Settings, dispatcher: Dispatcher, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/livez", summary="Is the front-end process alive?")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @router.get(
        "/readyz",
        summary="Would a request be answered now?",
        responses={404: {"description": "No such model"}, 503: {"description": "Not ready; `reason` says why"}},
    )
    async def readyz(
        response: Response, model: Annotated[str | None, Query(description="This one; unset: every one")] = None
    ) -> dict[str, str]:
        reason = dispatcher.unreadiness(model)
        if reason is None:
            return {"status": "ready"}
        response.status_code = 503
        return {"status": "unready", "reason": reason}

    @router.get("/info", summary="Models, groups, ranks, devices, limits and versions")
    async def info() -> dict[str, Any]:
        return {
            "name": "phalanx",
            "ready": dispatcher.unreadiness() is None,
            "models": {
                served.name: {"ready": reason is None, "reason": reason, "groups": sorted(served.groups)}
                for served in dispatcher.catalog.models
                if served.name is not None
                for reason in [dispatcher.unreadiness(served.name)]
            },
            "groups": {name: _describe(group) for name, group in dispatcher.groups.items()},
            "lost": {
                end.group: {"since": _date(end.at), "why": end.why}
                for end in dispatcher.lost.all().values()
                if end.group not in dispatcher.groups and end.kind != "left"
            },
            "restarts": dispatcher.restarts,
            "last_death": dispatcher.lost.last_death() or None,
            "limits": {
                name: getattr(settings, name)
                for name in ("max_items", "max_body_bytes", "queue_items", "queue_bytes", "request_timeout")
            },
            "queue": {
                "items": dispatcher.account.items,
                "bytes": dispatcher.account.bytes,
                "waiting_items": dispatcher.waiting(),
            },
            "versions": {"phalanx": version("phalanx"), "wire": wire.WIRE, "torch": version("torch")},
        }

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def scrape(request: Request) -> Response:
        metrics.ready.set(dispatcher.unreadiness() is None)
        metrics.queue_items.set(dispatcher.account.items)
        metrics.queue_bytes.set(dispatcher.account.bytes)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _describe(group: Group) -> dict[str, Any]:
    hello, model = group.hello, group.hello.model
    reason = group.unreadiness(time.monotonic())
    canary = "its example" if model.has_example else "no items: the model has no example"
    return {
        "epoch": hello.epoch,
        "ranks": [
            {"rank": rank, "device": device, "host": host, "pid": pid}
            for rank, (device, host, pid) in enumerate(zip(hello.devices, hello.hosts, hello.pids, strict=True))
        ],
        "model": {
            "name": model.name,
            "max_batch_size": model.max_batch_size,
            "inputs": None if model.dtype is None else {"dtype": model.dtype, "shape": model.shape},
            "example": None if model.example is None else msgspec.json.decode(model.example),
            "canary": canary,
        },
        "ready": reason is None,
        "reason": reason,
        "leaving": group.leaving,
    }


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
