"""A lean streaming client for OpenAI-compatible servers: one request, one connection, raw asyncio streams.

Lean because it measures: on two cores a client's cost is taken from the server. Knows HTTP/1.1 framing and server-sent
events; knows neither prompts nor statistics.
Source: RFC 9112 (chunked coding) and the WHATWG HTML standard (event stream), the parts that a server of tokens uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from firstlight.errors import BackendError, ConfigError, FirstlightError, OverloadedError, RequestError

__all__ = ["ChunkedBody", "Endpoint", "EventStream", "get_json", "post_json", "stream_events"]

_READ_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_MAX_ERROR_BYTES = 256 * 1024
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens. `prefix` comes before `/v1`; `api_key` goes out as a bearer token."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    api_key: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> Endpoint:
        """The endpoint of `http[s]://host[:port][/prefix[/v1]]`. Raises ConfigError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"`{url}` is not an http address", hint="give one like http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, api_key)

    @property
    def url(self) -> str:
        """The address as a person writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, num_body_bytes: int) -> bytes:
        """The request's head, ready to send."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
            "User-Agent: firstlight",
        ]
        if num_body_bytes:
            lines += ["Content-Type: application/json", f"Content-Length: {num_body_bytes}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class ChunkedBody:
    """Takes the chunked transfer coding off a body that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        self.is_ended = False

    def feed(self, raw: bytes) -> bytes:
        """The payload in `raw`. Raises ValueError when the coding is broken."""
        buffer, out = self._pending + raw, []
        while buffer and not self.is_ended:
            if self._left > 2:
                piece = buffer[: self._left - 2]
                out.append(piece)
                self._left -= len(piece)
                buffer = buffer[len(piece) :]
            elif self._left:
                dropped = min(self._left, len(buffer))
                self._left -= dropped
                buffer = buffer[dropped:]
            else:
                line, found, rest = buffer.partition(b"\r\n")
                if not found:
                    break
                buffer = rest
                size = int(line.split(b";", 1)[0], 16)
                self.is_ended = size == 0
                self._left = size + 2 if size else 0
        self._pending = buffer
        return b"".join(out)


class EventStream:
    """Splits a server-sent event stream that arrives in arbitrary pieces into the events' payloads."""

    def __init__(self) -> None:
        self._line = b""
        self._parts: list[bytes] = []
        self._is_first = True
        self._is_after_cr = False

    def feed(self, raw: bytes) -> list[bytes]:
        """The payloads that `raw` completes, in order; comments and fields other than `data` are skipped."""
        if self._is_after_cr:
            raw = raw.removeprefix(b"\n")  # the second half of a CRLF
            self._is_after_cr = False
        if b"\n" not in raw and b"\r" not in raw:
            self._line += raw
            return []
        text = self._line + raw
        if self._is_first:
            text, self._is_first = text.removeprefix(b"\xef\xbb\xbf"), False
        if b"\r" in text:
            self._is_after_cr = text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._line = text.split(b"\n")
        return [event for line in lines for event in self._take(line)]

    def _take(self, line: bytes) -> list[bytes]:
        if line.startswith(b"data:"):
            self._parts.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            self._parts.append(b"")
        elif not line and self._parts:
            parts, self._parts = self._parts, []
            return [b"\n".join(parts)]
        return []


async def stream_events(
    endpoint: Endpoint, path: str, body: dict[str, Any]
) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
    """Posts `body` and gives each event as (`time.perf_counter()` when its bytes arrived, decoded JSON), up to [DONE].

    Closing the iterator early closes the connection, which a server takes as an abort.

    Raises:
        ConfigError: nothing answers at the address.
        RequestError, OverloadedError, BackendError: the server's own answer, by its status.
    """
    payload = msgspec.json.encode(body)
    async with _exchange(endpoint, "POST", path, payload) as (status, headers, reader):
        if status != 200:
            raise _error_of(endpoint, status, headers, await _read_whole(headers, reader, _MAX_ERROR_BYTES))
        chunked = ChunkedBody() if headers.get("transfer-encoding", "").lower() == "chunked" else None
        events = EventStream()
        while raw := await reader.read(_READ_BYTES):
            arrival_s = time.perf_counter()
            for event in events.feed(chunked.feed(raw) if chunked else raw):
                if event == _DONE:
                    return
                if not event:
                    continue
                yield arrival_s, msgspec.json.decode(event)
    raise BackendError(f"{endpoint.url} closed the stream before [DONE]")


async def get_json(endpoint: Endpoint, path: str) -> Any:
    """The decoded body of a GET. Raises as `stream_events` does."""
    return await _json_of(endpoint, "GET", path, b"")


async def post_json(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Any:
    """The decoded body of a POST that is not streamed. Raises as `stream_events` does."""
    return await _json_of(endpoint, "POST", path, msgspec.json.encode(body))


async def _json_of(endpoint: Endpoint, method: str, path: str, payload: bytes) -> Any:
    async with _exchange(endpoint, method, path, payload) as (status, headers, reader):
        raw = await _read_whole(headers, reader, 16 * _MAX_ERROR_BYTES)
        if status != 200:
            raise _error_of(endpoint, status, headers, raw)
        try:
            return msgspec.json.decode(raw)
        except ValueError:
            raise BackendError(f"{endpoint.url}{path} did not answer with JSON") from None


@contextlib.asynccontextmanager
async def _exchange(
    endpoint: Endpoint, method: str, path: str, payload: bytes
) -> AsyncIterator[tuple[int, dict[str, str], asyncio.StreamReader]]:
    """Sends one request and gives (status, headers, reader of the body)."""
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=endpoint.is_tls or None, limit=_MAX_HEAD_BYTES
        )
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {endpoint.url}: {error.strerror or error}",
            hint="start a server with `firstlight serve`, or give the address of a running one",
        ) from None
    try:
        writer.write(endpoint.head(method, path, len(payload)) + payload)
        status, headers = _parse_head(endpoint, await reader.readuntil(b"\r\n\r\n"))
        yield status, headers, reader
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
        raise BackendError(f"{endpoint.url} broke off the answer: {error}") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _parse_head(endpoint: Endpoint, head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise BackendError(f"{endpoint.url} does not speak HTTP/1.1: it answered {first[:60]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


async def _read_whole(headers: dict[str, str], reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    chunked = ChunkedBody() if headers.get("transfer-encoding", "").lower() == "chunked" else None
    wanted = int(headers["content-length"]) if headers.get("content-length", "").isdigit() else max_bytes
    body = b""
    while len(body) < min(wanted, max_bytes) and not (chunked and chunked.is_ended):
        raw = await reader.read(_READ_BYTES)
        if not raw:
            break
        body += chunked.feed(raw) if chunked else raw
    return body


def _error_of(endpoint: Endpoint, status: int, headers: dict[str, str], raw: bytes) -> FirstlightError:
    """The server's own words as the error that its status stands for."""
    try:
        message = msgspec.json.decode(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode("utf-8", "replace").strip()
    text = f"{endpoint.url} answered {status}: {message}"
    if status in (429, 503):
        retry_after = headers.get("retry-after", "")
        return OverloadedError(text, retry_after_s=float(retry_after) if retry_after.isdigit() else 1.0, status=status)
    if 400 <= status < 500:
        return RequestError(text)
    return BackendError(text)
