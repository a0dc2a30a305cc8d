"""The Grafana dashboard asks only for metrics that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.measure.metrics import SNAPSHOT_METRICS, Metrics

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "firstlight.json"


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_every_query_reads_a_metric_that_is_there() -> None:
    metrics = Metrics("m", "1")
    metrics.watch(lambda: dict.fromkeys(SNAPSHOT_METRICS, 0.0))
    metrics.answered(1.0, prompt_tokens=1, generation_tokens=1, finish_reasons=["stop"])
    metrics.failed(400, "bad")
    known = set(re.findall(r"^(firstlight_\w+)", metrics.render().decode(), re.MULTILINE))
    asked = [set(re.findall(r"firstlight_\w+", e)) for e in expressions(json.loads(DASHBOARD.read_text())["panels"])]
    assert len(asked) > 15
    assert all(asked), "a query without a metric"
    assert set().union(*asked) - known == set()
