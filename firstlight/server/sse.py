"""Server-sent events over ASGI, and a watch over the client that reads them.

Knows frames and sockets, not what they say.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol

from firstlight.config import ServerConfig
from firstlight.errors import FirstlightError
from firstlight.server.asgi import ClientGone, Exchange, error_body
from firstlight.server.sockets import is_silent, unread_bytes

__all__ = ["ClientWatch", "EventSink", "EventStream", "SlowReader"]

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_KEEP_ALIVE = b": keep-alive\n\n"
_KEEP_ALIVE_LINE = b": keep-alive\n"
"""Where events have ids: after one, stock readers take an empty line for an event without data, and fail on it."""
_LINGER_S = 5.0
"""How long a stream that was ended for not being read may take to fetch the reason before its connection is cut."""
BLOCKED_S = 0.001
"""A write that found room in the socket took a small part of this."""
MAX_BLOCKED = 4096
_PIECE_BYTES = 16 * 1024
"""Written at a time, so that beside the transport's own 64 KB no more than this waits in it."""
_EVENT_END = b"\n\n"


class SlowReader(FirstlightError):
    """The client did not read for too long, so its stream was ended."""

    status = 408
    code = "slow_reader"
    kind = "invalid_request_error"


class EventSink(Protocol):
    """Takes an answer's events."""

    async def write(self, frames: bytes, *, is_last: bool = False) -> None:
        """Takes whole events; waits while whoever reads them is behind."""


class EventStream:
    """The answer of one exchange as events. The head goes with the first write, so an early error keeps its status.

    Args:
        blocked: gets the writes that waited, from and until when; at most MAX_BLOCKED of them.
    """

    def __init__(self, exchange: Exchange, *, has_ids: bool = False, blocked: list[tuple[float, float]]) -> None:
        self._exchange = exchange
        self._lock = asyncio.Lock()
        self.last_write_s = exchange.arrival_s
        self.was_cut = False
        """The client did not read, so the connection is being dropped."""
        self._blocked = blocked
        self._comment = _KEEP_ALIVE_LINE if has_ids else _KEEP_ALIVE
        self._rest = b""
        """What the write that is going on, or was cancelled, has not handed over."""
        self._num_sent = 0
        self._num_taken = 0
        self._taken_at_s = exchange.arrival_s

    @property
    def started(self) -> bool:
        """The head has been sent."""
        return self._exchange.status is not None

    @property
    def is_writing(self) -> bool:
        """A write is going on, or waits for the client to read."""
        return self._lock.locked()

    async def write(self, frames: bytes, *, is_last: bool = False) -> None:
        """Sends `frames`, in pieces where they are large. Waits while the client has not read what was sent before."""
        async with self._lock:
            start_s = time.monotonic()
            try:
                await self._write(frames, is_last=is_last)
            finally:
                end_s = time.monotonic()
                if end_s - start_s > BLOCKED_S and len(self._blocked) < MAX_BLOCKED:
                    self._blocked.append((start_s, end_s))

    async def _write(self, frames: bytes, *, is_last: bool) -> None:
        if self._exchange.status is None:
            self._exchange.status = 200
            headers = _EVENT_STREAM_HEADERS + self._exchange.base_headers
            await self._exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        self._rest = frames
        is_more = True
        while is_more:
            piece = self._rest[:_PIECE_BYTES]
            is_more = len(piece) < len(self._rest)
            self._exchange.is_complete = is_last and not is_more
            message = {"type": "http.response.body", "body": piece, "more_body": not self._exchange.is_complete}
            await self._exchange.send(message)
            self._rest = self._rest[len(piece) :]
            self._num_sent += len(piece)
            self.last_write_s = time.monotonic()

    def idle_s(self, now_s: float) -> float:
        """How long the client has taken nothing of what waits for it; 0 where nothing waits.

        Precise to the time since the last call: bytes are counted when this is asked.
        """
        transport = self._exchange.transport
        num_unread = 0 if transport is None else unread_bytes(transport)
        # The frames of chunked encoding are not counted as sent: that can hide progress, never feign it, and what
        # they hide is bytes a second.
        num_taken = self._num_sent - num_unread
        if num_unread == 0 or num_taken > self._num_taken:
            self._num_taken, self._taken_at_s = num_taken, now_s
        return now_s - self._taken_at_s

    async def keep_alive(self) -> None:
        """Sends a comment, unless something else is being sent."""
        if not self.is_writing and not self._exchange.is_complete:
            await self.write(self._comment)

    async def fail(self, error: FirstlightError, timeout_s: float) -> None:
        """Ends a started stream with an error event; cuts the client that does not read it for `timeout_s`."""
        frame = self._rest_of_event() + b"data: " + error_body(error) + _EVENT_END
        if isinstance(error, SlowReader):
            self._cut(frame)
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.write(frame, is_last=True)
        except TimeoutError:
            self._cut(frame)

    def _cut(self, frame: bytes) -> None:
        """Puts the frame behind what the client has not read, and drops the connection if it still does not read.

        `send` would wait for the client, so this goes to the transport.
        """
        transport = self._exchange.transport
        if transport is None or transport.is_closing():
            return
        self._exchange.is_complete = self.was_cut = True
        transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(frame), frame))
        transport.close()
        asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def _rest_of_event(self) -> bytes:
        """The end of the event that a cancelled write has left in the middle, so that the next one can be read."""
        event, end, _ = self._rest.partition(_EVENT_END)
        return event + end

    async def wait_until_dropped(self) -> None:
        """Waits until a connection that was cut is gone, some seconds at most: until then it counts as open."""
        while self.was_cut and (await self._exchange.receive())["type"] != "http.disconnect":
            pass


