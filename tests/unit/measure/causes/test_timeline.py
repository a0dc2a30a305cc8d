from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.measure.causes import CAUSES, Stamps, StepShare, Trace, timeline, totals_s
from firstlight.measure.causes.book import Wait
from tests.unit.measure.causes.histories import stamps, step, times, trace, traces

MS = 1e-3


def shown_ms(given: Stamps, of: Trace | None) -> dict[str, float]:
    return {cause: round(seconds * 1e3, 6) for cause, seconds in totals_s(timeline(given, of)).items()}


@settings(max_examples=400, deadline=None)
@given(stamps(), st.none() | traces())
def test_timeline_covers_the_whole_life_once(given: Stamps, of: Trace | None) -> None:
    spans = timeline(given, of)
    assert all(before.end_s == after.start_s for before, after in pairwise(spans))
    assert all(span.end_s > span.start_s and span.cause in CAUSES for span in spans)
    assert all(before.cause != after.cause for before, after in pairwise(spans))
    if given.end_s > given.arrival_s:
        assert (spans[0].start_s, spans[-1].end_s) == (given.arrival_s, given.end_s)
    assert sum(totals_s(spans).values()) == pytest.approx(given.end_s - given.arrival_s, abs=1e-4)


@settings(max_examples=200, deadline=None)
@given(stamps(), traces(), times)
def test_timeline_names_the_client_wherever_a_write_was_blocked(given: Stamps, of: Trace, moment: float) -> None:
    spans = timeline(given, of)
    causes = [span.cause for span in spans if span.start_s < moment < span.end_s]
    if causes:
        assert (causes == ["client_slow"]) == any(start < moment < end for start, end in given.blocked)


def test_timeline_of_a_request_that_never_came_to_the_core_ends_with_its_last_stage() -> None:
    given = Stamps(arrival_s=1.0, end_s=1.005, stages=[("receive", 1.002), ("parse", 1.003)])
    assert shown_ms(given, None) == {"receive": 2.0, "parse": 3.0}


def test_timeline_of_a_stream_goes_from_stage_to_stage() -> None:
    mine = [
        step(0.010, 0.030, StepShare("me", 0, 8, True)),
        step(0.031, 0.040, StepShare("me", 8, 1, False)),
        step(0.040, 0.050, StepShare("me", 9, 1, False)),
    ]
    given = Stamps(
        arrival_s=0.0,
        end_s=0.056,
        stages=[("receive", 0.001), ("tokenise", 0.004)],
        first_ready_s=0.0305,
        first_left_s=0.0310,
        last_ready_s=0.052,
    )
    assert shown_ms(given, trace(8, 0.005, *mine, end_s=0.050, taken_s=0.007)) == {
        "receive": 1.0,
        "tokenise": 3.0,
        "submit": 1.0,
        "queue.step": 5.0,
        "prefill.own": 20.0,
        "detokenise": 2.5,
        "flush": 4.5,
        "decode.own": 19.0,
    }


def test_timeline_splits_a_step_by_what_each_row_costs() -> None:
    """4 ms for the step, 0.5 ms a row, 0.2 ms a token: alone 4.7 ms, a stream beside it 0.7 ms, a chunk of 50 10.5."""
    rows = (StepShare("me", 8, 1, False), StepShare("a", 5, 1, False), StepShare("b", 0, 50, True))
    given = Stamps(arrival_s=0.0, end_s=0.0159 * 2)
    flat = (0.004, 0.0005, 0.0002, 0.0, 0.0)
    one = step(0.0, 0.0159 * 2, *rows, coefficients=flat)
    got = shown_ms(given, trace(8, 0.0, one, end_s=0.0159 * 2))
    assert got == {"decode.own": 9.4, "decode.shared": 1.4, "decode.chunks": 21.0}


def test_timeline_takes_the_machines_time_out_of_a_step_first() -> None:
    one = step(0.0, 0.020, StepShare("me", 8, 1, False), StepShare("b", 0, 50, True), machine_s=0.012)
    got = shown_ms(Stamps(arrival_s=0.0, end_s=0.020), trace(8, 0.0, one, end_s=0.020))
    assert got["machine"] == 12.0
    assert got["decode.own"] + got["decode.chunks"] == pytest.approx(8.0)


def test_timeline_says_why_a_request_was_in_the_queue() -> None:
    of = trace(8, 0.0, step(0.100, 0.110, StepShare("me", 0, 8, True)), end_s=0.110, taken_s=0.010)
    of.waits = [Wait(0.0, 0.050, "order"), Wait(0.050, 0.090, "kv"), Wait(0.060, 0.070, "prefix")]
    assert shown_ms(Stamps(arrival_s=0.0, end_s=0.110), of) == {
        "queue.step": 10.0,
        "queue.order": 40.0,
        "queue.kv": 40.0,
        "queue.prefix": 10.0,
        "prefill.own": 10.0,
    }


def test_timeline_counts_what_is_computed_again_as_preempted() -> None:
    steps = [
        step(0.000, 0.010, StepShare("me", 0, 8, True)),
        step(0.010, 0.020, StepShare("me", 8, 1, False)),
        step(0.050, 0.060, StepShare("me", 4, 6, True)),  # a block of 4 was still cached
        step(0.060, 0.070, StepShare("me", 10, 1, False)),
    ]
    got = shown_ms(Stamps(arrival_s=0.0, end_s=0.070), trace(8, 0.0, *steps, end_s=0.070))
    assert got == {"prefill.own": 10.0, "decode.own": 20.0, "preempted": 40.0}


def test_timeline_of_drafts_that_were_rejected_is_no_preemption() -> None:
    steps = [
        step(0.000, 0.010, StepShare("me", 0, 8, True)),
        step(0.010, 0.020, StepShare("me", 8, 4, False)),
        step(0.020, 0.030, StepShare("me", 9, 4, False)),
    ]
    got = shown_ms(Stamps(arrival_s=0.0, end_s=0.030), trace(8, 0.0, *steps, end_s=0.030))
    assert got == {"prefill.own": 10.0, "decode.own": 20.0}


def test_timeline_waits_for_others_while_its_prompt_gets_no_chunk() -> None:
    steps = [
        step(0.000, 0.010, StepShare("me", 0, 4, True)),
        step(0.030, 0.040, StepShare("me", 4, 4, True)),
    ]
    got = shown_ms(Stamps(arrival_s=0.0, end_s=0.040), trace(8, 0.0, *steps, end_s=0.040))
    assert got == {"prefill.own": 20.0, "prefill.others": 20.0}
