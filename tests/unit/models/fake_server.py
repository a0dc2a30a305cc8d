"""A small HTTP server on port 0 for download tests: files by path, with Range, cuts, wrong lengths and redirects."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Page:
    """What a path answers. `cuts`: send so many bytes, then cut the connection, once for each entry."""

    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)


class FakeServer:
    """Pages by path, and a log of (method, path, Range header)."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.log: list[tuple[str, str, str | None]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        asked = request.headers.get("Range")
        self.log.append((request.command, path, asked))
        self.seen_headers.append(dict(request.headers.items()))
        page = self.pages.get(path)
        if page is None:
            request.send_response(404)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body, status, headers = page.body, page.status, dict(page.headers)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        if match and page.ranges:
            start = int(match.group(1))
            if start >= len(body):
                status, body = 416, b""
            else:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[start:]
        headers.setdefault("Content-Length", str(len(body)))
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        cut = page.cuts.pop(0) if page.cuts else len(body)
        request.wfile.write(body[:cut])
        request.close_connection = request.close_connection or cut < len(body)


@contextmanager
def serving() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            fake.answer(self)

        do_HEAD: Callable[[BaseHTTPRequestHandler], None] = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
