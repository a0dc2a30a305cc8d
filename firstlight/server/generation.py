"""The two routes that make text: body in, watched answer out, one record per request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from firstlight.errors import FirstlightError
from firstlight.server.answer import Answer
from firstlight.server.asgi import ClientGone, Exchange
from firstlight.server.opened import timed
from firstlight.server.quotas import Ticket
from firstlight.server.record import RequestRecord
from firstlight.server.service import Service
from firstlight.server.sse import ClientWatch, EventStream
from firstlight.server.wire import GenerationRequest

__all__ = ["GenerationRoutes"]

_CLIENT_GONE_STATUS = 499
"""Never sent: what logs say when nobody was left to answer."""


class GenerationRoutes:
    """POST /v1/chat/completions and POST /v1/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        salt = self._service.access.tenant_salt(exchange)
        self._service.require_ready()
        await self._recorded(exchange, self._service.intake.chat, "chatcmpl", salt)

    async def completion(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        salt = self._service.access.tenant_salt(exchange)
        self._service.require_ready()
        await self._recorded(exchange, self._service.intake.completion, "cmpl", salt)

    async def _recorded(
        self, exchange: Exchange, parse: Callable[[bytes], GenerationRequest], prefix: str, salt: bytes
    ) -> None:
        """Answers and records. An error before the first byte becomes its status; a later one ends the stream."""
        record = self._service.record(exchange, salt)
        record.answer_id = answer_id = f"{prefix}-{uuid.uuid4().hex}"
        self._service.open_since_s[answer_id] = exchange.arrival_s
        stream: EventStream | None = None
        outcome: str | None = "internal_error"
        ticket: Ticket | None = None
        try:
            ticket = self._service.access.quota(salt).enter()
            request = await self._read(exchange, parse, record)
            ticket.hold(request.num_choices)
            record.stream = request.stream
            stream = EventStream(exchange) if request.stream else None
            if stream is not None:
                record.blocked_by(stream.blocked)
            answer = Answer(self._service, request, record, answer_id, salt)
            await self._watched(exchange, answer, stream, record, salt)
            outcome = None
        except ClientGone:
            exchange.status = _CLIENT_GONE_STATUS
            outcome = "client_gone"
        except FirstlightError as error:
            outcome = error.code
            if stream is not None and stream.started:
                await stream.fail(error, self._service.config.slow_reader_s)
            else:
                await exchange.respond_error(error)
        finally:
            del self._service.open_since_s[answer_id]
            record.close(exchange.status or 500, outcome)
            if ticket is not None:
                ticket.close(record.num_tokens)
        if stream is not None:
            await stream.wait_until_dropped()

    async def _read(
        self, exchange: Exchange, parse: Callable[[bytes], GenerationRequest], record: RequestRecord
    ) -> GenerationRequest:
        raw = await exchange.read_body(self._service.max_body_bytes, self._service.config.read_timeout_s)
        record.stage("receive")
        request = await self._service.parsed(parse, raw)
        record.stage("parse")
        return request

    async def _watched(
        self, exchange: Exchange, answer: Answer, stream: EventStream | None, record: RequestRecord, salt: bytes
    ) -> None:
        service = self._service
        watch = ClientWatch(exchange, stream, service.config)
        spent_s = time.monotonic() - exchange.arrival_s
        async with watch:
            with (
                service.open.registered(record.answer_id, exchange.request_id, salt, watch),
                timed(watch, answer.timeout_s, spent_s),
            ):
                await answer.respond(exchange, stream)
