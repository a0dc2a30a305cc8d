from __future__ import annotations

import random
from dataclasses import replace

import pytest

from firstlight.scheduler import Coefficients, StepLoad, StepTimeModel

TRUE_S = Coefficients(3e-3, 4e-4, 9e-4, 1e-6, 3e-8)


def true_s(load: StepLoad) -> float:
    c = TRUE_S
    fixed = c.step_s + c.row_s * load.rows + c.token_s * load.tokens
    return fixed + c.context_s * load.context + c.pair_s * load.attended


def decode_load(rng: random.Random) -> StepLoad:
    load = StepLoad()
    for _ in range(rng.choice([1, 1, 4, 8, 16])):
        load.add(rng.randrange(10, 2000), 1)
    return load


def prefill_load(rng: random.Random) -> StepLoad:
    load = decode_load(rng) if rng.random() < 0.5 else StepLoad()
    load.add(rng.randrange(2000), rng.randrange(1, 512))
    return load


def taught(rng: random.Random, num: int, noise: float = 0.05, outliers: float = 0.0) -> StepTimeModel:
    model = StepTimeModel()
    for _ in range(num):
        load = rng.choice([decode_load, prefill_load])(rng)
        slow = 10 if rng.random() < outliers else 1
        model.observe(load, true_s(load) * rng.uniform(1 - noise, 1 + noise) * slow)
    return model


def worst_error(model: StepTimeModel, rng: random.Random) -> float:
    loads = [decode_load(rng) for _ in range(50)] + [prefill_load(rng) for _ in range(50)]
    return max(abs(model.predict_s(load) / true_s(load) - 1) for load in loads)


@pytest.mark.parametrize("seed", range(5))
def test_steptime_after_60_steps_predicts_every_kind_of_step(seed: int) -> None:
    rng = random.Random(seed)
    assert worst_error(taught(rng, 60), rng) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_steptime_steps_ten_times_too_slow_now_and_then_hardly_matter(seed: int) -> None:
    rng = random.Random(seed)
    assert worst_error(taught(rng, 300, outliers=0.05), rng) < 0.35


def test_steptime_long_decode_phase_does_not_forget_prefill() -> None:
    rng = random.Random(1)
    model = taught(rng, 100)
    for _ in range(5000):
        load = decode_load(rng)
        model.observe(load, true_s(load) * rng.uniform(0.95, 1.05))
    prefill = StepLoad()
    prefill.add(0, 512)
    assert model.predict_s(prefill) == pytest.approx(true_s(prefill), rel=0.15)


@pytest.mark.parametrize("factor", [0.02, 1, 50])
def test_steptime_first_step_ten_times_too_slow_is_forgotten_on_any_machine(factor: float) -> None:
    rng = random.Random(5)
    model = StepTimeModel()
    for i in range(60):
        load = rng.choice([decode_load, prefill_load])(rng)
        model.observe(load, factor * true_s(load) * (10 if i == 0 else 1))
    loads = [decode_load(rng) for _ in range(50)] + [prefill_load(rng) for _ in range(50)]
    assert max(abs(model.predict_s(load) / (factor * true_s(load)) - 1) for load in loads) < 0.2


def test_steptime_machine_that_becomes_slower_is_followed() -> None:
    rng = random.Random(2)
    model = taught(rng, 100)
    for _ in range(300):
        load = rng.choice([decode_load, prefill_load])(rng)
        model.observe(load, 2.5 * true_s(load))
    load = decode_load(rng)
    assert model.predict_s(load) == pytest.approx(2.5 * true_s(load), rel=0.2)


def test_steptime_bursts_of_a_neighbour_leave_what_parts_cost_relative_to_each_other() -> None:
    rng = random.Random(6)
    model, streams, mixed = taught(rng, 100), StepLoad(), StepLoad()
    for _ in range(8):
        streams.add(160, 1)
        mixed.add(160, 1)
    mixed.add(3000, 8)
    expected = true_s(mixed) / true_s(streams)
    for at in range(600):
        load = replace(mixed)
        slow = rng.uniform(1.4, 2.5) if at % 30 < 8 else rng.uniform(0.95, 1.05)
        model.observe(load, true_s(load) * slow)
        assert model.predict_s(mixed) / model.predict_s(streams) == pytest.approx(expected, rel=0.25)


def test_steptime_slow_stretch_is_followed_within_ten_steps_and_left_again() -> None:
    rng = random.Random(7)
    model, load = taught(rng, 200), decode_load(rng)
    for factor in (1.3, 1.0):
        for _ in range(15):
            model.observe(load, factor * true_s(load))
        assert model.predict_s(load) == pytest.approx(factor * true_s(load), rel=0.1)


def test_steptime_coefficients_are_never_negative() -> None:
    rng = random.Random(3)
    model = StepTimeModel()
    for _ in range(500):
        model.observe(prefill_load(rng), rng.uniform(1e-4, 1.0))
        assert min(model.coefficients) >= 0


def test_steptime_zero_seconds_is_ignored() -> None:
    model = StepTimeModel()
    before = model.coefficients
    model.observe(StepLoad(rows=1, tokens=1, attended=1), 0.0)
    assert model.coefficients == before


@pytest.mark.parametrize("attended_s", [0.0, 1e-22, 1e-18, 1e-14, 1e-10])
def test_max_chunk_where_attention_costs_almost_nothing_follows_the_tokens(attended_s: float) -> None:
    model = StepTimeModel()
    model._coefficients = Coefficients(0.001, 0.001, 0.005, 0.0, attended_s)
    assert model.max_chunk(StepLoad(), 1000, 0.2525) == 50


@pytest.mark.parametrize("budget_s", [0.004, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("start", [0, 700])
def test_max_chunk_is_the_largest_that_fits(budget_s: float, start: int) -> None:
    rng = random.Random(4)
    model, streams = taught(rng, 100), StepLoad()
    streams.add(300, 1)
    num = model.max_chunk(streams, start, budget_s)

    def predicted_s(chunk: int) -> float:
        load = replace(streams)
        load.add(start, chunk)
        return model.predict_s(load)

    assert num == 0 or predicted_s(num) <= budget_s
    assert predicted_s(num + 2) > budget_s
