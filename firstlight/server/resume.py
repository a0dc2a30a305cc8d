"""Streams that outlive their connection: their last events are kept for a while, for a client that comes back.

An answer writes its events here, numbered, and one connection at a time reads them on. Knows events and readers, not
what events say and not sockets.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from firstlight.config import ServerConfig
from firstlight.errors import RequestError, UnsupportedParameter
from firstlight.server.asgi import ClientGone

__all__ = ["LAST_EVENT_ID", "KeptStream", "KeptStreams", "NotResumable", "Origin"]

LAST_EVENT_ID = b"last-event-id"
_EVENT_END = b"\n\n"
_MAX_STREAM_BYTES = 1_000_000
"""Kept of one stream: three times what may lie unread in the kernel (256 KB) and in the server (64 KB)."""


class NotResumable(RequestError):
    """Nothing is kept under this id for this client, or not from that event on."""

    status = 404
    code = "not_resumable"


class ResumedElsewhere(RequestError):
    """Another connection reads on where this one was."""

    status = 409
    code = "resumed_elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who may read a stream on, and how they name it."""

    answer_id: str
    request_id: str
    salt: bytes
    path: str
    body_digest: bytes


class KeptStream:
    """One answer's events. Written by the task that makes the answer; read by one `follow` at a time.

    Invariants: what the reader has not been given is never dropped, and nothing is while there is no reader.
    """

    def __init__(self, kept: KeptStreams, origin: Origin) -> None:
        self.origin = origin
        self.blocked: list[tuple[float, float]] = []
        """The writes to its connections that waited, from and until when."""
        self.num_bytes = 0
        self._kept = kept
        self._events: deque[bytes] = deque()
        self._num_events = 0
        self._num_given = 0
        """Events that the reader has been given."""
        self._has_ended = False
        self._error: Exception | None = None
        self._cause: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._reader: object | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._due: asyncio.TimerHandle | None = None

    @property
    def has_begun(self) -> bool:
        """There was an event."""
        return self._num_events > 0

    @property
    def is_idle(self) -> bool:
        """The answer is made and nobody reads it."""
        return self._has_ended and self._reader is None

    @property
    def num_dropped(self) -> int:
        """Events, from the first on, that are not kept any more."""
        return self._num_events - len(self._events)

    # -- who makes the answer -------------------------------------------------------------------------------------

    async def run(self, work: Awaitable[None]) -> None:
        """Does the work that writes the events. Raises what it raises, or the cause of `end`."""
        self._task = asyncio.current_task()
        assert self._task is not None
        try:
            await work
        except asyncio.CancelledError:
            if self._cause is None:
                raise
            self._task.uncancel()
            raise self._cause from None

    async def write(self, frames: bytes, *, is_last: bool = False) -> None:
        """Adds events. Waits until the reader has been given them; without one, only while too much is kept."""
        before = self.num_bytes
        for event in frames.split(_EVENT_END)[:-1]:
            self._num_events += 1
            numbered = b"id: %b/%d\n%b\n\n" % (self.origin.answer_id.encode(), self._num_events, event)
            self._events.append(numbered)
            self.num_bytes += len(numbered)
        self._has_ended = is_last
        self._kept.grew(self, self.num_bytes - before)
        self._changed()
        while self._is_ahead():
            await self._change()

    def end(self, cause: Exception) -> None:
        """Ends the work, which then raises `cause`; nothing once its last event is there."""
        if self._cause is None and self._task is not None and not self._has_ended:
            self._cause = cause
            self._task.cancel()

    def close(self, error: Exception | None) -> None:
        """The work has ended, by itself or with an error that comes after the last event."""
        self._has_ended, self._error, self._task = True, error, None
        self._kept.settled(self)
        self._changed()

    def _is_ahead(self) -> bool:
        if self._reader is not None:
            return self._num_given < self._num_events
        return not self._has_ended and (self.num_bytes > _MAX_STREAM_BYTES or self._kept.is_full)

    # -- who reads it ---------------------------------------------------------------------------------------------

    async def follow(self, after: int) -> AsyncGenerator[tuple[bytes, bool]]:
        """What follows event number `after` (0: everything), as it comes, and whether the answer ends with it.

        Raises:
            NotResumable: there is no such event, or it is not kept any more.
            ResumedElsewhere: another `follow` has begun.
            Exception: what the work has raised, after the last event.
        """
        if not self.num_dropped <= after <= self._num_events:
            raise NotResumable(
                f"`Last-Event-ID` names event {after}, kept are those after {self.num_dropped} up to "
                f"{self._num_events}: send the request again without it",
                param="Last-Event-ID",
            )
        self._reader = reader = object()
        self._num_given = after
        self._stop_timer()
        self._changed()
        try:
            while self._reader is reader:
                last, is_end = self._num_events, self._has_ended and self._error is None
                if self._num_given < last or is_end:
                    yield self._after(self._num_given), is_end
                    self._give(reader, last)
                    if is_end:
                        return
                elif self._error is not None:
                    raise self._error
                else:
                    await self._change()
            raise ResumedElsewhere("another connection has resumed this stream: read it there", param="Last-Event-ID")
        finally:
            if self._reader is reader:
                self._reader = None
                self.start_timer()
                self._changed()

    def _after(self, number: int) -> bytes:
        return b"".join(self._events[at] for at in range(number - self._num_events, 0))

    def _give(self, reader: object, num_events: int) -> None:
        """Counts events as given, unless another reader has come meanwhile."""
        if self._reader is reader:
            self._num_given = num_events
            self._kept.grew(self, 0)
            self._changed()

    # -- room and time --------------------------------------------------------------------------------------------

    def drop_given(self, is_full: Callable[[], bool]) -> None:
        """Forgets the oldest events that the reader was given, while it has too many or `is_full`."""
        while self._reader is not None and self.num_dropped < self._num_given:
            if not (self.num_bytes > _MAX_STREAM_BYTES or is_full()):
                return
            num_bytes = len(self._events.popleft())
            self.num_bytes -= num_bytes
            self._kept.shrank(num_bytes)

    def start_timer(self) -> None:
        """From now on nobody reads it: it is kept for so long."""
        self._due = asyncio.get_running_loop().call_later(self._kept.keep_s, self.expire)
        self._kept.settled(self)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._kept.read(self)

    def expire(self) -> None:
        """Nobody has come back in time, or room is needed."""
        if self._due is not None:
            self._due.cancel()
        self._kept.forget(self)
        self.end(ClientGone())

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class KeptStreams:
    """All streams of one server that may be read on. Used on the server's loop alone."""

    def __init__(self, config: ServerConfig) -> None:
        self.keep_s = config.resume_s
        self.num_bytes = 0
        """Held by the events of all streams."""
        self._max_bytes = int(config.resume_mb * 1e6)
        self._streams: dict[str, KeptStream] = {}
        self._idle: dict[str, KeptStream] = {}
        """Those that are made and that nobody reads, the first to become so first."""

    @property
    def is_on(self) -> bool:
        """Streams are kept here."""
        return self.keep_s > 0

    @property
    def is_full(self) -> bool:
        """No more can be kept."""
        return self.num_bytes > self._max_bytes

    def open(self, origin: Origin) -> KeptStream:
        """A stream without events."""
        stream = self._streams[origin.answer_id] = KeptStream(self, origin)
        stream.start_timer()
        return stream

    def find(self, name: str, salt: bytes, path: str) -> KeptStream:
        """The stream of this key with that answer id or X-Request-Id, the youngest of several.

        Raises:
            UnsupportedParameter: nothing is kept here.
            NotResumable: there is none, whatever the reason.
        """
        if not self.is_on:
            raise UnsupportedParameter(
                "`Last-Event-ID`: streams cannot be resumed here: leave it out, or restart with `--resume-s`",
                param="Last-Event-ID",
            )
        for stream in reversed(self._streams.values()):
            origin = stream.origin
            is_named = name in (origin.answer_id, origin.request_id) and origin.path == path
            if is_named and hmac.compare_digest(origin.salt, salt):
                return stream
        raise NotResumable(
            f"no stream {name[:128]!r} can be resumed: it was never here, was left for more than {self.keep_s:g} s, or "
            "is another key's: send the request again without `Last-Event-ID`",
            param="Last-Event-ID",
        )

    def grew(self, stream: KeptStream, num_bytes: int) -> None:
        """Counts new bytes of a stream; when it is too much, forgets idle streams, then what this one has given."""
        if stream.origin.answer_id not in self._streams:
            return
        self.num_bytes += num_bytes
        while self.is_full and self._idle:
            next(iter(self._idle.values())).expire()
        stream.drop_given(lambda: self.is_full)

    def shrank(self, num_bytes: int) -> None:
        """A stream has dropped events."""
        self.num_bytes -= num_bytes

    def settled(self, stream: KeptStream) -> None:
        """A stream's answer was made, or its reader has left."""
        if stream.is_idle and stream.origin.answer_id in self._streams:
            self._idle[stream.origin.answer_id] = stream

    def read(self, stream: KeptStream) -> None:
        """A stream has a reader."""
        self._idle.pop(stream.origin.answer_id, None)

    def forget(self, stream: KeptStream) -> None:
        """A stream can be found no more."""
        if self._streams.pop(stream.origin.answer_id, None) is not None:
            self.num_bytes -= stream.num_bytes
        self._idle.pop(stream.origin.answer_id, None)

    def close(self) -> None:
        """Ends and forgets all of them."""
        for stream in list(self._streams.values()):
            stream.expire()
