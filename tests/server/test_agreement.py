"""One load, asked about in every way: bench, usage, explain, metrics and the live figures give the same numbers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firstlight.backend.fake import StepCost
from firstlight.measure.bench import LevelResult, Prompt, run_level
from firstlight.measure.bench_report import summarise
from firstlight.measure.client import Endpoint
from firstlight.measure.percentile import percentile
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import wait_until

KEY = {"authorization": "Bearer secret"}
NUM = 12
ROUNDED_MS = 0.001 * NUM


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> ServerThread:
    return start_server(backend={"cost": StepCost(step_s=0.003)}, api_key=("secret",))


@pytest.fixture(scope="module")
def level(server: ServerThread) -> LevelResult:
    """What the bench saw of 12 chats in 4 streams, some with the same beginning."""
    prompts = [
        Prompt([{"role": "user", "content": f"{'as before ' * 8}{at}" if at % 3 else "short"}], 6 + at)
        for at in range(NUM)
    ]
    endpoint = Endpoint.parse(server.url, "secret")
    found = asyncio.run(run_level(endpoint, "fake", prompts, 4, ignore_eos=True))
    assert [record.error for record in found.records] == [None] * NUM
    wait_until(lambda: got(server, "/debug/live")["requests"] == NUM, "the last to be kept")
    return found


def got(server: ServerThread, path: str) -> Any:
    return httpx.get(server.url + path, headers=KEY).json()


@pytest.fixture(scope="module")
def views(server: ServerThread, level: LevelResult) -> list[Any]:
    listed = got(server, "/debug/requests?num=200")["requests"]
    return [got(server, f"/debug/requests/{view['id']}") for view in listed]


@pytest.fixture(scope="module")
def metrics(server: ServerThread, level: LevelResult) -> dict[str, float]:
    """Samples without buckets, by name and `kind`."""
    text = httpx.get(server.url + "/metrics", headers=KEY).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {
        sample.name.removeprefix("firstlight_") + sample.labels.get("kind", ""): sample.value
        for sample in samples
        if "le" not in sample.labels
    }


def test_token_counts_agree_everywhere(
    server: ServerThread, level: LevelResult, views: list[Any], metrics: dict[str, float]
) -> None:
    bench = summarise(level)
    for name in ("prompt", "output"):
        counts = {
            "usage": sum(
                getattr(r, "prompt_tokens" if name == "prompt" else "completion_tokens") for r in level.records
            ),
            "bench": bench[f"{name}_tokens"],
            "explain": sum(view[f"{name}_tokens"] for view in views),
            "metrics": metrics["prompt_tokens_total" if name == "prompt" else "generation_tokens_total"],
            "key": metrics[f"key_tokens_total{name}"],
        }
        assert len(set(counts.values())) == 1, counts
    assert got(server, "/debug/live")["output_tokens"] == bench["output_tokens"] == sum(6 + at for at in range(NUM))


def test_cached_tokens_agree_everywhere(level: LevelResult, views: list[Any], metrics: dict[str, float]) -> None:
    cached = summarise(level)["cached_tokens"]
    assert cached == sum(view["cached_tokens"] for view in views) == metrics["prefix_cache_hits_total"] > 0


def test_times_of_the_server_agree_everywhere(
    server: ServerThread, views: list[Any], metrics: dict[str, float]
) -> None:
    live = got(server, "/debug/live")
    for name, view_name in (("time_to_first_token_seconds", "ttft_ms"), ("e2e_request_latency_seconds", "e2e_ms")):
        assert metrics[f"{name}_count"] == len(views) == NUM
        assert metrics[f"{name}_sum"] * 1e3 == pytest.approx(sum(v[view_name] for v in views), abs=ROUNDED_MS)
    for percent in (50, 95, 99):
        wanted = percentile([view["ttft_ms"] for view in views], percent)
        assert live["ttft_ms"][f"p{percent}"] == pytest.approx(wanted, abs=ROUNDED_MS)
    assert metrics["inter_token_latency_seconds_count"] == sum(view["output_tokens"] - 1 for view in views)
    for view in views:
        assert sum(view["totals_ms"].values()) == pytest.approx(view["e2e_ms"], abs=0.1)
        assert sum(view["ttft_totals_ms"].values()) == pytest.approx(view["ttft_ms"], abs=0.1)


def test_gaps_agree_between_explain_metrics_and_the_live_figures(
    server: ServerThread, views: list[Any], metrics: dict[str, float]
) -> None:
    live, longest = got(server, "/debug/live")["itl_ms"], max(view["longest_gap_ms"] for view in views)
    assert live["p99"] <= longest + ROUNDED_MS
    assert live["num"] <= metrics["inter_token_latency_seconds_count"]
    assert metrics["time_per_output_token_seconds_count"] == NUM
    whole_ms = metrics["inter_token_latency_seconds_sum"] * 1e3
    assert longest <= whole_ms + ROUNDED_MS
    assert whole_ms <= sum(view["e2e_ms"] - view["ttft_ms"] for view in views) + ROUNDED_MS
