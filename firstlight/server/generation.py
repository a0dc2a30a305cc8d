"""The two routes that make text: body in, watched answer out, one record per request."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from firstlight.errors import FirstlightError, OverloadedError, RequestError
from firstlight.measure.log import log_event
from firstlight.server.answer import Answer
from firstlight.server.asgi import ClientGone, Exchange, logged_failure
from firstlight.server.intake import Intake
from firstlight.server.opened import Endable, timed
from firstlight.server.quotas import Ticket
from firstlight.server.resume import LAST_EVENT_ID, KeptStream, Origin
from firstlight.server.service import Service
from firstlight.server.sse import ClientWatch, EventStream
from firstlight.server.wire import GenerationRequest

__all__ = ["GenerationRoutes"]

_CLIENT_GONE_STATUS = 499
"""Never sent: what logs say when nobody was left to answer."""
_CLOSING_RETRY_S = 5.0

Parse = Callable[[Intake, bytes], GenerationRequest]


class GenerationRoutes:
    """POST /v1/chat/completions and POST /v1/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()
        """Answers that may outlive their connection."""

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self._route(exchange, Intake.chat, "chatcmpl")

    async def completion(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self._route(exchange, Intake.completion, "cmpl")

    async def _route(self, exchange: Exchange, parse: Parse, prefix: str) -> None:
        salt = self._service.access.tenant_salt(exchange)
        if LAST_EVENT_ID in exchange.headers:
            await self._resume(exchange, salt)
            return
        self._service.require_ready()
        await self._recorded(exchange, parse, _Opened(self._service, exchange, f"{prefix}-{uuid.uuid4().hex}", salt))

    async def _recorded(self, exchange: Exchange, parse: Parse, opened: _Opened) -> None:
        """Answers and records. An error before the first byte becomes its status; a later one ends the stream."""
        service, record = self._service, opened.record
        stream: EventStream | None = None
        outcome: str | None = "internal_error"
        try:
            opened.enter()
            request, digest = await self._read(exchange, parse, opened)
            opened.hold(request)
            answer = Answer(service, request, record, opened.answer_id, opened.salt)
            if request.stream and service.kept.is_on:
                kept = service.kept.open(opened.origin(exchange, digest))
                record.blocked_by(kept.blocked)
                opened.was_handed_over = True
                self._start(self._keep(exchange, answer, kept, opened))
                await self._follow(exchange, kept, 0)
                return
            if request.stream:
                blocked: list[tuple[float, float]] = []
                record.blocked_by(blocked)
                stream = EventStream(exchange, blocked=blocked)
            watch = ClientWatch(exchange, stream, service.config)
            async with watch:
                with opened.endable(watch, answer.timeout_s):
                    await answer.respond(exchange, stream)
            outcome = None
        except ClientGone:
            exchange.status = _CLIENT_GONE_STATUS
            outcome = "client_gone"
        except FirstlightError as error:
            outcome = error.code
            await self._fail(exchange, stream, error)
        finally:
            if not opened.was_handed_over:
                opened.close(exchange.status or 500, outcome)
        if stream is not None:
            await stream.wait_until_dropped()

    async def _read(self, exchange: Exchange, parse: Parse, opened: _Opened) -> tuple[GenerationRequest, bytes]:
        """The checked request, and the body's digest where a client may come back with the same."""
        service = self._service
        raw = await exchange.read_body(service.max_body_bytes, service.config.read_timeout_s)
        opened.record.stage("receive")

        def checked(raw: bytes) -> tuple[GenerationRequest, bytes]:
            return parse(service.intake, raw), _digest(raw) if service.kept.is_on else b""

        found = await service.parsed(checked, raw)
        opened.record.stage("parse")
        return found

    async def _fail(self, exchange: Exchange, stream: EventStream | None, error: FirstlightError) -> None:
        if stream is not None and stream.started:
            await stream.fail(error, self._service.config.slow_reader_s)
        else:
            await exchange.respond_error(error)

    # -- streams that may be resumed ------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, exchange: Exchange, answer: Answer, kept: KeptStream, opened: _Opened) -> None:
        """Makes the answer, whoever reads it, and records it. `exchange` is the one that asked for it."""
        status = 500
        outcome: str | None = "internal_error"
        told: Exception | None = OverloadedError(
            "the server is shutting down", retry_after_s=_CLOSING_RETRY_S, status=503
        )
        try:
            with opened.endable(kept, answer.timeout_s):
                await kept.run(answer.respond(exchange, kept))
            status, outcome, told = 200, None, None
        except ClientGone as gone:
            status, outcome, told = _CLIENT_GONE_STATUS, "client_gone", gone
        except FirstlightError as error:
            status, outcome, told = 200 if kept.has_begun else error.status, error.code, error
        except Exception as error:
            told = logged_failure(exchange, error)
        finally:
            kept.close(told)
            opened.close(status, outcome)

    async def _resume(self, exchange: Exchange, salt: bytes) -> None:
        """Reads a stream on after the event that `Last-Event-ID` names, for the key that began it."""
        service = self._service
        given = exchange.headers[LAST_EVENT_ID].decode("latin-1")
        name, _, number = given.rpartition("/")
        if not name or not (number.isascii() and number.isdigit() and len(number) < 16):
            raise RequestError(
                f"`Last-Event-ID` is {given[:160]!r}, it must be ID/NUMBER as the stream's events had it",
                param="Last-Event-ID",
            )
        kept = service.kept.find(name, salt, exchange.path)
        raw = await exchange.read_body(service.max_body_bytes, service.config.read_timeout_s)
        if raw and await service.parsed(_digest, raw) != kept.origin.body_digest:
            raise RequestError(
                f"the body is not that of the stream {name[:128]!r}: send the same again, or none",
                param="Last-Event-ID",
            )
        log_event("resumed", id=kept.origin.answer_id, request_id=exchange.request_id, after=int(number))
        await self._follow(exchange, kept, int(number))

    async def _follow(self, exchange: Exchange, kept: KeptStream, after: int) -> None:
        """Sends the events after number `after`. The client that leaves ends this, not the answer."""
        stream = EventStream(exchange, has_ids=True, blocked=kept.blocked)
        try:
            async with ClientWatch(exchange, stream, self._service.config), aclosing(kept.follow(after)) as batches:
                async for frames, is_last in batches:
                    await stream.write(frames, is_last=is_last)
        except ClientGone:
            exchange.status = _CLIENT_GONE_STATUS
        except FirstlightError as error:
            await self._fail(exchange, stream, error)
        await stream.wait_until_dropped()


class _Opened:
    """What a request holds while it is answered: its record, its part of the quota, its place among the open ones."""

    def __init__(self, service: Service, exchange: Exchange, answer_id: str, salt: bytes) -> None:
        self.answer_id = answer_id
        self.salt = salt
        self.record = service.record(exchange, salt)
        self.record.answer_id = answer_id
        self.was_handed_over = False
        """Another task closes it."""
        self._service = service
        self._request_id = exchange.request_id
        self._transport = exchange.transport
        self._arrival_s = exchange.arrival_s
        self._ticket: Ticket | None = None
        service.open_since_s[answer_id] = exchange.arrival_s

    def origin(self, exchange: Exchange, body_digest: bytes) -> Origin:
        """How a client that comes back names it."""
        return Origin(
            answer_id=self.answer_id,
            request_id=self._request_id,
            salt=self.salt,
            path=exchange.path,
            body_digest=body_digest,
        )

    def enter(self) -> None:
        """Counts it. Raises RateLimited."""
        self._ticket = self._service.access.quota(self.salt).enter()

    def hold(self, request: GenerationRequest) -> None:
        """Counts its sequences. Raises RateLimited."""
        assert self._ticket is not None
        self._ticket.hold(request.num_choices)
        self.record.stream = request.stream

    @contextmanager
    def endable(self, work: Endable, timeout_s: float | None) -> Iterator[None]:
        """While the block runs, `timeout` and cancel requests end the work."""
        spent_s = time.monotonic() - self._arrival_s
        with (
            self._service.open.registered(self.answer_id, self._request_id, self.salt, work),
            timed(work, timeout_s, spent_s),
        ):
            yield

    def close(self, status: int, outcome: str | None) -> None:
        """Records its end and gives back what it held."""
        del self._service.open_since_s[self.answer_id]
        finished = self.record.close(status, outcome)
        if outcome is None:
            self._service.deliveries.watch(self._transport, finished)
        if self._ticket is not None:
            self._ticket.close(self.record.num_tokens)


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()
