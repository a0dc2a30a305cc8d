"""Steps and requests as a trace in Chrome's JSON form, which Perfetto opens. Pure functions.

Source: the Trace Event Format; only complete events ("X"), counters ("C") and metadata ("M") are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firstlight.measure.causes.finished import FinishedRequest
from firstlight.measure.causes.steps import StepRecord
from firstlight.measure.causes.view import request_view

__all__ = ["chrome_trace"]

STEPS, REQUESTS = 1, 2
"""Process numbers: the two groups of tracks."""
OPS_TRACK = 2
MAX_REQUEST_TRACKS = 512


def chrome_trace(steps: Sequence[StepRecord], requests: Sequence[FinishedRequest], zero_s: float) -> dict[str, Any]:
    """The trace. Times in microseconds from `zero_s`; `firstlight.requests` holds what `firstlight explain` reads."""
    events: list[dict[str, Any]] = [_named(STEPS, 0, "process_name", "steps")]
    events.append(_named(REQUESTS, 0, "process_name", "requests"))
    events.append(_named(STEPS, OPS_TRACK, "thread_name", "ops: the time of each kind, laid end to end"))
    for step in steps:
        events += _step_events(step, zero_s)
    for track, request in enumerate(requests[:MAX_REQUEST_TRACKS], 1):
        events.append(_named(REQUESTS, track, "thread_name", request.answer_id))
        for span in request.spans():
            length_s = span.end_s - span.start_s
            events.append(_complete(REQUESTS, track, span.cause, span.start_s - zero_s, length_s, {}))
    views = [request_view(request, with_spans=True) for request in requests[:MAX_REQUEST_TRACKS]]
    return {"traceEvents": events, "displayTimeUnit": "ms", "firstlight": {"requests": views}}


def _step_events(step: StepRecord, zero_s: float) -> list[dict[str, Any]]:
    start_s = step.start_s - zero_s
    prefill = sum(share.num_tokens for share in step.shares if share.is_prefill)
    shown = {
        "step": step.step_id,
        "rows": step.rows,
        "tokens": step.tokens,
        "prefill_tokens": prefill,
        "predicted_ms": round(step.predicted_s * 1e3, 3),
        "machine_ms": round(step.machine_s * 1e3, 3),
        "waiting": step.waiting,
        "queue_reason": step.queue_reason,
    }
    parts = (("plan", step.plan_s), ("run", step.run_s), ("absorb", step.absorb_s))
    events = [_complete(STEPS, 1, f"{step.rows} rows, {step.tokens} tokens", start_s, step.end_s - step.start_s, shown)]
    ends_s = (step.plan_s, step.end_s - step.start_s - step.absorb_s, step.end_s - step.start_s)
    for (name, seconds), end_s in zip(parts, ends_s, strict=True):
        begin_s = max(0.0, end_s - seconds)
        events.append(_complete(STEPS, 1, name, start_s + begin_s, max(0.0, end_s - begin_s), {}))
    op_s = start_s + step.plan_s
    for name, seconds in (step.op_times_s or {}).items():
        if seconds > 0:
            events.append(_complete(STEPS, OPS_TRACK, name, op_s, seconds, {}) | {"cat": "op"})
            op_s += seconds
    events.append(_counter("tokens", start_s, {"prefill": prefill, "decode": step.tokens - prefill}))
    events.append(_counter("waiting", start_s, {"requests": step.waiting}))
    events.append(_counter("KV blocks used", start_s, {"blocks": step.used_blocks}))
    return events


def _complete(pid: int, tid: int, name: str, start_s: float, length_s: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": "step" if pid == STEPS else "cause",
        "ts": round(start_s * 1e6, 3),
        "dur": round(length_s * 1e6, 3),
        "args": args,
    }


def _counter(name: str, at_s: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": STEPS, "tid": 0, "name": name, "ts": round(at_s * 1e6, 3), "args": values}


def _named(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
