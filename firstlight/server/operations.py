"""Routes that are not text: models, tokens, health, metrics, audit, and the page that lists them all."""

from __future__ import annotations

import asyncio
from typing import Any

from firstlight.errors import BackendError, NotFoundError, RequestError
from firstlight.measure.metrics import CONTENT_TYPE
from firstlight.server.asgi import Exchange
from firstlight.server.openapi import openapi_document
from firstlight.server.service import BIG_TEXT_BYTES, Service, package_version
from firstlight.text.tokenizer import Tokenizer

__all__ = ["MODEL_PREFIX", "OperationRoutes"]

MODEL_PREFIX = "/v1/models/"
_AUDIT_TIMEOUT_S = 30.0
_TEXT_TYPE = b"text/plain; charset=utf-8"


class OperationRoutes:
    """Everything but generation. `listing` is the text of GET /."""

    def __init__(self, service: Service, listing: str) -> None:
        self._service = service
        self._listing = listing

    async def index(self, exchange: Exchange) -> None:
        """GET /: the routes, for a person who opens the address."""
        await exchange.respond(200, self._listing.encode(), _TEXT_TYPE)

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        self._admit(exchange)
        listed = [self._model(name) for name in self._service.intake.model_names]
        await exchange.respond_json({"object": "list", "data": listed})

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        self._admit(exchange)
        name = exchange.path.removeprefix(MODEL_PREFIX)
        self._service.intake.require_model(name)
        await exchange.respond_json(self._model(name))

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        self._admit(exchange)
        raw = await self._body(exchange)
        ids = await self._service.parsed(self._tokenized, raw, BIG_TEXT_BYTES)
        await exchange.respond_json({"tokens": ids, "count": len(ids)})

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        self._admit(exchange)
        raw = await self._body(exchange)
        await exchange.respond_json({"content": await self._service.parsed(self._detokenized, raw)})

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/cancel: ends an open request of the same key, by its answer's id or its X-Request-Id."""
        salt = self._service.access.tenant_salt(exchange)
        self._service.require_ready()
        name = self._service.intake.cancel(await self._body(exchange))
        num = self._service.open.cancel(name, salt)
        if num == 0:
            raise NotFoundError(f"no open request has the id {name[:128]!r}: it may have ended", param="id")
        await exchange.respond_json({"id": name, "cancelled": num})

    async def health(self, exchange: Exchange) -> None:
        """GET /health: the process is alive; 503 only when nothing but a restart will help."""
        engine = self._service.engine
        failed = None if engine.is_restarting else engine.failed
        await exchange.respond_json({"status": failed or "ok"}, 503 if failed else 200)

    async def ready(self, exchange: Exchange) -> None:
        """GET /ready: warm, taking requests, and making progress with them."""
        reason = self._service.why_not_ready()
        await exchange.respond_json({"status": reason or "ready"}, 503 if reason else 200)

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        self._service.require_ready()
        await exchange.respond(200, self._service.metrics.render(), CONTENT_TYPE.encode())

    async def openapi(self, exchange: Exchange) -> None:
        """GET /openapi.json."""
        await exchange.respond_json(openapi_document(package_version()))

    async def version(self, exchange: Exchange) -> None:
        """GET /version."""
        await exchange.respond_json({"version": package_version()})

    async def check(self, exchange: Exchange) -> None:
        """GET /debug/check: audits every block between two steps; 500 with what is broken."""
        if not self._service.has_debug_routes:
            raise NotFoundError("/debug/check is off: restart with `--debug-routes on`")
        self._admit(exchange)
        try:
            async with asyncio.timeout(_AUDIT_TIMEOUT_S):
                await self._service.engine.check()
        except AssertionError as broken:
            raise BackendError(f"the audit failed: {broken}") from None
        except TimeoutError:
            raise BackendError(
                f"no audit for {_AUDIT_TIMEOUT_S:g} s: the engine is in a step that does not end"
            ) from None
        await exchange.respond_json({"status": "ok", **self._service.counts()})

    def _admit(self, exchange: Exchange) -> None:
        self._service.access.tenant_salt(exchange)
        self._service.require_ready()

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.read_body(self._service.max_body_bytes, self._service.config.read_timeout_s)

    def _tokenized(self, raw: bytes) -> list[int]:
        text, add_special, parse_special = self._service.intake.tokenize(raw)
        tokenizer: Tokenizer = self._service.engine.tokenizer
        return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def _detokenized(self, raw: bytes) -> str:
        ids = self._service.intake.detokenize(raw)
        tokenizer: Tokenizer = self._service.engine.tokenizer
        for at, token_id in enumerate(ids):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise RequestError(
                    f"`tokens[{at}]` is {token_id}, ids go from 0 to {tokenizer.vocab_size - 1}", param=f"tokens[{at}]"
                )
        return tokenizer.decode(ids, skip_special=False)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "firstlight",
            "max_model_len": self._service.engine.info.max_model_len,
        }
