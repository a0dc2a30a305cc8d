"""Long texts on threads: the shortest first, errors to whoever asked, nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from firstlight.engine.workers import AGE_BYTES_PER_S, SizeOrderedPool


def _order(sizes: list[int], arrivals_s: list[float]) -> list[int]:
    """Which work is done first, when all of it arrives while the one thread is busy."""
    done: list[int] = []
    gate, is_busy = threading.Event(), threading.Event()
    times = iter([0.0, *arrivals_s])

    def hold() -> None:
        is_busy.set()
        gate.wait(20)

    async def run() -> None:
        pool = SizeOrderedPool(1, "test", clock=lambda: next(times))
        busy = asyncio.create_task(pool.run(0, hold))
        await asyncio.to_thread(is_busy.wait, 20)
        tasks = []
        for at, size in enumerate(sizes):
            tasks.append(asyncio.create_task(pool.run(size, lambda at=at: done.append(at))))  # type: ignore[misc]
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(busy, *tasks)
        pool.close()

    asyncio.run(run())
    return done


def test_shortest_goes_first() -> None:
    assert _order([3000, 1000, 2000], [0, 0, 0]) == [1, 2, 0]


def test_work_that_has_waited_is_not_overtaken() -> None:
    size = 1000
    assert _order([size, 1], [0, 2 * size / AGE_BYTES_PER_S]) == [0, 1]


def test_error_reaches_whoever_asked_and_work_goes_on_even_after_close() -> None:
    async def run() -> int:
        pool = SizeOrderedPool(1, "test")
        with pytest.raises(ZeroDivisionError):
            await pool.run(1, lambda: 1 // 0)
        assert await pool.run(1, lambda: 6) == 6
        pool.close()
        return await pool.run(1, lambda: 7)

    assert asyncio.run(run()) == 7
