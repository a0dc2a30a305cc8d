"""From the simulator's best settings to confirmed ones, in a few live runs.

Knows how to choose what to run next; runs nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from firstlight.tune.outcome import Correction, Outcome
from firstlight.tune.search import MAX_RATE, Effect, Found, effects, rounded, search
from firstlight.tune.space import Knob, Settings, key_of

__all__ = ["Try", "Tuned", "tune"]

Measure = Callable[[Settings, float], Outcome]
PredictCorrected = Callable[[Settings, float, Correction], Outcome]
BINDS_FROM = 0.02
"""Share of the highest rate that moving a knob has to cost before the knob is said to bind."""
_HOPELESS = 0.05
"""Predicted loss from which a neighbour is not worth a live run."""
_NARROW = 1.12
"""Ratio of the lowest missed to the highest met rate from which a neighbour may tell more than a narrower bracket."""
_CLOSE_ENOUGH = 1.04
"""That ratio from which on runs differ by more than is left to find."""
_LOWER, _LITTLE_LOWER, _HIGHER = 0.75, 0.9, 1.1
"""Steps where no simulated rate says better."""
_FAR = 1.3
"""Share of a bound from which a run missed it by much."""
_FIT_STEPS = 10
_STEP_MOVE = 0.7
_FIRST_MOVE = 0.5
_NEAR_ENOUGH = 0.03
_MAX_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class Try:
    """One live run, and what was predicted for it before."""

    settings: Settings
    rate: float
    predicted: Outcome
    measured: Outcome
    reason: str


@dataclass(slots=True)
class Tuned:
    """What tuning found. Written by `tune` alone."""

    best: Found
    """Live, where there was a live run; else predicted."""
    tries: list[Try] = field(default_factory=list)
    missed_rate: float = math.inf
    """The lowest rate above the best at which the same settings missed the objectives."""
    correction: Correction = Correction()  # noqa: RUF009 - frozen
    effects: list[Effect] = field(default_factory=list)

    @property
    def binding(self) -> Effect | None:
        """The knob whose move costs most, if any costs something."""
        worst = self.effects[0] if self.effects else None
        return worst if worst and worst.loss >= BINDS_FROM else None


def tune(
    space: Sequence[Knob],
    start: Settings,
    predict: PredictCorrected,
    measure: Measure,
    *,
    max_live: int = 5,
    lowest_rate: float = 0.25,
    on_try: Callable[[Try], None] = lambda each: None,
) -> Tuned:
    """Searches the predictions, measures, corrects the predictions by what was measured, and again.

    Of the runs one goes to a neighbour on the knob that binds; the others narrow the highest rate. Ends early where
    that is known to a few percent.
    """
    tuned = Tuned(search(_with(predict, Correction()), space, start))
    plan: tuple[Settings, float, str] | None = (tuned.best.settings, tuned.best.rate, "best of the simulator")
    if not tuned.best.rate:
        plan = (tuned.best.settings, lowest_rate, "no rate is inside the objectives in the simulator")
    while plan is not None and len(tuned.tries) < max_live:
        settings, rate, reason = plan
        expected = predict(settings, rate, tuned.correction)
        tuned.tries.append(Try(settings, rate, expected, measure(settings, rate), reason))
        on_try(tuned.tries[-1])
        tuned.correction = _fitted(predict, tuned.tries, tuned.correction)
        simulated = search(_with(predict, tuned.correction), space, tuned.best.settings, tuned.best.rate or rate)
        _conclude(tuned)
        if tuned.missed_rate <= _NARROW * tuned.best.rate:
            tuned.effects = effects(_with(predict, tuned.correction), space, _predicted(predict, tuned))
        plan = _next(tuned, simulated)
    tuned.effects = effects(_with(predict, tuned.correction), space, _predicted(predict, tuned))
    return tuned


def _with(predict: PredictCorrected, correction: Correction) -> Measure:
    return lambda settings, rate: predict(settings, rate, correction)


def _predicted(predict: PredictCorrected, tuned: Tuned) -> Found:
    """The chosen settings at the highest rate that the corrected simulator gives them, to compare neighbours with."""
    return search(_with(predict, tuned.correction), (), tuned.best.settings, tuned.best.rate or 1.0)


def _fitted(predict: PredictCorrected, tries: Sequence[Try], before: Correction) -> Correction:
    """Costs scaled until time per token and TTFT come out as in the last run; the nearest of a few approximations.

    Time per token follows what steps cost, TTFT what prompts cost, and under load many times over: a move that went
    too far makes the next ones shorter. What gaps are longer by than that explains is a factor of its own.
    """
    last = tries[-1]
    if last.measured.error or not last.measured.tpot_s or not last.measured.ttft_s:
        return before
    nearest, distance, correction = before, math.inf, before
    share, off_before = _FIRST_MOVE, 0.0
    for _ in range(_FIT_STEPS):
        found = predict(last.settings, last.rate, correction)
        if not found.tpot_s or not found.ttft_s:
            break
        step_off = math.log(last.measured.tpot_s / found.tpot_s)
        prompt_off = math.log(last.measured.ttft_s / found.ttft_s)
        if abs(step_off) + abs(prompt_off) < distance:
            nearest = replace(correction, gap=_bounded(correction.gap * _gap_off(last.measured, found)))
            distance = abs(step_off) + abs(prompt_off)
        if distance < _NEAR_ENOUGH:
            break
        if prompt_off * off_before < 0:
            share /= 2
        off_before = prompt_off
        step = _bounded(correction.step * math.exp(_STEP_MOVE * step_off))
        correction = replace(correction, step=step, prompt=_bounded(correction.prompt * math.exp(share * prompt_off)))
    return nearest


def _gap_off(measured: Outcome, found: Outcome) -> float:
    """How many times as long gaps were as simulated; 1 where no objective is on them, or where there are none."""
    pairs = [(value, found.values_ms.get(label)) for label, value in measured.values_ms.items() if "itl" in label]
    return next((value / other for value, other in pairs if value and other), 1.0)


def _bounded(factor: float) -> float:
    return rounded(min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR))


def _conclude(tuned: Tuned) -> None:
    """The try with the most goodput of those inside the objectives (of all, if none is), and its bracket."""
    best = max(tuned.tries, key=lambda each: (each.measured.is_met, each.measured.goodput_per_s))
    low, high = _bracket(tuned.tries, best.settings)
    tuned.best = Found(best.settings, best.rate if best.measured.is_met else 0.0, best.measured)
    tuned.missed_rate = high
    assert not best.measured.is_met or low >= best.rate


def _bracket(tries: Sequence[Try], settings: Settings) -> tuple[float, float]:
    """The highest rate that met, and the lowest above it that missed."""
    mine = [each for each in tries if each.settings == settings]
    low = max((each.rate for each in mine if each.measured.is_met), default=0.0)
    return low, min((each.rate for each in mine if not each.measured.is_met and each.rate > low), default=math.inf)


def _next(tuned: Tuned, simulated: Found) -> tuple[Settings, float, str] | None:
    """What to run next; None: nothing is left that could gain more than runs differ."""
    best, tried = tuned.best, {key_of(each.settings) for each in tuned.tries}
    if best.rate and simulated.rate > _CLOSE_ENOUGH * best.rate and key_of(simulated.settings) not in tried:
        return simulated.settings, simulated.rate, "best of the corrected simulator"
    low, high = _bracket(tuned.tries, best.settings)
    if low and high <= _NARROW * low:
        for effect in _beside(tuned):
            beside = {**best.settings, effect.knob: effect.value}
            if key_of(beside) not in tried:
                return beside, rounded(_CLOSE_ENOUGH * low), f"beside the best on {effect.knob}"
    if not low and not simulated.rate:
        return None  # neither simulated nor live: lower rates would only take longer
    if not low:
        settings = simulated.settings
        _, high = _bracket(tuned.tries, settings)
        rate = simulated.rate
        if rate >= high / _CLOSE_ENOUGH:
            rate = high * (_LOWER if tuned.tries[-1].measured.worst_share > _FAR else _LITTLE_LOWER)
        return settings, rounded(rate), "lower: no run was inside the objectives"
    if high <= _CLOSE_ENOUGH * low or low >= MAX_RATE:
        return None
    # What the corrected simulator says, but neither next to what is known nor so far off that the run tells little.
    top = min(high, 1.5 * low)
    wanted = min(max(simulated.rate, _HIGHER * low), math.sqrt(low * top) if high <= 1.5 * low else top)
    return best.settings, rounded(wanted), "narrows the highest rate"


def _beside(tuned: Tuned) -> list[Effect]:
    """Neighbours that might gain: those on the knob that binds first, then by what they are predicted to lose."""
    knob = tuned.binding.knob if tuned.binding else ""
    might = [effect for effect in tuned.effects if effect.loss < _HOPELESS]
    return sorted(might, key=lambda effect: (effect.knob != knob, effect.loss))
