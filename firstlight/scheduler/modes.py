"""When requests may join: at any step, or only as a batch that then runs to its last request's end."""

from __future__ import annotations

from firstlight.scheduler.limits import SchedulerLimits

__all__ = ["BatchGate"]

DEFAULT_WAIT_S = {"static": 2.0, "dynamic": 0.05}


class BatchGate:
    """Says how many waiting requests may start now. `continuous`: any number, always.

    `static` and `dynamic` start a batch of at most `batch_size` when so many wait, or when the oldest has waited
    `batch_wait_s`, and start nothing more until all of it has ended. They differ in how long they insist on a full
    batch: static 2 s, dynamic 50 ms, unless the operator says otherwise.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._is_open = limits.mode == "continuous"
        self._size = min(limits.batch_size, limits.max_step_rows)
        self._wait_s = limits.batch_wait_s or DEFAULT_WAIT_S.get(limits.mode, 0.0)
        self._left = 0
        self.wake_at_s: float | None = None
        """When a batch starts that waits to fill now; None where none does."""

    def open(self, now_s: float, num_new: int, oldest_s: float | None, *, is_busy: bool) -> None:
        """Before a step: `num_new` requests wait that never ran, `is_busy` while any of the last batch is open."""
        self.wake_at_s = None
        if self._is_open or is_busy:
            return
        self._left = 0
        if num_new == 0 or oldest_s is None:
            return
        if num_new >= self._size or now_s >= oldest_s + self._wait_s:
            self._left = min(self._size, num_new)
        else:
            self.wake_at_s = oldest_s + self._wait_s

    @property
    def has_room(self) -> bool:
        """One more request may start."""
        return self._is_open or self._left > 0

    def started(self) -> None:
        """A waiting request that never ran has been admitted."""
        if not self._is_open:
            self._left -= 1
