"""Carries events from the core to an asyncio loop without ever making the core wait. Knows batches, not meanings."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable

from firstlight.types import TokenEvent

__all__ = ["LoopRelay"]

_ONE = (1).to_bytes(8, "little")
"""What wakes the loop: an event counter takes eight bytes, a pipe any."""


class LoopRelay:
    """One wake-up of the loop per step, by a write that keeps the interpreter lock. Made on the loop.

    An ordinary write gives the lock up; the loop takes it, and the core waits until the loop has worked through its
    streams. Kept, the lock changes hands where the core's next step computes. A thread of its own that wakes the loop
    does that too, but has to wait for a processor while all of them compute: with SmolLM2-135M and 16 streams on 2
    cores the median token left 3.9 ms after its step with such a thread, and leaves after 2.1 ms without.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[TokenEvent]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._batches: deque[list[TokenEvent]] = deque()
        self._is_closed = False
        self._read_fd, self._write_fd = _wake_up_line()
        for fd in {self._read_fd, self._write_fd}:  # not in `close`: somebody may still be about to write
            # Nor at exit, where a loop may still be about to read: the system closes them.
            weakref.finalize(self, os.close, fd).atexit = False
        self._write = ctypes.PyDLL(None).write  # PyDLL calls with the lock held
        loop.add_reader(self._read_fd, self._take)

    def put(self, events: list[TokenEvent]) -> None:
        """Hands over one step's events; returns at once. Any thread."""
        self._batches.append(events)
        self._write(self._write_fd, _ONE, len(_ONE))  # a line that is full has woken the loop already

    def close(self) -> None:
        """Delivers what was put before, then carries no more. Idempotent; on the loop."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._read_fd)
            self._take()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        while self._batches:
            self._deliver(self._batches.popleft())


def _wake_up_line() -> tuple[int, int]:
    """(to read, to write), neither of which ever waits."""
    if hasattr(os, "eventfd"):  # Linux
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd
