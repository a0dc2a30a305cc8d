"""How long threads were ready to run and did not, as Linux counts it. Knows thread ids, not what they do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

__all__ = ["RunDelay", "cpu_ns", "machine_s", "workers"]

_TASKS = Path("/proc/self/task")


AWAY_SHARE = 0.03
"""A thread that was off its core for less of the time was not delayed enough to look further."""
WORKER_SHARE = 0.5
"""Of the CPU time of the busiest native thread: whoever had less does not share its work."""


def cpu_ns() -> dict[int, int]:
    """CPU time of each thread of this process by its number. Empty where the system does not say."""
    found = {}
    with contextlib.suppress(OSError):
        for path in _TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError):  # a thread has ended
                found[int(path.name)] = int((path / "schedstat").read_text().split()[0])
    return found


def workers(python_ids: Iterable[int | None], since: Mapping[int, int]) -> list[int]:
    """The native threads that share the work: all but the given, and but those that ran little since `since`."""
    others = set(python_ids)
    ran = {number: ns - since.get(number, 0) for number, ns in cpu_ns().items() if number not in others}
    most = max(ran.values(), default=0)
    return [number for number, ns in ran.items() if ns > 0 and ns >= WORKER_SHARE * most]


def machine_s(delay_s: float, run_s: float, num_threads: int, *, ran_alone: bool) -> float:
    """What the machine took from a step: the delay of its threads and, where one had to do the work of all because a
    neighbour kept a core busy, the share of the others in what it ran. An upper bound where memory is the limit.
    """
    if not ran_alone:
        return delay_s
    return delay_s + max(0.0, run_s - delay_s) * (1 - 1 / num_threads)


def _at_start(file: int) -> bytes:
    """The file's first bytes, read without giving the interpreter lock up: its next owner may keep it for milliseconds,
    and the step that has just ended is not absorbed yet."""
    if _pread is None:
        return os.pread(file, _READ_BYTES, 0)
    return _buffer.raw[: max(0, _pread(file, _buffer, _READ_BYTES, 0))]


def _locked_pread() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    pread: Callable[..., int] = ctypes.PyDLL(None).pread
    pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t]  # type: ignore[attr-defined]
    pread.restype = ctypes.c_ssize_t  # type: ignore[attr-defined]
    return pread


_READ_BYTES = 96
_pread = _locked_pread()
_buffer = ctypes.create_string_buffer(_READ_BYTES)
"""Shared by all readers: the interpreter lock is kept from the read until it is copied."""


class RunDelay:
    """Reads `schedstat` of a few threads through files that stay open. Use it on one of those threads.

    Where the kernel keeps no such counts, every reading is 0.
    """

    def __init__(self, thread_ids: Iterable[int]) -> None:
        self._files: list[int] = []
        for number in thread_ids:
            with contextlib.suppress(OSError):
                self._files.append(os.open(_TASKS / str(number) / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
        self._waited_ns = 0
        self._wall_s = self._cpu_s = 0.0
        self.restart()

    def restart(self) -> None:
        """What was waited for until now counts no more."""
        self._waited_ns = self._read()
        self._wall_s, self._cpu_s = time.monotonic(), time.thread_time()

    def since_last_s(self) -> float:
        """Seconds of delay since the last call of this or `restart`, at most what the calling thread did not run.

        Threads wait for each other, so one thread's delay is everyone's: the calling thread then sleeps. Where it
        hardly did, the counts are not read. Cost: a microsecond, and about 5 per thread where they are read (in a
        server whose caches the kernels have just swept, three times as much).
        """
        wall_s, cpu_s = time.monotonic(), time.thread_time()
        elapsed_s = wall_s - self._wall_s
        away_s = elapsed_s - (cpu_s - self._cpu_s)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        if away_s < AWAY_SHARE * elapsed_s or not self._files:
            return 0.0
        waited_ns, self._waited_ns = self._waited_ns, self._read()
        return max(0.0, min((self._waited_ns - waited_ns) / 1e9, away_s))

    def close(self) -> None:
        """Closes the files. Idempotent."""
        while self._files:
            os.close(self._files.pop())

    def _read(self) -> int:
        """Nanoseconds that the threads were ready and waited for a CPU, all together."""
        waited_ns = 0
        for file in self._files:
            with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended
                waited_ns += int(_at_start(file).split()[1])
        return waited_ns
