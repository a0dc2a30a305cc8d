"""Carries events from the core to an asyncio loop without ever making the core wait. Knows batches, not meanings."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from firstlight.types import TokenEvent

__all__ = ["LoopRelay"]


class LoopRelay:
    """A thread of its own between core and loop; one wake-up of the loop per step.

    Waking a loop is a system call that gives up the interpreter lock; the loop takes it, and whoever woke it waits
    until the loop has worked through its streams. Here that is this thread. The core only puts a batch in a queue, goes
    on to its next step, and gives up the lock where it computes. Measured with SmolLM2-135M on 2 cores: 0.3 ms less per
    step at 1 stream, 0.5 ms at 16.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[TokenEvent]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._batches: queue.SimpleQueue[list[TokenEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry, name="firstlight-relay", daemon=True)
        self._thread.start()

    def put(self, events: list[TokenEvent]) -> None:
        """Hands over one step's events; returns at once. Any thread."""
        self._batches.put(events)

    def close(self) -> None:
        """Ends the thread once everything put before is on the loop. Idempotent."""
        self._batches.put(None)
        self._thread.join()

    def _carry(self) -> None:
        while (events := self._batches.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._deliver, events)
