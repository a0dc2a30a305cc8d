"""The same answer by another road, on the default model and 200 real prompts: ids and log-probabilities bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from firstlight import Engine, SamplingParams

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "prompts.jsonl"
MAX_BYTES = 160
"""Prompts are cut here so that all of them fit the time of a test suite."""

Answer = list[tuple[list[int], list[tuple[int, float, list[tuple[int, float]]]]]]


def _prompts() -> list[str]:
    rows = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(row)["text"].encode()[:MAX_BYTES].decode(errors="ignore") for row in rows]


def _params(count: int) -> list[SamplingParams]:
    """Every second answer is sampled, the others are greedy; all give log-probabilities with rivals."""
    return [
        SamplingParams(temperature=0.8 * (i % 2), top_p=0.95, seed=i, max_tokens=4, logprobs=3, ignore_eos=True)
        for i in range(count)
    ]


def _answers(engine: Engine, prompts: list[str]) -> Answer:
    done = engine.generate(prompts, _params(len(prompts)))
    return [(answer.token_ids, [(x.token_id, x.logprob, x.top) for x in answer.logprobs or []]) for answer in done]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Answer:
    """Each prompt alone: one row a step, nothing cached, one thread."""
    prompts = _prompts()
    with Engine(str(smollm2_path), threads=1, max_step_rows=1, prefix_cache=False, num_blocks=256) as engine:
        answers = _answers(engine, prompts)
    assert len(answers) == 200
    assert all(len(ids) == 4 for ids, _ in answers)
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2, "max_step_rows": 32},
        {"threads": 2, "max_step_rows": 32, "max_step_tokens": 37},
        {"threads": 3, "max_step_rows": 8, "max_step_tokens": 64, "num_blocks": 64},
    ],
    ids=["batched", "small-chunks", "little-memory"],
)
def test_answers_by_another_road_are_equal_to_the_bit(
    reference: Answer, smollm2_path: Path, options: dict[str, int]
) -> None:
    prompts = _prompts()
    with Engine(str(smollm2_path), **options) as engine:
        assert _answers(engine, prompts) == reference
        engine.check()


def test_answers_from_a_warm_cache_are_equal_to_the_bit(reference: Answer, smollm2_path: Path) -> None:
    prompts = _prompts()[:100]
    with Engine(str(smollm2_path), threads=2) as engine:
        assert _answers(engine, prompts) == reference[:100]
        assert _answers(engine, prompts) == reference[:100]
        assert engine.stats().cache.hit_tokens > 0


def test_answers_from_host_memory_are_equal_to_the_bit(reference: Answer, smollm2_path: Path) -> None:
    prompts = _prompts()[:80]
    with Engine(str(smollm2_path), threads=2, num_blocks=48, max_step_rows=8, host_cache_mb=200) as engine:
        assert _answers(engine, prompts) == reference[:80]
        assert _answers(engine, prompts) == reference[:80]
        assert engine.stats().cache.tiers["host"].loaded > 50
        engine.check()


def test_answers_from_disk_after_a_restart_are_equal_to_the_bit(
    reference: Answer, smollm2_path: Path, tmp_path: Path
) -> None:
    prompts = _prompts()[:80]
    options = {"threads": 2, "num_blocks": 64, "max_step_rows": 8, "disk_cache": str(tmp_path)}
    with Engine(str(smollm2_path), **options) as engine:
        assert _answers(engine, prompts) == reference[:80]
    with Engine(str(smollm2_path), **options) as engine:
        assert _answers(engine, prompts) == reference[:80]
        assert engine.stats().cache.tiers["disk"].loaded > 50
        engine.check()


def test_answers_after_preemption_to_host_memory_are_equal_to_the_bit(smollm2_path: Path) -> None:
    prompts = _prompts()[:12]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=60, logprobs=2, ignore_eos=True) for i in range(12)]

    def answers(engine: Engine) -> list[object]:
        done = engine.generate(prompts, params)
        return [(answer.token_ids, [(x.token_id, x.logprob, x.top) for x in answer.logprobs or []]) for answer in done]

    with Engine(str(smollm2_path), threads=2, num_blocks=256) as engine:
        roomy = answers(engine)
        assert engine.stats().scheduler.preemptions == 0
    options = {"num_blocks": 24, "reserve_output": False, "host_cache_mb": 100}
    with Engine(str(smollm2_path), threads=2, max_step_rows=12, **options) as engine:
        assert answers(engine) == roomy
        stats = engine.stats()
        assert stats.scheduler.preemptions > 0
        assert stats.cache.tiers["host"].loaded > 0


@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
def test_answers_to_equal_prompts_that_arrive_together_are_equal_to_the_bit(
    reference: Answer, smollm2_path: Path, mode: str
) -> None:
    prompts, params = _prompts()[:30], _params(30)
    with Engine(str(smollm2_path), threads=2, max_step_rows=32, mode=mode, batch_size=8) as engine:
        done = engine.generate([p for p in prompts for _ in range(3)], [p for p in params for _ in range(3)])
        got = [(answer.token_ids, [(x.token_id, x.logprob, x.top) for x in answer.logprobs or []]) for answer in done]
        assert got == [answer for answer in reference[:30] for _ in range(3)]
        assert engine.stats().cache.hit_tokens > 0


def test_audit_of_real_hits_finds_every_bit_equal(smollm2_path: Path) -> None:
    prompts = _prompts()[:20]
    with Engine(str(smollm2_path), threads=2, audit_share=1.0) as engine:
        _answers(engine, prompts)
        _answers(engine, prompts)
        give_up_s = time.monotonic() + 60
        while engine.stats().cache.audits < 10 and time.monotonic() < give_up_s:
            time.sleep(0.1)
        stats = engine.stats().cache
    assert stats.audits >= 10
    assert stats.audit_mismatches == 0
