from __future__ import annotations

from typing import Any

import pytest

from firstlight.measure.causes import CAUSES
from firstlight.measure.causes.advice import COLD_CACHE, FAMILIES, verdict


def view(totals_ms: dict[str, float], **more: Any) -> dict[str, Any]:
    known = {"e2e_ms": sum(totals_ms.values()), "ttft_ms": 50.0, "totals_ms": totals_ms, "ttft_totals_ms": {}}
    return known | {"prompt_tokens": 600, "cached_tokens": 0, "beside": []} | more


def test_every_cause_has_one_family() -> None:
    listed = [cause for causes in FAMILIES.values() for cause in causes]
    assert sorted(listed) == sorted(CAUSES)


@pytest.mark.parametrize(
    ("totals_ms", "cause", "change"),
    [
        ({"prefill.own": 50, "decode.own": 900, "queue.kv": 640, "preempted": 10}, "queue.kv", "--kv-memory-mb"),
        ({"decode.own": 900, "queue.kv": 100, "preempted": 300}, "preempted", "--kv-memory-mb"),
        ({"decode.own": 100, "client_slow": 400, "machine": 50}, "client_slow", "network"),
        ({"decode.own": 400, "machine": 390, "decode.shared": 100}, "machine", "doctor"),
        ({"decode.own": 400, "decode.chunks": 200, "queue.order": 100}, "decode.chunks", "batch"),
        ({"decode.own": 400, "decode.chunks": 60, "queue.order": 90}, "queue.order", "interactive"),
        ({"decode.own": 400, "template": 10, "tokenise": 200}, "tokenise", "text"),
        ({"decode.own": 400, "machine": 40, "queue.kv": 40}, "decode.own", "nothing stood in the way"),
    ],
)
def test_verdict_names_what_was_in_the_way(totals_ms: dict[str, float], cause: str, change: str) -> None:
    got = verdict(view(totals_ms))
    assert got["cause"] == cause
    assert change in got["change"]
    assert f"{totals_ms[cause]:.0f} of {sum(totals_ms.values()):.0f} ms" in got["sentence"]


def test_verdict_of_a_cold_prompt_says_how_much_was_cached() -> None:
    totals = {"prefill.own": 400.0, "decode.own": 500.0}
    got = verdict(view(totals, ttft_ms=410.0, ttft_totals_ms={"prefill.own": 400.0}, cached_tokens=16))
    assert got["cause"] == "prefill.own"
    assert "584 of 600 prompt tokens" in got["sentence"]


def test_verdict_counts_what_the_client_took_after_the_end() -> None:
    totals = {"decode.own": 400.0, "machine": 100.0}
    got = verdict(view(totals, delivery_ms=1500.0))
    assert (got["family"], got["cause"]) == ("client", "client_slow")
    assert "1500 of 2000 ms" in got["sentence"]
    assert "1500 ms of it after the answer had ended" in got["sentence"]
    assert got["share"] == 0.75


def test_verdict_of_a_prompt_that_had_been_cached_is_the_cold_cache() -> None:
    totals = {"prefill.own": 400.0, "decode.own": 500.0, "machine": 450.0}
    miss = {"first_token": 16, "reason": "evicted"}
    until_first = {"prefill.own": 400.0, "machine": 100.0}
    got = verdict(view(totals, ttft_totals_ms=until_first, cached_tokens=16, cache_miss=miss))
    assert (got["family"], got["cause"]) == (COLD_CACHE, "prefill.own")
    assert "made room for others" in got["sentence"]
    assert "--kv-memory-mb" in got["change"]
    assert verdict(view(totals, ttft_totals_ms=until_first))["family"] == "machine"
    little = view({**totals, "prefill.own": 20.0}, ttft_totals_ms={**until_first, "prefill.own": 20.0}, cache_miss=miss)
    assert verdict(little)["family"] == "machine", "the machine would have taken its time without the miss too"


def test_verdict_names_the_neighbour() -> None:
    beside = [
        {"id": "streams", "steps": 90, "prefill_tokens": 3, "decode_tokens": 9000},
        {"id": "huge", "steps": 12, "prefill_tokens": 4000, "decode_tokens": 1},
    ]
    got = verdict(view({"decode.own": 400.0, "decode.chunks": 300.0}, beside=beside))
    assert "huge computed 4000 prompt tokens in 12 of its steps" in got["sentence"]


@pytest.mark.parametrize(
    ("reason", "said"), [("diverged", "differs from token 32 on"), ("evicted", "made room"), ("not_cached", "nothing")]
)
def test_verdict_says_where_a_prompt_left_the_cache(reason: str, said: str) -> None:
    miss = {"first_token": 32, "reason": reason}
    totals = {"prefill.own": 400.0, "decode.own": 500.0}
    got = verdict(view(totals, ttft_totals_ms={"prefill.own": 400.0}, cache_miss=miss))
    assert said in got["sentence"]
