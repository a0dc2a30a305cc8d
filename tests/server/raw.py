"""A client that can misbehave: half requests, closed sockets, unread streams. And the audit that follows."""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from firstlight.server.run import ServerThread


def request_bytes(path: str, body: Any, *, headers: str = "") -> bytes:
    """A POST as it goes over the wire. `body` is JSON-encoded unless it is bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


_OPENED: list[socket.socket] = []


def connected(server: ServerThread, *, receive_buffer: int | None = None) -> socket.socket:
    """A socket connected to the server, closed at the latest when its test ends."""
    address = urlsplit(server.url)
    sock = socket.socket()
    _OPENED.append(sock)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect((address.hostname, address.port))
    return sock


def close_all_connected() -> None:
    """Closes what `connected` has opened: a test that failed half-way must not fail others by what it left."""
    while _OPENED:
        _OPENED.pop().close()


def read_briskly(sock: socket.socket) -> None:
    """Gives a socket with a small receive buffer a large one.

    With a window of a few KB the kernel falls back on its timers, 5 packets a second: megabytes take minutes.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)


def vanish(sock: socket.socket) -> None:
    """From now on the socket hears nothing and so acknowledges nothing, as if its machine had lost power.

    A filter that lets no packet through is attached to it, which needs no privilege.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_ATTACH_FILTER", 26), program)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """Everything up to and including the read that brought `mark`."""
    received = bytearray()
    while mark not in received:
        chunk = sock.recv(65536)
        if not chunk:
            raise AssertionError(f"closed before {mark!r}: {received!r}")
        received += chunk
    return bytes(received)


def read_all(sock: socket.socket, timeout_s: float = 60.0) -> bytes:
    """Everything until the server closes; fails after a time that no healthy run comes near."""
    deadline_s = time.monotonic() + timeout_s
    received = bytearray()
    while chunk := sock.recv(65536):
        received += chunk
        assert time.monotonic() < deadline_s, f"{len(received)} bytes in {timeout_s} s, and more to come"
    return bytes(received)


def dechunked(answer: bytes) -> bytes:
    """The body of a chunked answer, or the beginning of one."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def wait_until(claim: Any, what: str, timeout_s: float = 60.0) -> None:
    """Returns once `claim()` is true; fails after a time that no healthy run comes near."""
    deadline_s = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.002)


def assert_idle_and_whole(server: ServerThread) -> None:
    """Waits until no request is left, then audits: no block is held, nothing is broken."""
    stats = server.engine.stats
    wait_until(lambda: stats().waiting + stats().running == 0, "every request to end")
    answer = httpx.get(server.url + "/debug/check")
    assert answer.status_code == 200, answer.text
    counts = answer.json()
    assert counts["used_blocks"] == 0, counts
    assert counts["waiting"] == counts["running"] == 0, counts


def events(body: bytes | str) -> list[Any]:
    """The JSON of every `data:` event of a body, "[DONE]" as itself."""
    text = body.decode() if isinstance(body, bytes) else body
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
