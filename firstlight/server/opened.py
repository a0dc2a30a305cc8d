"""Requests that are being answered and can be ended from outside: by `timeout`, or by a cancel request of their key.

Knows ids, owners and works, not answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from firstlight.errors import RequestError

__all__ = ["Cancelled", "Endable", "OpenRequests", "TimedOut"]


class Cancelled(RequestError):
    """Another request of the same key cancelled this one."""

    status = 409
    code = "cancelled"


class TimedOut(RequestError):
    """The request's own `timeout` has passed."""

    status = 408
    code = "timeout"


class Endable(Protocol):
    """Work that can be ended from outside."""

    def end(self, cause: Exception) -> None:
        """Ends it, and has it raise `cause`."""


class OpenRequests:
    """The works of open answers, by answer id and by X-Request-Id. Used on the server's loop alone."""

    def __init__(self) -> None:
        self._works: dict[str, tuple[bytes, str, Endable]] = {}

    @contextmanager
    def registered(self, answer_id: str, request_id: str, salt: bytes, work: Endable) -> Iterator[None]:
        """Can be cancelled while the block runs."""
        self._works[answer_id] = (salt, request_id, work)
        try:
            yield
        finally:
            del self._works[answer_id]

    def cancel(self, name: str, salt: bytes) -> int:
        """Ends what has this answer id or request id and belongs to the key; how many that were."""
        found = [
            work
            for answer_id, (owner, request_id, work) in self._works.items()
            if owner == salt and name in (answer_id, request_id)
        ]
        for work in found:
            work.end(Cancelled("the request was cancelled: nothing more will come", param="id"))
        return len(found)


@contextmanager
def timed(work: Endable, timeout_s: float | None, spent_s: float) -> Iterator[None]:
    """Ends the work `timeout_s` after the request's arrival, of which `spent_s` have passed; None: never."""
    if timeout_s is None:
        yield
        return
    error = TimedOut(f"`timeout` is {timeout_s:g} s and has passed: ask for less, or allow more", param="timeout")
    due = asyncio.get_running_loop().call_later(max(0.0, timeout_s - spent_s), work.end, error)
    try:
        yield
    finally:
        due.cancel()
