"""What a run of the load at a rate came to, simulated or live, and how the one is brought nearer to the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from firstlight.measure.bench import LevelResult
from firstlight.measure.objectives import Objective, goodput, meets, objective_value
from firstlight.measure.percentile import percentile

__all__ = ["Correction", "Outcome", "outcome_of"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run. An `error` makes it a miss, whatever else it holds."""

    goodput_per_s: float = 0.0
    is_met: bool = False
    worst: str = ""
    """The objective that is nearest to its bound, or the furthest beyond."""
    worst_share: float = 0.0
    """Its value over its bound: 1 is on the bound."""
    ttft_s: float = 0.0
    """Median."""
    tpot_s: float = 0.0
    """Mean."""
    values_ms: dict[str, float] = {}
    """What each objective's percentile came to."""
    error: str = ""


class Correction(msgspec.Struct, frozen=True):
    """How this machine differs from its hardware file: what a step costs beside prompt tokens, and what those cost,
    each so many times as much."""

    step: float = 1.0
    prompt: float = 1.0
    gap: float = 1.0
    """Of a live gap between tokens to a simulated one: a live step takes as long as was planned only on the mean."""


def outcome_of(level: LevelResult, objectives: Sequence[Objective], num_refused: int = 0, gap: float = 1.0) -> Outcome:
    """The outcome of a finished run; requests that were refused or failed make it a miss. Gaps count `gap` times."""
    factors = {o.label: gap if o.name == "itl" else 1.0 for o in objectives}
    values = {o.label: factors[o.label] * objective_value(level, o) for o in objectives}
    shares = {o.label: values[o.label] / o.bound_s for o in objectives}
    tightened = [replace(o, bound_s=o.bound_s / factors[o.label]) for o in objectives]
    worst = max(shares, key=lambda label: shares[label])
    good = [record for record in level.records if record.error is None and record.times_s]
    tpots_s = [record.tpot_s for record in good if record.tpot_s is not None]
    failed = next((record.error for record in level.records if record.error), "")
    if num_refused and not failed:
        failed = f"{num_refused} requests are longer than the context or the KV memory allows"
    return Outcome(
        goodput_per_s=goodput(level, tightened),
        is_met=num_refused == 0 and meets(level, tightened),
        worst=worst,
        worst_share=shares[worst],
        ttft_s=percentile([record.ttft_s for record in good], 50) or 0.0,
        tpot_s=statistics.fmean(tpots_s) if tpots_s else 0.0,
        values_ms={label: 1e3 * value for label, value in values.items()},
        error=failed,
    )
