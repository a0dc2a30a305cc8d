"""What can be had at once: goodput against how near the worst objective is to its bound."""

from __future__ import annotations

from collections.abc import Iterable

from firstlight.tune.outcome import Outcome
from firstlight.tune.search import Predict, rounded
from firstlight.tune.space import Settings

__all__ = ["pareto_front", "sweep"]

SWEEP_SHARES = (0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3)
"""Of the highest rate: where each settings' curve is drawn."""


def sweep(predict: Predict, settings: Settings, rate: float) -> list[Outcome]:
    """The outcomes of the settings at rates around one."""
    return [predict(settings, rounded(share * rate)) for share in SWEEP_SHARES]


def pareto_front(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that no other beats in both goodput and the worst objective's share; the least goodput first."""
    front: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda each: (each.worst_share, -each.goodput_per_s)):
        if not outcome.error and (not front or outcome.goodput_per_s > front[-1].goodput_per_s):
            front.append(outcome)
    return front
