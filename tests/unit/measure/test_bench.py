"""The load generator: repeatable prompts, bounded streams, true arithmetic."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import BackendError
from firstlight.measure.bench import LevelResult, LoadShape, RequestRecord, prompt_source, run_level, served_model
from firstlight.measure.bench_report import percentile, render_table, report_document, summarise
from tests.unit.measure.canned_server import canned, response, sse_body

SHAPE = LoadShape(concurrency=(2,), requests_per_level=(3,), max_tokens=0, ignore_eos=True, seed=0)


def record(sent_s: float, times_s: list[float], end_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(sent_s, times_s, end_s, prompt_tokens=10, completion_tokens=tokens, cached_tokens=4)


def test_prompts_of_one_seed_repeat_and_of_two_seeds_differ() -> None:
    first, again, other = (list(itertools.islice(prompt_source(seed, 0), 40)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_prompts_are_filled_in_and_mostly_different() -> None:
    prompts = list(itertools.islice(prompt_source(0, 0), 200))
    texts = [prompt.messages[-1]["content"] for prompt in prompts]
    assert len(set(texts)) > 150
    assert not any(
        f"{{{name}" in text for text in texts for name in ("city", "name", "thing", "topic", "number", "food")
    )
    assert {prompt.max_tokens for prompt in prompts} == {16, 32, 48, 64, 96, 128}
    assert min(map(len, texts)) < 60
    assert max(map(len, texts)) > 1000


def test_fixed_answer_length_is_used_for_every_prompt() -> None:
    assert {prompt.max_tokens for prompt in itertools.islice(prompt_source(0, 7), 50)} == {7}


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    inclusive = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 95, 99):
        assert percentile(values, percent) == pytest.approx(inclusive[percent - 1])


def test_percentile_of_nothing_is_none_and_of_one_is_itself() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0


def test_summary_counts_and_times_are_those_of_the_records() -> None:
    good = record(1.0, [1.5, 1.7, 2.1], 2.1, 4)
    failed = RequestRecord(0.0, error="gone")
    level = LevelResult(2, [good, failed], 4.0, 0.2, [0.001])
    summary = summarise(level)
    assert (summary["requests"], summary["errors"], summary["first_error"]) == (2, 1, "gone")
    assert summary["output_tokens_per_s"] == pytest.approx(1.0)
    assert summary["ttft_ms"]["p50"] == pytest.approx(500)
    assert summary["itl_ms"]["p50"] == pytest.approx(300)
    assert summary["tpot_ms"]["p50"] == pytest.approx(200)
    assert summary["e2e_ms"]["p50"] == pytest.approx(1100)
    assert summary["client"]["cpu_share_of_one_core"] == pytest.approx(0.05)
    table = render_table([level])
    assert "2 (1 failed)" in table
    assert "500 / 500 / 500" in table


def test_report_keeps_every_raw_time_and_is_json() -> None:
    level = LevelResult(1, [record(0.0, [0.5, 0.6], 0.6, 2), RequestRecord(0.0, error="gone")], 1.0, 0.0, [])
    document = report_document([level], SHAPE, server={"url": "u"}, command=["firstlight", "bench"], version="0")
    again = msgspec.json.decode(msgspec.json.encode(document))
    assert [row["ttft_s"] for row in again["records"]] == [0.5, None]
    assert again["records"][0]["gaps_s"] == [pytest.approx(0.1)]
    assert again["load"]["seed"] == 0
    assert set(again) >= {"commit", "command", "hardware", "versions", "server", "summary", "measured_at"}


def chunk(content: str | None, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
}


def test_level_sends_every_prompt_and_never_more_streams_than_asked() -> None:
    async def load() -> tuple[LevelResult, int, list[bytes]]:
        answer = response(sse_body([chunk(""), chunk("Hi"), chunk(" you"), chunk(None, "length"), USAGE]))
        async with canned(answer, piece_bytes=16) as (server, endpoint):
            prompts = list(itertools.islice(prompt_source(0, 5), 9))
            level = await run_level(endpoint, "m", prompts, 3, ignore_eos=True)
            return level, server.most_open, server.requests

    level, most_open, requests = asyncio.run(load())
    assert len(level.records) == len(requests) == 9
    assert most_open <= 3
    for seen in level.records:
        assert (seen.error, seen.finish, len(seen.times_s)) == (None, "length", 2)
        assert (seen.prompt_tokens, seen.completion_tokens, seen.cached_tokens) == (9, 3, 8)
        assert seen.sent_s <= seen.times_s[0] <= seen.times_s[1] <= seen.end_s
    body = msgspec.json.decode(requests[0].split(b"\r\n\r\n", 1)[1])
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["model"]) == (5, True, True, "m")


def test_failed_requests_are_recorded_and_the_load_goes_on() -> None:
    async def load() -> LevelResult:
        refused = response(b'{"error":{"message":"full"}}', status="429 Too Many")
        broken = response(sse_body([chunk("a"), {"error": {"message": "core died"}}]))
        async with canned(refused, broken, response(sse_body([chunk("ok")]))) as (_, endpoint):
            return await run_level(endpoint, "m", list(itertools.islice(prompt_source(0, 1), 3)), 1, ignore_eos=False)

    errors = [seen.error or "" for seen in asyncio.run(load()).records]
    assert "full" in errors[0]
    assert errors[1:] == ["core died", ""]


def test_served_model_is_the_first_listed_and_none_is_an_error() -> None:
    async def ask(body: bytes) -> str:
        async with canned(response(body)) as (_, endpoint):
            return await served_model(endpoint)

    assert asyncio.run(ask(b'{"data":[{"id":"a"},{"id":"b"}]}')) == "a"
    with pytest.raises(BackendError, match="lists no model"):
        asyncio.run(ask(b'{"data":[]}'))
