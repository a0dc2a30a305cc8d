"""One HTTP exchange over plain ASGI: headers in, body in within limits, one answer out. Knows bytes, not routes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from firstlight.errors import BackendError, FirstlightError, OverloadedError, PayloadTooLarge, RequestError
from firstlight.measure.log import log_event

__all__ = [
    "ClientGone",
    "Exchange",
    "Headers",
    "Receive",
    "Scope",
    "Send",
    "error_body",
    "error_headers",
    "logged_failure",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_WANTED_ENDS = frozenset({"cancelled", "timeout", "deadline_exceeded", "resumed_elsewhere"})
_ENCODER = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


class RequestTimeout(RequestError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class Exchange:
    """One request and its one answer. Written by the task that serves it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrival_s = time.monotonic()
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name, value)
        self.base_headers: Headers = []
        """Headers of every answer: request id, CORS."""
        self.request_id = uuid.uuid4().hex
        self.status: int | None = None
        """The status sent, None until then."""
        self.is_complete = False
        """The end of the answer has been given to the server."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """The connection, which our protocol class puts into the scope; None where another server runs the app."""
        found: asyncio.Transport | None = self.scope.get("extensions", {}).get("firstlight.transport")
        return found

    def adopt_request_id(self) -> None:
        """Takes the client's X-Request-Id, or keeps the one drawn. Raises RequestError if it could break a log line."""
        given = self.headers.get(b"x-request-id")
        if given is not None:
            text = given.decode("latin-1")
            if not _REQUEST_ID.fullmatch(text):
                raise RequestError(
                    "`X-Request-Id` must be 1 to 128 printable ASCII characters without spaces", param="X-Request-Id"
                )
            self.request_id = text

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            PayloadTooLarge: it is, or claims to be, over `max_bytes`.
            RequestError: it is compressed, or did not arrive within `timeout_s` (status 408).
            ClientGone: the client left while sending it.
        """
        encoding = self.headers.get(b"content-encoding", b"identity").lower()
        if encoding != b"identity":
            raise RequestError(
                f"`Content-Encoding` {encoding[:32].decode('latin-1')!r} is not supported: send plain JSON",
                param="Content-Encoding",
            )
        claimed = self.headers.get(b"content-length", b"0")
        if claimed.isdigit() and int(claimed[:20]) > max_bytes:
            raise _too_large(int(claimed[:20]), max_bytes)
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk: bytes = message.get("body", b"")
                    num_bytes += len(chunk)
                    if num_bytes > max_bytes:
                        raise _too_large(num_bytes, max_bytes)
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON_TYPE, headers: Headers = []) -> None:  # noqa: B006
        """Sends the whole answer. `headers` is read only."""
        self.status = status
        start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        start += self.base_headers
        start += headers
        await self.send({"type": "http.response.start", "status": status, "headers": start})
        self.is_complete = True
        await self.send({"type": "http.response.body", "body": body})

    async def respond_json(self, value: object, status: int = 200) -> None:
        """Sends `value` as JSON."""
        await self.respond(status, _ENCODER.encode(value))

    async def respond_error(self, error: FirstlightError) -> None:
        """Sends the error in OpenAI's form."""
        await self.respond(error.status, error_body(error), headers=error_headers(error))


def error_body(error: FirstlightError) -> bytes:
    """The JSON of an error in OpenAI's form."""
    message = error.message if error.hint is None else f"{error.message}: {error.hint}"
    return _ENCODER.encode(
        {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}
    )


def error_headers(error: FirstlightError) -> Headers:
    """What the status asks for: Retry-After, WWW-Authenticate, or the end of a connection whose body was not read.

    Stock clients send a request again on 408 and 409, unless told that its end was wanted.
    """
    if isinstance(error, OverloadedError):
        return [(b"retry-after", str(max(1, round(error.retry_after_s))).encode())]
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if error.code in _WANTED_ENDS:
        return [(b"x-should-retry", b"false")]
    return [(b"connection", b"close")] if error.status in (408, 413) else []


def logged_failure(exchange: Exchange, error: Exception) -> BackendError:
    """Logs an error that is ours; what the client is told of it."""
    log_event(
        "error",
        logging.ERROR,
        request_id=exchange.request_id,
        route=exchange.path,
        error=repr(error),
        where=_innermost(error),
    )
    return BackendError(f"internal error: see the server's log for {exchange.request_id}")


def _innermost(error: Exception) -> str:
    """File and line where an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"


def _too_large(num_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is {num_bytes} bytes or more, the limit is {max_bytes}: send less, or restart with `--max-body-mb`"
    )
