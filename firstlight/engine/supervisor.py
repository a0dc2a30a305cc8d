"""Watches the core and replaces it: after a failed step, and when a step does not end. Knows cores, not requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from firstlight.measure.log import log_event

__all__ = ["Supervisor", "Watched"]

POLL_S = 0.1
"""A failed core is noticed within this; it has ended its requests by itself before."""
WINDOW_S = 600.0
"""`max_restarts` is counted over this time."""


class Watched(Protocol):
    """What the supervisor sees of a core."""

    failed: str | None

    @property
    def has_open(self) -> bool:
        """Requests are open."""

    @property
    def last_progress_s(self) -> float:
        """When the last step ended."""

    def abandon(self, message: str) -> None:
        """Ends every open request with an error, although the core's thread is stuck."""


class Supervisor:
    """One task on the engine's loop.

    Args:
        restart: replaces the core that is given and returns the new one; raises when that cannot be done.
        watchdog_s: requests are open and no step ends for this long: the core is wedged; 0: never.
        max_restarts: in WINDOW_S; one more failure is final.
    """

    def __init__(
        self,
        core: Watched,
        restart: Callable[[Watched], Awaitable[Watched]],
        *,
        watchdog_s: float,
        max_restarts: int,
    ) -> None:
        self._core = core
        self._restart = restart
        self._watchdog_s = watchdog_s
        self._max_restarts = max_restarts
        self._restarts_s: deque[float] = deque()
        self._stuck_s = 0.0
        self._seen_s = -1.0
        self.num_restarts = 0
        self.has_given_up = False
        """The core has failed and will not be replaced."""
        self._task = asyncio.create_task(self._watch())

    @property
    def will_restart(self) -> bool:
        """Were the core to fail now, it would be replaced."""
        return self._max_restarts > 0 and not self.has_given_up

    async def close(self) -> None:
        """Stops watching; a restart under way is waited for, because it holds the model's memory. Idempotent."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while not self.has_given_up:
            before_s = asyncio.get_running_loop().time()
            await asyncio.sleep(POLL_S)
            now_s = asyncio.get_running_loop().time()
            if self._core.failed is None and self._is_wedged(min(now_s - before_s, 2 * POLL_S)):
                self._core.abandon(f"no step has ended for {self._stuck_s:.0f} s while requests were open")
            if self._core.failed is not None:
                await self._replace(now_s)

    def _is_wedged(self, elapsed_s: float) -> bool:
        """Counts time in which this loop ran too, so that a process that was stopped for a while is not wedged."""
        if not self._core.has_open or self._core.last_progress_s != self._seen_s:
            self._seen_s, self._stuck_s = self._core.last_progress_s, 0.0
            return False
        self._stuck_s += elapsed_s
        return 0 < self._watchdog_s < self._stuck_s

    async def _replace(self, now_s: float) -> None:
        while self._restarts_s and now_s - self._restarts_s[0] > WINDOW_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self._max_restarts:
            self.has_given_up = True
            log_event("core_given_up", logging.ERROR, reason=self._core.failed, restarts=len(self._restarts_s))
            return
        self._restarts_s.append(now_s)
        log_event("core_restarting", logging.WARNING, reason=self._core.failed)
        replacing = asyncio.ensure_future(self._restart(self._core))
        try:
            self._core = await asyncio.shield(replacing)
        except asyncio.CancelledError:
            await asyncio.gather(replacing, return_exceptions=True)
            raise
        except Exception as error:
            self.has_given_up = True
            log_event("core_given_up", logging.ERROR, reason=self._core.failed, error=repr(error))
            return
        self.num_restarts += 1
        self._stuck_s = 0.0
        log_event("core_restarted", restarts=self.num_restarts)
