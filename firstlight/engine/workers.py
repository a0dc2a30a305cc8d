"""A few threads for texts that are too long for the loop, the shortest first. Knows sizes, not what is done."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["SizeOrderedPool"]

_T = TypeVar("_T")

AGE_BYTES_PER_S = 1e6
"""Who waits is overtaken only by work that arrives within its size / this: nothing waits for ever."""


class SizeOrderedPool:
    """Daemon threads that start with the first work. `run` is called on a loop, `close` anywhere."""

    def __init__(self, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._serial = itertools.count()
        self._orders: queue.PriorityQueue[tuple[float, int, Future[Any], Callable[[], Any] | None]]
        self._orders = queue.PriorityQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        self._has_started = self._is_closed = False

    async def run(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. Cancelled while it waits, it is never begun."""
        if self._is_closed:
            return await asyncio.to_thread(work)
        if not self._has_started:
            self._has_started = True
            for thread in self._threads:
                thread.start()
        done: Future[_T] = Future()
        self._orders.put((self._clock() * AGE_BYTES_PER_S + size_bytes, next(self._serial), done, work))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Ends the threads once what waits is done; later work gets a thread of its own. Idempotent."""
        self._is_closed = True
        for _ in self._threads:
            self._orders.put((float("inf"), next(self._serial), Future(), None))

    def _work(self) -> None:
        while (order := self._orders.get())[3] is not None:
            _, _, done, work = order
            if not done.set_running_or_notify_cancel():
                continue
            try:
                assert work is not None
                result = work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)
