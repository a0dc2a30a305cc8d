"""Tuning against machines made of formulas and of the simulator: nothing is timed, no server runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from firstlight.config import EngineConfig
from firstlight.errors import ConfigError
from firstlight.measure.objectives import parse_objectives
from firstlight.measure.workload import Session, arrivals_s, single_turns, synthetic_prompts
from firstlight.simulate import Hardware
from firstlight.tune import (
    Correction,
    Journal,
    Knob,
    Outcome,
    Predictor,
    Settings,
    Tuned,
    at_rate,
    default_space,
    effects,
    key_of,
    pareto_front,
    read_space,
    search,
    trace_of,
    tune,
    unit_rate,
)

START: Settings = {"itl_slo_ms": 0.0, "max_step_rows": 64}
SPACE = (Knob("itl_slo_ms", (0.0, 20.0, 40.0)), Knob("max_step_rows", (4, 16, 64)))


@dataclass
class Formula:
    """Shorter steps lose throughput to overhead, longer ones miss the gap; a queue stands in front."""

    step_s: float
    prompt_s: float
    gap: float = 1.0
    gap_bound_s: float = 0.05
    ttft_bound_s: float = 0.5

    def __call__(self, settings: Settings, rate: float, correction: Correction = Correction()) -> Outcome:  # noqa: B008
        step_s, prompt_s = self.step_s * correction.step, self.prompt_s * correction.prompt
        rows = float(settings["max_step_rows"])
        gap_s = float(settings["itl_slo_ms"]) / 1e3 or 0.03
        capacity = (1 - step_s / gap_s) / (prompt_s * (1 + 2 / rows)) if gap_s > step_s else 1e-3
        load = rate / capacity
        ttft_s = prompt_s * (1 + load / (1 - load)) if load < 0.95 else prompt_s * (20 + 100 * (load - 0.95))
        tpot_s = step_s + (gap_s - step_s) * min(1.0, load)
        longest_s = self.gap * correction.gap * tpot_s
        shares = {"ttft_p95": 2 * ttft_s / self.ttft_bound_s, "itl_p95": longest_s / self.gap_bound_s}
        worst = max(shares, key=lambda label: shares[label])
        is_met = shares[worst] <= 1
        return Outcome(
            goodput_per_s=rate if is_met else 0.7 * min(rate, capacity),
            is_met=is_met,
            worst=worst,
            worst_share=shares[worst],
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            values_ms={"itl_p95": 1e3 * longest_s},
        )

    def best(self) -> float:
        """The most goodput inside the objectives over a grid of settings and rates 1 % apart."""
        rates = [0.5 * 1.01**i for i in range(500)]
        grid = itertools.product(*(knob.values for knob in SPACE), rates)
        outcomes = [self({"itl_slo_ms": gap, "max_step_rows": rows}, rate) for gap, rows, rate in grid]
        return max(outcome.goodput_per_s for outcome in outcomes if outcome.is_met)


CALIBRATED = Formula(step_s=0.008, prompt_s=0.1)


@pytest.mark.parametrize("step", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("prompt", [0.8, 1.0, 1.4])
def test_tune_reaches_95_percent_of_the_grid_in_5_live_runs(step: float, prompt: float) -> None:
    real = Formula(0.008 * step, 0.1 * prompt)
    tuned = tune(SPACE, START, CALIBRATED, real)
    assert 1 <= len(tuned.tries) <= 5
    assert tuned.best.outcome.is_met
    assert tuned.best.rate < tuned.missed_rate
    assert tuned.best.outcome.goodput_per_s >= 0.95 * real.best()


@pytest.mark.parametrize("gap", [0.8, 1.3, 2.0])
def test_gaps_that_waver_are_planned_for(gap: float) -> None:
    real = Formula(0.008, 0.1, gap)
    tuned = tune(SPACE, START, CALIBRATED, real)
    assert len(tuned.tries) <= 5
    assert tuned.correction.gap == pytest.approx(gap, rel=0.05)
    assert tuned.best.outcome.goodput_per_s >= 0.95 * real.best()


def test_correction_makes_the_simulator_agree_with_the_machine() -> None:
    tuned = tune(SPACE, START, CALIBRATED, Formula(0.008 * 1.3, 0.1 * 1.2))
    assert tuned.correction.step == pytest.approx(1.3, rel=0.1)
    assert tuned.correction.prompt == pytest.approx(1.2, rel=0.1)


def test_knob_that_binds_is_the_one_whose_move_costs_most() -> None:
    tuned = tune(SPACE, START, CALIBRATED, CALIBRATED)
    assert tuned.best.settings == {"itl_slo_ms": 40.0, "max_step_rows": 64}
    assert tuned.binding is not None
    assert (tuned.binding.knob, tuned.binding.value) == ("itl_slo_ms", 20.0)
    assert [effect.loss for effect in tuned.effects] == sorted((e.loss for e in tuned.effects), reverse=True)


def test_settings_that_gain_nothing_are_left_as_they_are() -> None:
    indifferent = (Knob("eviction", ("lru", "lfu")), Knob("threads", (1, 2)))
    start: Settings = {"eviction": "lru", "threads": 2}

    def predict(settings: Settings, rate: float) -> Outcome:
        return CALIBRATED({**START, **settings}, rate)

    found = search(predict, indifferent, start)
    assert found.settings == start
    assert all(abs(effect.loss) < 0.02 for effect in effects(predict, indifferent, found))


def test_machine_that_is_never_inside_ends_early_and_says_so() -> None:
    hopeless = Formula(0.008, 2.0)
    tuned = tune(SPACE, START, hopeless, hopeless)
    assert tuned.best.rate == 0
    assert len(tuned.tries) == 1
    assert not tuned.best.outcome.is_met


def test_failed_live_run_is_a_miss_and_the_search_goes_on() -> None:
    failures = iter([True])

    def measure(settings: Settings, rate: float) -> Outcome:
        return Outcome(error="HTTP 500") if next(failures, False) else CALIBRATED(settings, rate)

    tuned = tune(SPACE, START, CALIBRATED, measure)
    assert tuned.tries[0].measured.error
    assert tuned.best.outcome.is_met


# Resuming.


def journaled(journal: Journal, measure: Callable[[Settings, float], Outcome]) -> Callable[[Settings, float], Outcome]:
    return lambda settings, rate: journal.recall(
        "live", f"{key_of(settings)} {rate:g}", Outcome, lambda: measure(settings, rate)
    )


@pytest.mark.parametrize("num_done", [0, 1, 2, 3])
def test_killed_and_run_again_repeats_no_live_run_and_ends_the_same(num_done: int, tmp_path: Path) -> None:
    real = Formula(0.011, 0.12)
    ran: list[float] = []

    def measure(settings: Settings, rate: float) -> Outcome:
        ran.append(rate)
        return real(settings, rate)

    def killed_after(settings: Settings, rate: float) -> Outcome:
        if len(ran) == num_done:
            raise KeyboardInterrupt
        return measure(settings, rate)

    whole: Tuned = tune(SPACE, START, CALIBRATED, real)
    with pytest.raises(KeyboardInterrupt):
        tune(SPACE, START, CALIBRATED, journaled(Journal(tmp_path / "j.json", {"slo": "x"}), killed_after))
    resumed = tune(SPACE, START, CALIBRATED, journaled(Journal(tmp_path / "j.json", {"slo": "x"}), measure))
    assert ran == [each.rate for each in whole.tries]
    assert (resumed.best, resumed.tries, resumed.effects) == (whole.best, whole.tries, whole.effects)


def test_journal_of_another_purpose_or_form_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j.json", {"slo": "x"}).recall("live", "a", int, lambda: 1)
    with pytest.raises(ConfigError, match="another slo: x"):
        Journal(tmp_path / "j.json", {"slo": "y"})
    (tmp_path / "torn.json").write_text('{"purpose": {"sl')
    with pytest.raises(ConfigError, match="cannot be gone on from"):
        Journal(tmp_path / "torn.json", {"slo": "x"})


# The simulator as the function.

HARDWARE = Hardware(
    name="as calibrated",
    assumptions={},
    step_s=0.004,
    row_s=0.0003,
    token_s=0.0008,
    context_s=1.7e-6,
    pair_s=6e-7,
    kv_tokens=8192,
    max_model_len=1024,
)


def load(num: int, input_tokens: int = 80) -> list[Session]:
    prompts = synthetic_prompts(0, input_tokens=input_tokens, prefix_tokens=48, max_tokens=4)
    return unit_rate(single_turns(itertools.islice(prompts, num), arrivals_s(1.0, "poisson", 0)))


def predictor(sessions: list[Session]) -> Predictor:
    objectives = parse_objectives("ttft_p95=300ms,itl_p95=50ms")
    return Predictor(
        hardware={0: HARDWARE}, sessions=sessions, objectives=objectives, config=EngineConfig(), is_plain=True
    )


def test_predictor_sees_rate_settings_and_correction() -> None:
    predict = predictor(load(6))
    slow, fast = predict(START, 0.5, Correction()), predict(START, 200.0, Correction())
    assert slow.is_met
    assert fast.values_ms["ttft_p95"] > slow.values_ms["ttft_p95"]
    assert predict({**START, "max_step_rows": 1}, 200.0, Correction()).tpot_s < fast.tpot_s
    assert predict(START, 0.5, Correction(step=2)).tpot_s > slow.tpot_s
    assert predict(START, 0.5, Correction(prompt=2)).ttft_s > 1.5 * slow.ttft_s
    wavering = predict(START, 0.5, Correction(gap=50.0 / slow.values_ms["itl_p95"] + 0.1))
    assert wavering.values_ms["itl_p95"] > 50.0
    assert (wavering.ttft_s, wavering.tpot_s, wavering.is_met) == (slow.ttft_s, slow.tpot_s, False)


def test_workload_that_does_not_fit_is_a_miss_with_its_reason() -> None:
    found = predictor([*load(3), *load(1, input_tokens=2000)])(START, 1.0, Correction())
    assert not found.is_met
    assert "1 requests are longer than the context" in found.error


def test_trace_of_sessions_shares_what_their_words_share() -> None:
    sessions = at_rate(load(5), 2.0)
    trace = trace_of(sessions, 0.01, is_plain=True, has_cache=True)
    assert [request.arrival_s for request in trace.requests] == [session.begin_s for session in sessions]
    assert all(request.input_tokens == 100 for request in trace.requests)
    assert {tuple(request.blocks[:3]) for request in trace.requests} == {(0, 1, 2)}
    assert len({request.blocks[3] for request in trace.requests}) == 5
    assert not any(r.blocks for r in trace_of(sessions, 0.01, is_plain=True, has_cache=False).requests)


# What may be set.


def test_default_space_holds_what_the_engine_takes_itself() -> None:
    space = default_space(parse_objectives("itl_p95=60ms"), 2048, (1, 2), has_prefixes=True)
    values = {knob.name: knob.values for knob in space}
    own = EngineConfig()
    assert 2048 in values["num_blocks"]
    for name in ("itl_slo_ms", "max_step_tokens", "max_step_rows", "eviction"):
        assert getattr(own, name) in values[name]


def test_written_space_is_read() -> None:
    assert read_space("max-step-rows=4,64; --itl-slo-ms=0,25.5;eviction=lru") == (
        Knob("max_step_rows", (4, 64)),
        Knob("itl_slo_ms", (0.0, 25.5)),
        Knob("eviction", ("lru",)),
    )
    assert read_space("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows=4", "not a setting that can be tuned"),
        ("max-step-rows=", "needs values"),
        ("max-step-rows=0", "numbers from 1 up"),
        ("max-step-rows=few", "not a number"),
        ("itl-slo-ms=nan", "numbers from 0 up"),
        ("eviction=oldest", "lru, lfu"),
        ("threads=1;threads=2", "appears twice"),
    ],
)
def test_space_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_space(text)


def test_pareto_front_keeps_what_nothing_beats() -> None:
    def outcome(goodput: float, share: float, error: str = "") -> Outcome:
        return Outcome(goodput_per_s=goodput, worst_share=share, error=error)

    kept = [outcome(1, 0.2), outcome(2, 0.5), outcome(3, 0.9)]
    beaten = [outcome(1, 0.3), outcome(1.5, 0.5), outcome(9, 0.1, "failed")]
    assert pareto_front([*beaten, *reversed(kept)]) == kept
