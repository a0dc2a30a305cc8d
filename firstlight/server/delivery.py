"""After an answer was written: how long until the client's machine had taken its last byte.

Nobody waits for this. The connection's descriptor is duplicated, because the original may be closed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from firstlight.measure.causes import FinishedRequest
from firstlight.server.sockets import Outgoing, outgoing

__all__ = ["Deliveries"]

MAX_WATCHED = 256
"""Connections looked at at a time; the answers on others count as taken when they were written."""
FIRST_LOOK_S = 0.002
LONGEST_LOOK_S = 0.05
GROWTH = 1.5
IN_FLIGHT_S = 0.25
"""Bytes that were sent at once and are acknowledged within this are a round trip and a delayed acknowledgment."""


class Deliveries:
    """Watches over answers that are written and not yet taken. Used on one loop.

    Args:
        stalled_s: a client that takes nothing for so long is watched no longer.
    """

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._watches: set[asyncio.Task[None]] = set()

    def watch(self, transport: asyncio.Transport | None, request: FinishedRequest) -> None:
        """Fills `request.taken_s` from now on, where the answer is not taken yet.

        Call it in the same turn of the loop as the last write: a transport that was closed by it is still open then.
        """
        if transport is None or len(self._watches) >= MAX_WATCHED:
            return
        sock = _duplicate(transport)
        if sock is None:
            return
        queue = outgoing(sock)
        unsent = transport.get_write_buffer_size()
        if queue is None or queue.unacknowledged + unsent == 0:
            sock.close()
            return
        target = queue.acknowledged + queue.unacknowledged + unsent
        watch = _Watch(transport, sock, request, target, is_seen_unsent=unsent + queue.unsent > 0)
        watch.end_write_side()
        task = asyncio.get_running_loop().create_task(watch.run(self._stalled_s))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)


class _Watch:
    """One answer on its way. Owns `sock`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        sock: socket.socket,
        request: FinishedRequest,
        target: int,
        *,
        is_seen_unsent: bool,
    ) -> None:
        self._transport = transport
        self._sock = sock
        self._request = request
        self._target = target
        self._is_late = is_seen_unsent
        self._is_ended = False

    def end_write_side(self) -> None:
        """Once the transport is closed and has handed everything over: our descriptor would keep the client waiting."""
        if self._transport.is_closing() and not self._transport.get_write_buffer_size() and not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    async def run(self, stalled_s: float) -> None:
        """Looks until all is acknowledged, the connection is gone, or nothing has moved for `stalled_s`."""
        request, look_s = self._request, FIRST_LOOK_S
        start_s = moved_s = request.stamps.end_s
        acknowledged = 0
        with self._sock:
            while True:
                now_s = time.monotonic()
                queue = outgoing(self._sock)
                if queue is None or now_s - moved_s > stalled_s:
                    break
                if queue.acknowledged > acknowledged:
                    acknowledged, moved_s = queue.acknowledged, now_s
                is_taken = acknowledged >= self._target
                self._is_late = self._is_late or self._is_unsent(queue) or now_s - start_s > IN_FLIGHT_S
                if self._is_late:
                    request.taken_s = now_s
                if is_taken:
                    break
                self.end_write_side()
                await asyncio.sleep(look_s)
                look_s = min(LONGEST_LOOK_S, look_s * GROWTH)

    def _is_unsent(self, queue: Outgoing) -> bool:
        """The window was full: bytes of this answer wait here."""
        return queue.acknowledged + queue.unacknowledged - queue.unsent < self._target


def _duplicate(transport: asyncio.Transport) -> socket.socket | None:
    """The same connection under a descriptor of our own; None where there is none to be had."""
    given = transport.get_extra_info("socket")
    if given is None or (transport.get_extra_info("ssl_object") is not None and transport.is_closing()):
        return None  # TLS says goodbye in its own time
    try:
        sock = socket.fromfd(given.fileno(), given.family, given.type)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        if sock.getpeername() == transport.get_extra_info("peername"):
            return sock
    sock.close()  # closed, and its number was given to another
    return None
