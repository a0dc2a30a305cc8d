"""How long threads were ready to run and did not, as Linux counts it. Knows thread ids, not what they do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["RunDelay", "machine_s", "threads_but"]

_TASKS = Path("/proc/self/task")


def threads_but(python_ids: Iterable[int | None]) -> list[int]:
    """Threads of this process that are none of the given: the native ones. Empty where the system does not say."""
    others = {str(number) for number in python_ids}
    with contextlib.suppress(OSError):
        return [int(path.name) for path in _TASKS.iterdir() if path.name not in others]
    return []


def machine_s(delay_s: float, run_s: float, num_threads: int, *, ran_alone: bool) -> float:
    """What the machine took from a step: the delay of its threads and, where one had to do the work of all because a
    neighbour kept a core busy, the share of the others in what it ran. An upper bound where memory is the limit.
    """
    if not ran_alone:
        return delay_s
    return delay_s + max(0.0, run_s - delay_s) * (1 - 1 / num_threads)


class RunDelay:
    """Reads `schedstat` of a few threads through files that stay open. Use it on one thread.

    Where the kernel keeps no such counts, every reading is 0.
    """

    def __init__(self, thread_ids: Iterable[int]) -> None:
        self._files: list[int] = []
        for number in thread_ids:
            with contextlib.suppress(OSError):
                self._files.append(os.open(_TASKS / str(number) / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
        self._last = self._read()

    def since_last_s(self, elapsed_s: float) -> float:
        """Seconds of delay since the last call, out of the `elapsed_s` that passed meanwhile.

        Threads wait for each other, so one thread's delay is everyone's; but what the busiest thread computed in was no
        delay. Cost: about 2 microseconds per thread.
        """
        now, before = self._read(), self._last
        self._last = now
        if not now or len(now) != len(before):
            return 0.0
        busiest_s = max(n[0] - b[0] for n, b in zip(now, before, strict=True)) / 1e9
        delayed_s = sum(n[1] - b[1] for n, b in zip(now, before, strict=True)) / 1e9
        return max(0.0, min(delayed_s, elapsed_s - busiest_s))

    def close(self) -> None:
        """Closes the files. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _read(self) -> list[tuple[int, int]]:
        """(nanoseconds on a CPU, nanoseconds waiting for one) per thread."""
        counts = []
        for file in self._files:
            try:
                ran, waited, _ = os.pread(file, 96, 0).split()
            except (OSError, ValueError):  # the thread has ended
                continue
            counts.append((int(ran), int(waited)))
        return counts
