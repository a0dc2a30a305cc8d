"""uvicorn's HTTP protocol with what it lacks: bounds on the headers' size and time, a way to cut stalled clients."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["bounded_protocol"]

_TOO_LARGE = b"request line and headers are too large"


def bounded_protocol(max_header_bytes: int, header_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol class that closes connections whose headers are too big or too slow.

    Bytes are counted per read, so up to one read (256 KB) more than the bound may be held.
    """

    class BoundedProtocol(HttpToolsProtocol):
        """One connection. Its transport is in every scope under the extension `firstlight.transport`."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._num_header_bytes = 0
            self._headers_due: asyncio.TimerHandle | None = None
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_between_requests:
                self._await_headers()
            self._num_header_bytes += len(data)
            super().data_received(data)
            if self._is_in_headers and self._num_header_bytes > max_header_bytes:
                self._refuse()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._is_between_requests = False
            self._is_in_headers = True
            self.scope["extensions"] = {"firstlight.transport": self.transport}  # type: ignore[dict-item]

        def on_headers_complete(self) -> None:
            self._is_in_headers = False
            self._stop_timer()
            if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > max_header_bytes:
                self._refuse()
                return
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self.transport.is_closing():
                super().on_message_complete()
            self._is_between_requests = True
            self._num_header_bytes = 0

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None and not self.transport.is_closing():
                super().on_body(body)

        def _await_headers(self) -> None:
            self._is_between_requests = False
            self._is_in_headers = True
            self._stop_timer()
            self._headers_due = self.loop.call_later(header_timeout_s, self._close_silently)

        def _stop_timer(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

        def _close_silently(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

        def _refuse(self) -> None:
            if self.transport.is_closing():
                return
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
            head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_TOO_LARGE)
            self.transport.write(head + _TOO_LARGE)
            self.transport.close()

    return BoundedProtocol
