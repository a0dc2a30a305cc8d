"""The ASGI application: routes by exact path, errors in OpenAI's form, nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from firstlight.config import ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.errors import FirstlightError, NotFoundError, RequestError
from firstlight.server.asgi import ClientGone, Exchange, Receive, Scope, Send, logged_failure
from firstlight.server.debug import REQUEST_PREFIX, DebugRoutes
from firstlight.server.embeddings import EmbeddingRoutes
from firstlight.server.generation import GenerationRoutes
from firstlight.server.operations import MODEL_PREFIX, OperationRoutes
from firstlight.server.pages import DASHBOARD_PREFIX, dashboard
from firstlight.server.service import Service, package_version

__all__ = ["App", "create_app"]

Route = Callable[[Exchange], Awaitable[None]]


class _WrongMethod(RequestError):
    """The path is there, the method is not."""

    status = 405
    code = "method_not_allowed"


def create_app(engine: AsyncEngine, config: ServerConfig) -> App:
    """The server of one engine. The engine may be started before or after; until it is ready, requests get 503.

    Raises:
        ConfigError: an API key is empty, or the key file cannot be read.
    """
    return App(Service(engine, config))


class App:
    """A pure ASGI application, one per engine."""

    def __init__(self, service: Service) -> None:
        self.service = service
        generation = GenerationRoutes(service)
        debug = DebugRoutes(service)
        operations = OperationRoutes(service, _LISTING.format(version=package_version()))
        self._routes: dict[str, dict[str, Route]] = {
            "/": {"GET": operations.index},
            "/v1/chat/completions": {"POST": generation.chat},
            "/v1/completions": {"POST": generation.completion},
            "/v1/embeddings": {"POST": EmbeddingRoutes(service).embeddings},
            "/v1/cancel": {"POST": operations.cancel},
            "/v1/models": {"GET": operations.models},
            "/tokenize": {"POST": operations.tokenize},
            "/detokenize": {"POST": operations.detokenize},
            "/health": {"GET": operations.health},
            "/ready": {"GET": operations.ready},
            "/metrics": {"GET": operations.metrics},
            "/dashboard": {"GET": dashboard},
            "/debug/check": {"GET": operations.check},
            "/debug/requests": {"GET": debug.requests},
            "/debug/steps": {"GET": debug.steps},
            "/debug/trace": {"GET": debug.trace},
            "/debug/live": {"GET": debug.live},
            "/openapi.json": {"GET": operations.openapi},
            "/version": {"GET": operations.version},
        }
        self._by_prefix: dict[str, dict[str, Route]] = {
            MODEL_PREFIX: {"GET": operations.model},
            REQUEST_PREFIX: {"GET": debug.request},
            DASHBOARD_PREFIX: {"GET": dashboard},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one exchange, or the lifespan protocol."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(Exchange(scope, receive, send))
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, exchange: Exchange) -> None:
        """The outermost boundary: whatever goes wrong becomes one answer and, if it is ours, one log event."""
        try:
            await self._route(exchange)
        except ClientGone:
            return
        except FirstlightError as error:
            await exchange.respond_error(error)
        except Exception as error:
            told = logged_failure(exchange, error)
            if exchange.status is not None:
                raise
            await exchange.respond_error(told)

    async def _route(self, exchange: Exchange) -> None:
        try:
            exchange.adopt_request_id()
        finally:
            exchange.base_headers.append((b"x-request-id", exchange.request_id.encode()))
        self.service.access.admit_origin(exchange)
        routes = self._routes.get(exchange.path)
        if routes is None:
            routes = next((r for prefix, r in self._by_prefix.items() if exchange.path.startswith(prefix)), None)
        if routes is None:
            raise NotFoundError(f"{exchange.method} {exchange.path[:128]} is not a route here: GET / lists them")
        if exchange.method == "OPTIONS":
            headers = self.service.access.preflight_headers(exchange)
            if headers is not None:
                await exchange.respond(204, b"", headers=headers)
                return
        route = routes.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            exchange.base_headers.append((b"allow", ", ".join(routes).encode()))
            raise _WrongMethod(f"{exchange.path[:128]} takes {', '.join(routes)}, not {exchange.method[:32]}")
        await route(exchange)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                self.service.close()
                return


_LISTING = """firstlight {version}

POST /v1/chat/completions   messages in, text out; "stream": true for server-sent events
POST /v1/completions        text or token ids in, text out
POST /v1/embeddings         text or token ids in, one vector each
POST /v1/cancel             {{"id": answer id or X-Request-Id}} ends an open request
GET  /v1/models             what is served
POST /tokenize              {{"content": text}} -> {{"tokens", "count"}}
POST /detokenize            {{"tokens": ids}} -> {{"content"}}
GET  /health                200 while the process is alive
GET  /ready                 200 while requests are taken and make progress
GET  /metrics               Prometheus text
GET  /dashboard             a page that shows it live
GET  /debug/check           audit of the KV blocks
GET  /debug/requests        finished requests and where their time went; /debug/requests/ID for one
GET  /debug/steps           the most recent steps
GET  /debug/trace           ?seconds=5: steps and requests as Perfetto opens them
GET  /debug/live            the last minute in figures
GET  /openapi.json          this API as an OpenAPI document
GET  /version               the package's version
"""
