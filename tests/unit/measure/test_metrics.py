"""Metrics: what is counted shows up, in the exposition format, in the right bucket."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firstlight.measure.metrics import LATENCY_BUCKETS_S, SNAPSHOT_METRICS, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Samples by name and their `le`, `finished_reason`, `code` or `state` label."""
    families = text_string_to_metric_families(metrics.render().decode())
    found: dict[tuple[str, str], float] = {}
    for family in families:
        for sample in family.samples:
            labels = sample.labels
            key = labels.get("le") or labels.get("finished_reason") or labels.get("code") or labels.get("state") or ""
            found[sample.name.removeprefix("firstlight_"), key] = sample.value
    return found


def test_buckets_go_from_one_ms_to_a_minute_in_small_steps() -> None:
    assert LATENCY_BUCKETS_S[0] == 0.001
    assert LATENCY_BUCKETS_S[-1] == 60.0
    assert all(low < high <= 2 * low for low, high in itertools.pairwise(LATENCY_BUCKETS_S))


def test_tokens_that_leave_together_are_one_gap_and_zeros() -> None:
    metrics = Metrics("m", "1")
    metrics.tokens(0.0, None, 1)
    metrics.tokens(0.04, 0.04, 3)
    got = samples(metrics)
    assert got["inter_token_latency_seconds_count", ""] == 3
    assert got["inter_token_latency_seconds_sum", ""] == pytest.approx(0.04)
    assert got["inter_token_latency_seconds_bucket", "0.001"] == 2
    assert got["inter_token_latency_seconds_bucket", "0.05"] == 3


def test_ends_are_counted_by_their_kind() -> None:
    metrics = Metrics("m", "1")
    metrics.answered(1.0, prompt_tokens=5, generation_tokens=7, finish_reasons=["stop", "length", "stop"])
    metrics.ended(prompt_tokens=2, generation_tokens=1)
    metrics.aborted("prefill")
    metrics.slow_reader()
    metrics.failed(400, "invalid_request")
    got = samples(metrics)
    assert got["request_success_total", "stop"] == 2
    assert got["request_success_total", "length"] == 1
    assert got["prompt_tokens_total", ""] == 7
    assert got["generation_tokens_total", ""] == 8
    assert got["request_aborts_total", "prefill"] == got["slow_readers_total", ""] == 1
    assert got["request_aborts_total", "queue"] == got["request_aborts_total", "decode"] == 0
    assert got["request_errors_total", "invalid_request"] == 1
    assert got["e2e_request_latency_seconds_count", ""] == 1


def test_open_requests_go_up_and_down() -> None:
    metrics = Metrics("m", "1")
    metrics.opened()
    metrics.opened()
    metrics.closed()
    assert samples(metrics)["http_requests_open", ""] == 1


def test_snapshot_is_read_at_every_scrape() -> None:
    metrics = Metrics("m", "1")
    values = dict.fromkeys(SNAPSHOT_METRICS, 1.0)
    metrics.watch(lambda: values)
    for name, (kind, _) in SNAPSHOT_METRICS.items():
        assert samples(metrics)[name + ("_total" if kind == "counter" else ""), ""] == 1.0
    values["num_requests_running"] = 4.0
    assert samples(metrics)["num_requests_running", ""] == 4.0


def test_two_servers_in_a_process_count_apart() -> None:
    first, second = Metrics("m", "1"), Metrics("m", "1")
    first.aborted("queue")
    assert samples(second)["request_aborts_total", "queue"] == 0
