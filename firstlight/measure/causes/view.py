"""A finished request, and a step, as JSON shows them: milliseconds from the request's arrival. Pure functions."""

from __future__ import annotations

import bisect
from typing import Any

from firstlight.measure.causes.advice import verdict
from firstlight.measure.causes.finished import FinishedRequest
from firstlight.measure.causes.steps import StepRecord
from firstlight.measure.causes.timeline import Span, totals_s

__all__ = ["request_view", "step_view"]

MAX_BESIDE = 8
NUM_CELLS = 64
_MISS = ("first_token", "reason")


def request_view(request: FinishedRequest, *, with_spans: bool) -> dict[str, Any]:
    """Counts, totals per cause, the verdict; every span where asked. Cost: some microseconds per step it was in."""
    arrival_s = request.stamps.arrival_s
    spans = request.spans()
    first_s = arrival_s + (request.e2e_s if request.ttft_s is None else request.ttft_s)
    view: dict[str, Any] = {
        "id": request.answer_id,
        "request_id": request.request_id,
        "route": request.route,
        "status": request.status,
        "finish": request.finish,
        "stream": request.is_stream,
        "arrival_unix_s": request.arrival_unix_s,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "cache_miss": None if request.cache_miss is None else dict(zip(_MISS, request.cache_miss, strict=True)),
        "ttft_ms": None if request.ttft_s is None else _ms(request.ttft_s),
        "e2e_ms": _ms(request.e2e_s),
        "delivery_ms": _ms(request.delivery_s),
        "longest_gap_ms": _ms(request.longest_gap_s),
        "totals_ms": _shown(totals_s(spans)),
        "ttft_totals_ms": _shown(totals_s(_clipped(spans, arrival_s, first_s))),
        "gap_totals_ms": {},
        "beside": _beside(request),
        "bar": _bar(spans),
    }
    if request.gap_end_s is not None:
        gap = _clipped(spans, request.gap_end_s - request.longest_gap_s, request.gap_end_s)
        view["gap_totals_ms"] = _shown(totals_s(gap))
    view["verdict"] = verdict(view)
    if with_spans:
        view["spans"] = [[s.cause, _ms(s.start_s - arrival_s), _ms(s.end_s - arrival_s)] for s in spans]
    return view


def step_view(step: StepRecord, now_s: float) -> dict[str, Any]:
    """One step; `age_ms` is how long ago it ended."""
    prefill = sum(share.num_tokens for share in step.shares if share.is_prefill)
    return {
        "step": step.step_id,
        "age_ms": _ms(now_s - step.end_s),
        "ms": _ms(step.end_s - step.start_s),
        "run_ms": _ms(step.run_s),
        "predicted_ms": _ms(step.predicted_s),
        "plan_ms": _ms(step.plan_s),
        "absorb_ms": _ms(step.absorb_s),
        "machine_ms": _ms(step.machine_s),
        "rows": step.rows,
        "tokens": step.tokens,
        "prefill_tokens": prefill,
        "decode_tokens": step.tokens - prefill,
        "waiting": step.waiting,
        "queue_reason": step.queue_reason or None,
        "used_blocks": step.used_blocks,
        "op_ms": None if step.op_times_s is None else _shown(step.op_times_s),
        "requests": [
            [share.request_id.rpartition("#")[0], share.start, share.num_tokens, share.is_prefill]
            for share in step.shares
        ],
    }


def _beside(request: FinishedRequest) -> list[dict[str, Any]]:
    """The other requests in its steps, those first that added most tokens."""
    trace = request.trace
    found: dict[str, dict[str, Any]] = {}
    for step in trace.steps if trace is not None else ():
        for share in step.shares:
            name = share.request_id.rpartition("#")[0]
            if name == request.answer_id:
                continue
            other = found.setdefault(name, {"id": name, "steps": 0, "prefill_tokens": 0, "decode_tokens": 0})
            other["steps"] += 1
            other["prefill_tokens" if share.is_prefill else "decode_tokens"] += share.num_tokens
    ranked = sorted(found.values(), key=lambda o: (o["prefill_tokens"] + o["decode_tokens"], o["id"]), reverse=True)
    return ranked[:MAX_BESIDE]


def _bar(spans: list[Span]) -> list[list[Any]]:
    """The life in NUM_CELLS cells, each with the cause that fills most of it, as runs of [cause, cells]."""
    runs: list[list[Any]] = []
    if not spans:
        return runs
    start_s, cell_s = spans[0].start_s, (spans[-1].end_s - spans[0].start_s) / NUM_CELLS
    at = 0
    for cell in range(NUM_CELLS):
        low_s, high_s = start_s + cell * cell_s, start_s + (cell + 1) * cell_s
        while at < len(spans) - 1 and spans[at].end_s <= low_s:
            at += 1
        end = bisect.bisect_left(spans, high_s, lo=at, key=lambda span: span.start_s)
        totals = totals_s(_clipped(spans[at:end], low_s, high_s))
        cause = max(totals, key=lambda name: totals[name], default=spans[at].cause)
        if runs and runs[-1][0] == cause:
            runs[-1][1] += 1
        else:
            runs.append([cause, 1])
    return runs


def _clipped(spans: list[Span], start_s: float, end_s: float) -> list[Span]:
    return [
        Span(s.cause, max(s.start_s, start_s), min(s.end_s, end_s))
        for s in spans
        if s.end_s > start_s and s.start_s < end_s
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _shown(totals: dict[str, float]) -> dict[str, float]:
    return {cause: _ms(seconds) for cause, seconds in totals.items()}
