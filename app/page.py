"""The page at `/` and its files, as a browser gets them; it knows nothing of what they show, or ask the service for."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

APP = Path(__file__).parent
SAMPLES = APP.with_name("workers") / "models" / "digits-samples.json"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """One a file: what is not listed here is not served."""
    files = {f"/static/{file.name}": file for file in sorted((APP / "static").iterdir()) if file.suffix in TYPES}
    files["/"] = files.pop("/static/index.html")
    return [*(_route(path, file) for path, file in files.items()), _route("/static/digits.json", SAMPLES)]


def _route(path: str, file: Path) -> Route:
    body, kind = file.read_bytes(), TYPES.get(file.suffix, "application/json")

    async def get(_: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=kind)

    return Route(path, get, methods=["GET"])
