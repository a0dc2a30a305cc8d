"""The dashboard's files, as they lie in this package. Knows names and types, nothing of what they show."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from firstlight.errors import NotFoundError
from firstlight.server.asgi import Exchange, Headers

__all__ = ["DASHBOARD_PREFIX", "dashboard"]

DASHBOARD_PREFIX = "/dashboard/"
_FOLDER = Path(__file__).parent / "dashboard"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    "": b"text/plain; charset=utf-8",
}
_HEADERS: Headers = [
    (b"cache-control", b"no-cache"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"),
]


@cache
def _names() -> dict[str, Path]:
    """Every file by its name in the address: what is not here cannot be asked for."""
    return {path.relative_to(_FOLDER).as_posix(): path for path in _FOLDER.rglob("*") if path.is_file()}


async def dashboard(exchange: Exchange) -> None:
    """GET /dashboard and its files. They hold nothing of this server; what they show comes from /debug/*."""
    name = exchange.path.removeprefix(DASHBOARD_PREFIX.rstrip("/")).lstrip("/") or "index.html"
    path = _names().get(name)
    if path is None:
        raise NotFoundError(f"/dashboard has no file {name[:128]!r}")
    await exchange.respond(200, path.read_bytes(), _TYPES[path.suffix], headers=_HEADERS)
