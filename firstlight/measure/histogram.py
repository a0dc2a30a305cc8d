"""A latency histogram for Prometheus that costs a fraction of a microsecond to add to. Knows numbers, no units.

prometheus_client's own takes 2.5 microseconds a value (a lock and a walk over the buckets): with many streams, most of
what a token costs beside its text. Added to on one thread; read at scrape time on any.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["LatencyHistogram"]


class LatencyHistogram(Collector):
    """Counts by bucket and a sum, under one value of the label `model_name`."""

    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """Counts `value`, `num` times."""
        self._counts[bisect_left(self._bounds, value)] += num
        self._sum += value * num

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        totals = itertools.accumulate(self._counts)
        family.add_metric([self._model_name], list(zip(names, totals, strict=True)), self._sum)
        yield family
