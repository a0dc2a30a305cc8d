"""The other process of `benchmarks.streams`: clients that read, read slowly, or are killed, and what they saw."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any

from firstlight.measure.client import ChunkedBody, Endpoint, EventStream, get_json, post_json

SETTLE_S = 15.0
Kill = tuple[float, int]
"""Seconds or tokens after which a client is gone, whichever comes first."""
HEALTH_HZ = 200


class Reader:
    """One stream, read as it comes."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.text = ""
        self.is_whole = False
        self.was_killed = False
        self.error: str | None = None
        self.end_s = 0.0
        self.sent_s = 0.0

    async def read(self, url: str, body: dict[str, Any], *, kill: Kill | None = None, headers: str = "") -> None:
        """Asks and reads to the end, or until it kills its connection (TCP reset)."""
        endpoint = Endpoint.parse(url)
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        began_s = time.monotonic()
        try:
            payload = json.dumps(body).encode()
            head = endpoint.head("POST", "/v1/completions", len(payload)).replace(b"\r\n\r\n", b"\r\n", 1)
            self.sent_s = time.monotonic()
            writer.write(head + headers.encode() + b"\r\n" + payload)
            async with asyncio.timeout(kill and kill[0]):
                await self._events(reader, kill and kill[1])
        except TimeoutError:
            self.was_killed = True
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        finally:
            writer.transport.abort() if self.was_killed else writer.close()
            self.end_s = time.monotonic() - began_s
        if not self.is_whole and not self.was_killed and self.error is None:
            self.error = "the stream broke off"

    async def _events(self, reader: asyncio.StreamReader, most_tokens: int | None) -> None:
        """Raises TimeoutError after so many tokens."""
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            self.error = head.split(b"\r\n", 1)[0].decode()
            return
        chunked, events = ChunkedBody(), EventStream()
        while raw := await reader.read(65536):
            now_s = time.monotonic()
            for event in events.feed(chunked.feed(raw)):
                if event == b"[DONE]":
                    self.is_whole = True
                    return
                self._take(json.loads(event), now_s)
                if most_tokens is not None and len(self.times_s) >= most_tokens:
                    raise TimeoutError

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
        text = "".join(choice["text"] for choice in event.get("choices", ()))
        if text:
            self.text += text
            self.times_s.append(now_s)

    def seen(self) -> dict[str, Any]:
        """As plain data."""
        gaps_s = [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]
        names = ("text", "times_s", "was_killed", "error", "end_s", "sent_s")
        return {**{name: getattr(self, name) for name in names}, "gaps_s": gaps_s}


async def crowd(url: str, bodies: list[dict[str, Any]], kills: list[Kill | None]) -> list[dict[str, Any]]:
    """All streams at once; those with a moment are killed then."""
    readers = [Reader() for _ in bodies]
    calls = zip(readers, bodies, kills, strict=True)
    await asyncio.gather(*(reader.read(url, body, kill=kill) for reader, body, kill in calls))
    return [reader.seen() for reader in readers]


async def staggered(
    url: str, bodies: list[dict[str, Any]], request_ids: list[str], apart_s: float
) -> list[dict[str, Any]]:
    """Streams that begin one after another, with their X-Request-Id."""
    readers = [Reader() for _ in bodies]

    async def one(at: int) -> None:
        await asyncio.sleep(at * apart_s)
        await readers[at].read(url, bodies[at], headers=f"X-Request-Id: {request_ids[at]}\r\n")

    await asyncio.gather(*(one(at) for at in range(len(bodies))))
    return [reader.seen() for reader in readers]


async def beside_readers(
    url: str, bodies: list[dict[str, Any]], beside: list[dict[str, Any]], bytes_per_s: int
) -> dict[str, Any]:
    """`bodies` as streams, once those of `beside` run; these are read at `bytes_per_s` (0: as they come)."""
    num_read = [0] * len(beside)
    begun = [asyncio.Event() for _ in beside]
    tasks = [
        asyncio.create_task(_read_slowly(url, body, bytes_per_s, num_read, at, begun[at]))
        for at, body in enumerate(beside)
    ]
    for event in begun:
        await event.wait()
    began_s = time.monotonic()
    before = sum(num_read)
    streams = await crowd(url, bodies, [None for _ in bodies])
    took_s, read = time.monotonic() - began_s, [sum(num_read) - before]
    still = [not task.done() for task in tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(still), "a stream beside ended before the measured ones"
    return {"streams": streams, "bytes_read": [read[0] / max(1, len(beside))], "took_s": took_s}


async def _read_slowly(
    url: str, body: dict[str, Any], bytes_per_s: int, num_read: list[int], at: int, begun: asyncio.Event
) -> None:
    """Reads for as long as it may, from a socket that takes little beyond that."""
    loop, endpoint, payload = asyncio.get_running_loop(), Endpoint.parse(url), json.dumps(body).encode()
    with socket.socket() as sock:
        sock.setblocking(False)
        if bytes_per_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, (endpoint.host, endpoint.port))
        await loop.sock_sendall(sock, endpoint.head("POST", "/v1/completions", len(payload)) + payload)
        while raw := await loop.sock_recv(sock, 100 if bytes_per_s else 65536):
            num_read[at] += len(raw)
            begun.set()
            if bytes_per_s:
                await asyncio.sleep(len(raw) / bytes_per_s)


async def health_beside(url: str, text: str, num_texts: int, seconds: float) -> dict[str, Any]:
    """How long /health took, asked evenly, while `num_texts` texts at a time are tokenised one after another."""
    endpoint = Endpoint.parse(url)
    took: list[float] = []
    is_over = False
    texts_s: list[float] = []

    async def tokenising() -> None:
        while not is_over:
            began_s = time.monotonic()
            answer = await post_json(endpoint, "/tokenize", {"content": text})
            assert answer["count"] > 0
            texts_s.append(time.monotonic() - began_s)

    tasks = [asyncio.create_task(tokenising()) for _ in range(num_texts)]
    await asyncio.sleep(0.2)
    until_s, due_s = time.monotonic() + seconds, time.monotonic()
    while time.monotonic() < until_s:
        due_s += 1 / HEALTH_HZ
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        began_s = time.monotonic()
        await get_json(endpoint, "/health")
        took.append(time.monotonic() - began_s)
        due_s = max(due_s, time.monotonic() - 1 / HEALTH_HZ)
    is_over = True
    await asyncio.gather(*tasks)
    seconds_a_text = sum(texts_s) / len(texts_s) if texts_s else 0.0
    return {"health_s": took, "num_texts": len(texts_s), "seconds_a_text": seconds_a_text}


async def settled_audit(url: str) -> dict[str, Any]:
    """/debug/check once nothing is open any more, or as it is after a while."""
    endpoint = Endpoint.parse(url)
    until_s = time.monotonic() + SETTLE_S
    while True:
        audit: dict[str, Any] = await get_json(endpoint, "/debug/check")
        is_idle = not (audit["running"] or audit["waiting"] or audit["used_blocks"])
        if is_idle or time.monotonic() > until_s:
            return audit
        await asyncio.sleep(0.1)
