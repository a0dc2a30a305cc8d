"""What the core notes of every step: predicted and measured time, whose rows were in it, why the queue was not.

Knows stamps and what the scheduler says of its plan; decides nothing. Used on the core's thread.
"""

from __future__ import annotations

import threading

import msgspec

from firstlight.measure.causes import StepRecord, StepShare, TraceBook
from firstlight.measure.causes.run_delay import RunDelay, cpu_ns, machine_s, workers
from firstlight.scheduler import Coefficients, Scheduler, StepLoad
from firstlight.types import StepResult

__all__ = ["PlannedRecord", "StepRecorder"]

IDLE_S = 0.001
"""Between steps that follow each other passes less."""


class PlannedRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of a step before it runs."""

    start_s: float
    planned_s: float
    load: StepLoad
    predicted_s: float
    coefficients: Coefficients
    shares: tuple[StepShare, ...]
    queue_reason: str
    held: list[tuple[str, str]]
    used_blocks: int


class StepRecorder:
    """Writes step records and the queue's waits into a trace book. `begin`, then `planned` before the run, `ended`."""

    def __init__(self, scheduler: Scheduler, traces: TraceBook, num_threads: int) -> None:
        self._scheduler = scheduler
        self._traces = traces
        self._num_threads = num_threads
        self._run_delay = RunDelay([])
        self._cpu_ns: dict[int, int] = {}

    def before_warm_up(self) -> None:
        """The native threads that run from now until `watch_threads` are those that compute steps."""
        self._cpu_ns = cpu_ns()

    def watch_threads(self) -> None:
        """From now on counts what the calling thread and those that compute had to wait for a core."""
        python_ids = [thread.native_id for thread in threading.enumerate()]
        self._run_delay = RunDelay([threading.get_native_id(), *workers(python_ids, self._cpu_ns)])

    def close(self) -> None:
        """Closes what `watch_threads` opened. Idempotent."""
        self._run_delay.close()

    def begin(self, start_s: float, last_end_s: float) -> None:
        """A step begins; what threads waited for while nothing ran is no step's."""
        if start_s - last_end_s > IDLE_S:
            self._run_delay.restart()

    def waited(self, start_s: float, end_s: float) -> None:
        """There was no step: a batch fills."""
        self._traces.waited(start_s, end_s, "batch")

    def planned(self, start_s: float, planned_s: float) -> PlannedRecord:
        """Between `plan` and `absorb`: `absorb` learns from the step, so its prediction is taken here."""
        scheduler = self._scheduler
        load, step_time = scheduler.planned_load, scheduler.step_time
        queue_reason, held = scheduler.why_waiting()
        return PlannedRecord(
            start_s=start_s,
            planned_s=planned_s,
            load=load,
            predicted_s=step_time.predict_s(load),
            coefficients=step_time.coefficients,
            shares=scheduler.planned_shares(),
            queue_reason=queue_reason,
            held=held,
            used_blocks=scheduler.cache.num_blocks - scheduler.cache.num_free,
        )

    def ended(self, result: StepResult, record: PlannedRecord, *, ran_s: float, end_s: float) -> None:
        """The step ran until `ran_s`, and was absorbed at `end_s`."""
        load = record.load
        delay_s = min(self._run_delay.since_last_s(), end_s - record.start_s)
        if record.queue_reason:
            self._traces.waited(record.start_s, end_s, record.queue_reason, record.held)
        self._traces.stepped(
            StepRecord(
                step_id=result.step_id,
                start_s=record.start_s,
                end_s=end_s,
                rows=load.rows,
                tokens=load.tokens,
                context=load.context,
                attended=load.attended,
                predicted_s=record.predicted_s,
                plan_s=record.planned_s - record.start_s,
                run_s=result.run_s,
                absorb_s=end_s - ran_s,
                shares=record.shares,
                coefficients=record.coefficients,
                machine_s=machine_s(delay_s, result.run_s, self._num_threads, ran_alone=result.ran_alone),
                waiting=self._scheduler.num_waiting,
                queue_reason=record.queue_reason,
                used_blocks=record.used_blocks,
                op_times_s=result.op_times_s,
            )
        )
