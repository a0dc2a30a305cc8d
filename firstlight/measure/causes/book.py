"""What the core notes of each open request: when it was taken, why it waited, the steps it was in.

Written by the core's thread, but for `open`; a trace may be read from any thread, best once its request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from firstlight.measure.causes.steps import StepRecord

__all__ = ["NUM_STEP_RECORDS", "Trace", "TraceBook"]

NUM_STEP_RECORDS = 2048
NUM_QUEUE_STRETCHES = 8192
"""Stretches of time with one reason to wait; a stretch is at least a step."""
MAX_WAITS = 512
"""Stretches kept per request."""


class Wait:
    """A stretch of time in which the queue did not move for one reason."""

    __slots__ = ("end_s", "reason", "start_s")

    def __init__(self, start_s: float, end_s: float, reason: str) -> None:
        self.start_s = start_s
        self.end_s = end_s
        self.reason = reason


class Trace:
    """The stamps of one sequence in the core, on its monotonic clock."""

    __slots__ = ("cached_tokens", "core_id", "end_s", "num_prompt", "steps", "submitted_s", "taken_s", "waits")

    def __init__(self, core_id: str, num_prompt: int, submitted_s: float) -> None:
        self.core_id = core_id
        self.num_prompt = num_prompt
        self.submitted_s = submitted_s
        self.taken_s: float | None = None
        """When the core took it out of its inbox, between two steps."""
        self.waits: list[Wait] = []
        """Why it was in the queue; gaps have no known reason."""
        self.steps: list[StepRecord] = []
        """The steps that computed something of it."""
        self.cached_tokens = 0
        self.end_s: float | None = None


class TraceBook:
    """Open traces by the core's request id, the ring of recent steps, and the log of why the queue waited."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=NUM_STEP_RECORDS)
        self.run_s = self.predicted_s = 0.0
        """What all steps took on the backend, and what they were predicted to take."""
        self._open: dict[str, Trace] = {}
        self._queue: deque[Wait] = deque(maxlen=NUM_QUEUE_STRETCHES)
        self._held: dict[str, list[Wait]] = {}

    def open(self, core_id: str, num_prompt: int, submitted_s: float) -> Trace:
        """A trace for a request that is about to be submitted. Any thread."""
        trace = self._open[core_id] = Trace(core_id, num_prompt, submitted_s)
        return trace

    def forget(self, core_id: str) -> None:
        """The request was refused. Any thread."""
        self._open.pop(core_id, None)

    def taken(self, core_id: str, now_s: float) -> None:
        """The core has put the request into the queue."""
        if (trace := self._open.get(core_id)) is not None:
            trace.taken_s = now_s

    def waited(self, start_s: float, end_s: float, reason: str, held: Iterable[tuple[str, str]] = ()) -> None:
        """The queue waited for `reason`; those in `held` waited for reasons of their own, "prefix" or "load"."""
        _extend(self._queue, start_s, end_s, reason)
        for core_id, own in held:
            _extend(self._held.setdefault(core_id, []), start_s, end_s, own)

    def stepped(self, record: StepRecord) -> None:
        """A step has ended."""
        self.steps.append(record)
        self.run_s += record.run_s
        self.predicted_s += record.predicted_s
        for share in record.shares:
            trace = self._open.get(share.request_id)
            if trace is None:
                continue
            if not trace.steps:
                trace.cached_tokens = share.start
                trace.waits = self._waits_of(trace, record.start_s)
            trace.steps.append(record)

    def ended(self, core_ids: Iterable[str], now_s: float) -> None:
        """The requests have had their last event."""
        for core_id in core_ids:
            trace = self._open.pop(core_id, None)
            if trace is not None:
                if not trace.steps:
                    trace.waits = self._waits_of(trace, now_s)
                trace.end_s = now_s

    def _waits_of(self, trace: Trace, until_s: float) -> list[Wait]:
        """Why it waited, oldest first: its own reasons, and the queue's where it has none."""
        waits: list[Wait] = []
        for wait in reversed(self._queue):
            if wait.end_s <= trace.submitted_s or len(waits) >= MAX_WAITS:
                break
            if wait.start_s < until_s:
                waits.append(Wait(wait.start_s, min(wait.end_s, until_s), wait.reason))
        waits.reverse()
        return waits + self._held.pop(trace.core_id, [])


def _extend(waits: deque[Wait] | list[Wait], start_s: float, end_s: float, reason: str) -> None:
    """Lengthens the last stretch where it goes on, or begins another."""
    if waits and waits[-1].reason == reason and start_s - waits[-1].end_s < 1e-3:
        waits[-1].end_s = end_s
    else:
        waits.append(Wait(start_s, end_s, reason))
