"""The best settings in the simulator: how high a rate each can take inside the objectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firstlight.tune.outcome import Outcome
from firstlight.tune.space import Knob, Settings

__all__ = ["Effect", "Found", "Predict", "effects", "rounded", "search"]

Predict = Callable[[Settings, float], Outcome]
MIN_RATE, MAX_RATE = 2.0**-8, 2.0**12
CLOSE_ENOUGH = 1.02
"""Ratio of the lowest missed to the highest met rate at which a bracket is narrow enough."""
WORTH_IT = 1.03
"""A setting replaces another only when it can take so many times its rate: more than a bracket leaves open."""
MAX_ALL = 64
"""Combinations up to which each is tried; beyond, one knob after the other."""
MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Found:
    """Settings, and the highest rate at which they were seen inside the objectives; 0: none."""

    settings: Settings
    rate: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Effect:
    """What becomes of the highest rate when one knob alone is moved to the value beside the chosen one."""

    knob: str
    value: int | float | str
    rate: float
    loss: float
    """Share of the highest rate that is lost, 0..1; below 0: it would be a gain."""


def rounded(rate: float) -> float:
    """The rate in three digits, so that a person can type it."""
    return float(f"{rate:.3g}")


def highest_rate(predict: Predict, settings: Settings, first_rate: float) -> Found:
    """Doubles or halves from `first_rate` until the objectives are passed, then halves the interval."""
    rate, low, high = rounded(first_rate), 0.0, math.inf
    best = Found(settings, 0.0, Outcome())
    while True:
        outcome = predict(settings, rate)
        if outcome.is_met:
            low, best = rate, Found(settings, rate, outcome)
        else:
            high = rate
        if (low and high <= CLOSE_ENOUGH * low) or high <= MIN_RATE or low >= MAX_RATE:
            return best
        following = rounded(2 * low if math.isinf(high) else math.sqrt(low * high) if low else high / 2)
        if following in (low, high):
            return best
        rate = following


def search(predict: Predict, space: Sequence[Knob], start: Settings, first_rate: float = 1.0) -> Found:
    """The settings with the highest rate: of all where they are few, else by moving one knob at a time from `start`.

    A candidate costs one simulation where it is not better: it has to take a little more than the best so far.
    """
    best = highest_rate(predict, start, first_rate)
    if math.prod(len(knob.values) for knob in space) <= MAX_ALL:
        for values in itertools.product(*(knob.values for knob in space)):
            best = _better(predict, best, {**start, **dict(zip((k.name for k in space), values, strict=True))})
        return best
    for _ in range(MAX_ROUNDS):
        before = best
        for knob in space:
            for value in knob.values:
                best = _better(predict, best, {**best.settings, knob.name: value})
        if best is before:
            break
    return best


def _better(predict: Predict, best: Found, settings: Settings) -> Found:
    rate = rounded(max(MIN_RATE, WORTH_IT * best.rate))
    if settings == best.settings or not predict(settings, rate).is_met:
        return best
    return highest_rate(predict, settings, rate)


def effects(predict: Predict, space: Sequence[Knob], best: Found) -> list[Effect]:
    """Of each knob, what its neighbouring values lose; the largest loss first."""
    found = []
    for knob in space:
        for value in knob.neighbours(best.settings[knob.name]):
            rate = highest_rate(predict, {**best.settings, knob.name: value}, best.rate or 1.0).rate
            found.append(Effect(knob.name, value, rate, 1 - rate / best.rate if best.rate else 0.0))
    return sorted(found, key=lambda effect: -effect.loss)
