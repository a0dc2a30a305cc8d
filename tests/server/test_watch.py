"""The watch over a client, and what it asks of a connection, at moments that a whole server meets by chance alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from typing import Any, cast

import pytest
import uvloop

from firstlight.config import ServerConfig
from firstlight.server.asgi import Exchange
from firstlight.server.sockets import is_silent, unread_bytes
from firstlight.server.sse import ClientWatch, EventStream


class _Accepted(asyncio.Protocol):
    """Looks at its connection just before and just after it is lost, as a tick of the watch may."""

    def __init__(self, seen: asyncio.Queue[tuple[bool, int]]) -> None:
        self._seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        self._look()
        asyncio.get_running_loop().call_later(0.01, self._look)

    def _look(self) -> None:
        self._seen.put_nowait((is_silent(self._transport, 1.0), unread_bytes(self._transport)))


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_connection_that_was_just_lost_can_still_be_asked(new_loop: Any) -> None:
    async def lose_one() -> list[tuple[bool, int]]:
        seen: asyncio.Queue[tuple[bool, int]] = asyncio.Queue()
        listening = await asyncio.get_running_loop().create_server(lambda: _Accepted(seen), "127.0.0.1", 0)
        async with listening:
            sock = socket.create_connection(listening.sockets[0].getsockname())
            looks = [await seen.get()]
            sock.close()
            return [*looks, await seen.get(), await seen.get()]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(asyncio.wait_for(lose_one(), 20)) == [(False, 0)] * 3


def test_a_watch_that_fails_ends_the_work_it_watches() -> None:
    async def receive() -> MutableMapping[str, Any]:
        raise LookupError("broken")

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    async def watched() -> None:
        exchange = Exchange({"method": "POST", "path": "/", "headers": []}, receive, send)
        async with ClientWatch(exchange, EventStream(exchange, blocked=[]), ServerConfig()):
            await asyncio.Event().wait()

    with pytest.raises(LookupError, match="broken"):
        asyncio.run(asyncio.wait_for(watched(), 20))
