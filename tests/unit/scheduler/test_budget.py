"""What a step may cost the streams in it: promises by priority, and what they are relative to."""

from __future__ import annotations

import copy
import random

import pytest

from firstlight.scheduler import SchedulerLimits, StepLoad, StepTimeModel
from firstlight.scheduler.budget import BATCH, INTERACTIVE, STANDARD, PrefillBudget, promise_of
from firstlight.scheduler.undisturbed import UndisturbedGap


def machine(context_s: float = 0.0) -> StepTimeModel:
    """A step costs 4 ms, a token 1 ms, a token of context `context_s`; known exactly."""
    model = StepTimeModel()
    for rows, num, start in [(1, 1, 0), (1, 64, 0), (8, 1, 500), (2, 1, 2000), (1, 16, 1000), (1, 256, 0)] * 60:
        load = StepLoad()
        for _ in range(rows):
            load.add(start, num)
        model.observe(load, 0.004 + 0.001 * load.tokens + context_s * load.context)
    return model


def budget(model: StepTimeModel, itl_slo_s: float = 0.0) -> PrefillBudget:
    limits = SchedulerLimits(
        max_step_rows=64, max_step_tokens=512, max_model_len=8192, vocab_size=40, itl_slo_s=itl_slo_s
    )
    return PrefillBudget(limits, model)


def streams(num: int, context: int) -> StepLoad:
    load = StepLoad()
    for _ in range(num):
        load.add(context, 1)
    return load


def seconds(model: StepTimeModel, decodes: StepLoad, chunk: int) -> float:
    load = StepLoad(decodes.rows, decodes.tokens, decodes.context, decodes.attended)
    load.add(0, chunk)
    return model.predict_s(load)


@pytest.mark.parametrize("num", [1, 4, 8, 16])
def test_chunk_keeps_the_step_inside_twice_the_undisturbed_one_plus_10_ms(num: int) -> None:
    model = machine()
    one, decodes = budget(model), streams(num, 100)
    one.open(decodes, 1.0)
    chunk = one.chunk(decodes, 0, 4000, is_first=True)
    promised = 2 * model.predict_s(decodes) + 0.010
    assert 0.8 * promised < seconds(model, decodes, chunk) < promised


def test_promise_does_not_grow_with_context_gained_beside_a_prefill() -> None:
    model = machine(context_s=5e-6)
    one, before = budget(model), streams(8, 100)
    one.open(before, 100.0)
    one.close(was_starved=False)
    one.ended(before, model.predict_s(before), model.predict_s(before), 100.0)
    promised = 2 * model.predict_s(before) + 0.010
    for step in range(1, 200):
        now, decodes = 100.0 + step / 50, streams(8, 100 + step)
        one.open(decodes, now)
        chunk = one.chunk(decodes, 0, 4000, is_first=True)
        assert chunk > 0
        assert seconds(model, decodes, chunk) < promised
        one.close(was_starved=False)


def test_promise_tightens_for_interactive_streams_and_relaxes_for_batch() -> None:
    model, decodes = machine(), streams(4, 100)
    chunks = []
    for priority in (INTERACTIVE, STANDARD, BATCH):
        one = budget(model)
        one.open(decodes, 1.0, promise_of(priority))
        chunks.append(one.chunk(decodes, 0, 4000, is_first=True))
    assert chunks[0] < chunks[1] < chunks[2] / 3


def test_promise_of_priorities_beyond_the_named_ones_is_the_nearest() -> None:
    assert promise_of(-7) == promise_of(INTERACTIVE)
    assert promise_of(7) == promise_of(BATCH)


def test_itl_slo_bounds_the_step_itself() -> None:
    model, decodes = machine(), streams(4, 100)
    one = budget(model, itl_slo_s=0.050)
    one.open(decodes, 1.0)
    assert 0.8 * 0.050 < seconds(model, decodes, one.chunk(decodes, 0, 4000, is_first=True)) < 0.050


def test_steps_with_prefill_that_overrun_their_prediction_are_filled_less() -> None:
    model, decodes = machine(), streams(4, 100)
    one = budget(model)
    one.open(decodes, 1.0)
    calm = one.chunk(decodes, 0, 4000, is_first=True)
    for at in range(400):
        mixed = StepLoad(decodes.rows, decodes.tokens, decodes.context, decodes.attended)
        mixed.add(0, 32)
        model.observe(mixed, model.predict_s(mixed) * (1.4 if at % 4 == 0 else 0.95))
    one.open(decodes, 1.0)
    promised = 2 * model.predict_s(decodes) + 0.010
    assert seconds(model, decodes, one.chunk(decodes, 0, 4000, is_first=True)) < promised / 1.06
    assert calm > 0


def test_noise_that_decode_steps_have_too_leaves_steps_as_full() -> None:
    model, rng = machine(), random.Random(1)
    for _ in range(2000):
        load = streams(8, 300)
        if rng.random() < 0.5:
            load.add(0, 32)
        model.observe(load, model.predict_s(load) * rng.choice([0.9, 0.95, 1.0, 1.05, 1.4]))
    assert model.overrun < 0.1


def test_promise_is_about_the_measured_gap_where_the_model_is_wrong() -> None:
    model = machine()
    one, decodes = budget(model), streams(8, 100)
    gap_s = 2 * model.predict_s(decodes)
    for at in range(20):
        slow = 10 if at % 5 == 0 else 1
        one.ended(decodes, slow * gap_s, slow * gap_s - 0.001, at / 50)
    one.open(decodes, 0.4)
    chunk = one.chunk(decodes, 0, 4000, is_first=True)
    promised_s = 2 * gap_s + 0.010 - 0.001
    assert 0.85 * promised_s < seconds(model, decodes, chunk) < promised_s


def test_promise_where_streams_have_left_follows_their_number() -> None:
    model = machine()
    one, before, after = budget(model), streams(8, 100), streams(2, 100)
    for at in range(20):
        one.ended(before, model.predict_s(before), model.predict_s(before), at / 50)
    one.open(after, 0.4)
    promised_s = 2 * model.predict_s(after) + 0.010
    assert 0.8 * promised_s < seconds(model, after, one.chunk(after, 0, 4000, is_first=True)) < promised_s


@pytest.mark.parametrize("itl_slo_s", [0.0, 0.05])
def test_streams_whose_time_goes_elsewhere_than_into_steps_leave_room_for_prefill(itl_slo_s: float) -> None:
    model = machine()
    one, before, after = budget(model, itl_slo_s), streams(16, 100), streams(1, 100)
    for at in range(20):
        one.ended(before, 0.2, model.predict_s(before), at / 5)
    one.open(after, 4.0)
    assert one.chunk(after, 0, 4000, is_first=True) >= 10


def test_gap_asked_for_at_every_step_is_the_one_asked_for_at_last() -> None:
    """What was worked out before the model learned more, or before another gap was measured, is not told again."""
    rng = random.Random(11)
    model = machine(context_s=5e-6)
    often, once = UndisturbedGap(model), UndisturbedGap(model)
    for _ in range(200):
        load = streams(rng.randrange(1, 9), rng.randrange(1, 3000))
        run_s = model.predict_s(load) * rng.uniform(0.8, 1.6)
        model.observe(load, run_s)
        if rng.random() < 0.3:
            for gap in (often, once):
                gap.note(load, run_s + 0.001, run_s, 0.0)
        asked = often.gap_s(load, 0.0)
        if rng.random() < 0.1:
            fresh = copy.deepcopy(once)
            assert asked == pytest.approx(fresh.gap_s(load, 0.0), rel=1e-9)
