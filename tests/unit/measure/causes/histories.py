"""Stamps of requests that never ran, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from firstlight.measure.causes import Stamps, StepRecord, StepShare, Trace
from firstlight.measure.causes.book import Wait

PREDICTED = (0.004, 0.0005, 0.0002, 1e-7, 1e-8)


def step(start_s: float, end_s: float, *shares: StepShare, step_id: int = 1, **more: Any) -> StepRecord:
    tokens = sum(share.num_tokens for share in shares)
    known: dict[str, Any] = {"predicted_s": end_s - start_s, "coefficients": PREDICTED}
    return StepRecord(
        step_id=step_id,
        start_s=start_s,
        end_s=end_s,
        rows=len(shares),
        tokens=tokens,
        context=tokens,
        attended=tokens,
        plan_s=0.0,
        run_s=end_s - start_s,
        absorb_s=0.0,
        shares=shares,
        **(known | more),
    )


def trace(num_prompt: int, submitted_s: float, *steps: StepRecord, end_s: float | None, taken_s: float = 0.0) -> Trace:
    made = Trace("me", num_prompt, submitted_s)
    made.taken_s = max(submitted_s, taken_s)
    made.steps = list(steps)
    made.end_s = end_s
    return made


times = st.floats(0, 10, allow_nan=False)
shares = st.builds(StepShare, st.sampled_from(["a", "b"]), st.integers(0, 99), st.integers(1, 64), st.booleans())


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any order of times, sensible or not: clocks are read on several threads."""
    made = Trace("me", draw(st.integers(1, 50)), draw(times))
    made.taken_s = draw(st.none() | times)
    made.end_s = draw(st.none() | times)
    pairs = [sorted(draw(st.tuples(times, times))) for _ in range(draw(st.integers(0, 4)))]
    made.waits = [Wait(a, b, draw(st.sampled_from(["kv", "order", "prefix", "load"]))) for a, b in sorted(pairs)]
    for start_s, end_s in sorted(sorted(draw(st.tuples(times, times))) for _ in range(draw(st.integers(0, 6)))):
        mine = StepShare("me", draw(st.integers(0, 60)), draw(st.integers(1, 30)), draw(st.booleans()))
        others = draw(st.lists(shares, max_size=3))
        made.steps.append(step(start_s, end_s, *others, mine, machine_s=draw(st.just(0.0) | times)))
    return made


@st.composite
def stamps(draw: st.DrawFn) -> Stamps:
    arrival_s = draw(times)
    return Stamps(
        arrival_s=arrival_s,
        end_s=arrival_s + draw(times),
        stages=[(cause, draw(times)) for cause in ("receive", "parse", "template", "tokenise")],
        first_ready_s=draw(st.none() | times),
        first_left_s=draw(st.none() | times),
        last_ready_s=draw(st.none() | times),
        blocked=sorted((min(pair), max(pair)) for pair in draw(st.lists(st.tuples(times, times), max_size=3))),
    )
