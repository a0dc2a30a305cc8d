"""A socket that answers every request with prepared bytes, cut as a test wants them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from firstlight.measure.client import Endpoint


def sse_body(events: list[dict[str, Any]], *, done: bool = True) -> bytes:
    frames = [f"data: {json.dumps(event)}\n\n" for event in events]
    return (": waiting\n\n" + "".join(frames) + ("data: [DONE]\n\n" if done else "")).encode()


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def response(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n".encode() + body


class CannedServer:
    """Answers in order; the last answer repeats. Keeps what it was sent."""

    def __init__(self, answers: list[bytes], piece_bytes: int) -> None:
        self.requests: list[bytes] = []
        self.num_open = 0
        self.most_open = 0
        self._answers = answers
        self._piece_bytes = piece_bytes

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Len")), 0)
        self.requests.append(head + await reader.readexactly(length))
        answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(answer), self._piece_bytes):
                writer.write(answer[at : at + self._piece_bytes])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        self.num_open -= 1


@contextlib.asynccontextmanager
async def canned(*answers: bytes, piece_bytes: int = 1 << 16) -> AsyncIterator[tuple[CannedServer, Endpoint]]:
    canned_server = CannedServer(list(answers), piece_bytes)
    server = await asyncio.start_server(canned_server.serve_one, "127.0.0.1", 0)
    async with server:
        yield canned_server, Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], prefix="/base", api_key="k")
