"""How long a request that came now would wait. Knows sums over the queue and the step-time model; no requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from firstlight.scheduler.steptime import StepLoad, StepTimeModel

__all__ = ["Backlog", "wait_s"]

STRETCH_BESIDE_STREAMS = 2.0
"""Streams are promised at most about twice their own step, so prefill gets about every second millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The work that is open: `mean_*` per open request, `most_running` how many of them fit rows and blocks."""

    prefill_tokens: int
    num_open: int
    num_streams: int
    most_running: int
    mean_tokens: float
    mean_output: float


def wait_s(backlog: Backlog, step_time: StepTimeModel) -> float:
    """Every prompt ahead is computed, and as many requests end as are too many to run together."""
    stretch = STRETCH_BESIDE_STREAMS if backlog.num_streams else 1.0
    mean_prompt = math.ceil(backlog.prefill_tokens / max(1, backlog.num_open))
    prefill_s = backlog.num_open * step_time.prefill_s(0, mean_prompt) * stretch
    too_many = max(0, backlog.num_open + 1 - backlog.most_running)
    rows = min(backlog.most_running, backlog.num_open)
    context = round(rows * (backlog.mean_tokens + backlog.mean_output / 2))
    step_s = step_time.predict_s(StepLoad(rows=rows, tokens=rows, context=context, attended=context))
    return prefill_s + too_many / backlog.most_running * backlog.mean_output * step_s