class ClientWatch:
    """While its block runs, notices that the client has left or does not read, and ends the block's task for it.

    Sends keep-alive comments on a stream that is quiet. Leaving the block raises ClientGone, SlowReader or
    what the watch itself failed with in place of the cancellation it caused; one from elsewhere passes unchanged.
    """

    def __init__(self, exchange: Exchange, stream: EventStream | None, config: ServerConfig) -> None:
        self._exchange = exchange
        self._stream = stream
        self._keep_alive_s = config.keep_alive_s
        self._slow_reader_s = config.slow_reader_s
        self._dead_peer_s = config.dead_peer_s
        self._tick_s = max(0.01, min(1.0, self._keep_alive_s / 4, self._slow_reader_s / 4))
        self._cause: Exception | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._work = task
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No await before this line: a cancellation that `_watch` has asked for was already delivered in the block.
        self._task.cancel()
        if self._comment is not None:
            self._comment.cancel()
        if self._cause is not None and kind is asyncio.CancelledError:
            self._work.uncancel()
            raise self._cause from None

    def end(self, cause: Exception) -> None:
        """Ends the block, which then raises `cause`; nothing once the answer is (or a whole answer is being) sent."""
        is_sent = self._exchange.is_complete or (self._stream is None and self._exchange.status is not None)
        if self._cause is None and not is_sent:
            self._cause = cause
            self._work.cancel()

    async def _watch(self) -> None:
        try:
            while self._cause is None:
                try:
                    async with asyncio.timeout(self._tick_s):
                        message = await self._exchange.receive()
                except TimeoutError:
                    self._tick()
                    continue
                if self._exchange.is_complete:
                    return
                if message["type"] == "http.disconnect":
                    self._cause = ClientGone()
        except Exception as error:  # a watch that ended in silence would leave the request running for nobody
            self._cause = error
        self._work.cancel()

    def _tick(self) -> None:
        stream, transport = self._stream, self._exchange.transport
        if transport is not None and is_silent(transport, self._dead_peer_s):
            self._cause = ClientGone()
            transport.abort()
            return
        if stream is None:
            return
        now_s = time.monotonic()
        if stream.idle_s(now_s) > self._slow_reader_s:
            self._cause = SlowReader(
                f"nothing of the stream was read for {self._slow_reader_s:g} s and it was ended: keep reading"
            )
        elif not stream.is_writing and now_s - stream.last_write_s >= self._keep_alive_s:
            # A task of its own: should the socket be full, the watch must go on.
            self._comment = asyncio.create_task(stream.keep_alive())
