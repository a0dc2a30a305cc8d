"""Stated objectives, what share of requests met them, and how sure a figure over repeats is.

Knows records and numbers; sends nothing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.errors import ConfigError
from firstlight.measure.bench import LevelResult, RequestRecord
from firstlight.measure.bench_report import percentile

__all__ = ["Objective", "goodput", "interval", "meets", "objective_value", "parse_objectives", "ratio_interval"]

_FORM = re.compile(r"(ttft|itl|tpot|e2e)_p(\d{1,2})=(\d+(?:\.\d+)?)(ms|s)")
# Student's t, two-sided 95 %, by degrees of freedom; beyond the table the normal's 1.96 is within 6 %.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


@dataclass(frozen=True, slots=True)
class Objective:
    """`percent` of the times called `name` are to be at most `bound_s`."""

    name: str
    percent: int
    bound_s: float

    @property
    def label(self) -> str:
        """As it is written: ttft_p95."""
        return f"{self.name}_p{self.percent}"


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """The objectives in `ttft_p95=200ms,itl_p95=50ms`. Raises ConfigError."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FORM.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"`--slo` has {part!r}, which is not an objective",
                hint="write name_pNN=TIME with ttft, itl, tpot or e2e, for example ttft_p95=200ms,itl_p95=50ms",
            )
        found.append(Objective(match[1], int(match[2]), float(match[3]) * (1e-3 if match[4] == "ms" else 1)))
    return tuple(found)


def _times_s(record: RequestRecord, name: str) -> list[float]:
    if name == "itl":
        return record.gaps_s
    if name == "tpot":
        return [] if record.tpot_s is None else [record.tpot_s]
    return [record.ttft_s if name == "ttft" else record.e2e_s]


def _is_good(record: RequestRecord) -> bool:
    return record.error is None and bool(record.times_s)


def goodput(level: LevelResult, objectives: Sequence[Objective]) -> float:
    """Requests per second that met every objective; of a request's own gaps the stated percentile counts."""
    good = sum(
        all((percentile(_times_s(record, o.name), o.percent) or 0.0) <= o.bound_s for o in objectives)
        for record in level.records
        if _is_good(record)
    )
    return good / level.wall_s if level.wall_s else 0.0


def meets(level: LevelResult, objectives: Sequence[Objective]) -> bool:
    """Whether no request failed and every objective's percentile over the whole run is inside its bound."""
    if not level.records or not all(_is_good(record) for record in level.records):
        return False
    return all(objective_value(level, o) <= o.bound_s for o in objectives)


def objective_value(level: LevelResult, objective: Objective) -> float:
    """Seconds that the objective's percentile came to, over all requests that did not fail; 0 without any."""
    times_s = [t for r in level.records if _is_good(r) for t in _times_s(r, objective.name)]
    return percentile(times_s, objective.percent) or 0.0


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean over repeats; None below two of them."""
    if len(values) < 2:
        return None
    t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 2.0
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """second / first over paired repeats: the geometric mean, and its 95 % interval where there are two pairs."""
    logs = [math.log(b / a) for a, b in zip(first, second, strict=True) if a > 0 and b > 0]
    if not logs:
        return math.nan, None
    bounds = interval(logs)
    return math.exp(statistics.fmean(logs)), bounds and (math.exp(bounds[0]), math.exp(bounds[1]))
