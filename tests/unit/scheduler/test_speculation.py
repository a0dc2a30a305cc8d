"""Prompt lookup drafts where that saves time, and only there; what it learns follows the steps. Virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.scheduler.drive import Drive, ids_alone, request

ROUND = [5, 6, 7, 8, 9, 10]
RANDOM = random.Random(3).choices(range(1, 40), k=240)


def drive(**options: Any) -> Drive:
    return Drive(**{"speculate": "lookup", "num_blocks": 256, "max_model_len": 256, "max_step_samples": 64} | options)


def test_a_text_that_repeats_takes_fewer_steps_and_says_the_same() -> None:
    one = request("r", ROUND, 60, forced_ids=ROUND * 10)
    fast = drive()
    fast.add(one)
    fast.finish()
    assert fast.ids("r") == ids_alone(one, 256) == ROUND * 10
    assert len(fast.plans) < 30
    stats = fast.scheduler.stats
    assert 0 < stats.accepted_tokens <= stats.draft_tokens


@pytest.mark.parametrize("text", [ROUND * 40, RANDOM], ids=["repeats", "random"])
@pytest.mark.parametrize(("run_s", "token_s"), [(0.0, 0.01), (0.01, 0.004), (0.01, 0.01)])
def test_drafts_that_do_not_pay_cost_next_to_nothing(text: list[int], run_s: float, token_s: float) -> None:
    taken_s = []
    for speculate in ("off", "lookup"):
        one = drive(run_s=run_s, token_s=token_s, speculate=speculate)
        one.add(request("r", text[:6], len(text), forced_ids=text))
        one.finish()
        taken_s.append(one.clock())
    assert taken_s[1] <= 1.05 * taken_s[0]


def test_guesses_that_come_true_are_noticed_without_being_drafted() -> None:
    """Wrong ones first, so that drafting stops; then the text repeats."""
    text = RANDOM[:100] + ROUND * 20
    mixed = drive(run_s=0.01, token_s=0.004)
    mixed.add(request("r", [1], len(text), forced_ids=text))
    mixed.finish()
    at = {row.start + len(row.token_ids): len(row.token_ids) - 1 for plan in mixed.plans for row in plan.rows}
    assert sum(num for end, num in at.items() if 60 < end <= 100) <= 2
    assert sum(num for end, num in at.items() if end > 180) >= 10


def test_no_step_is_planned_past_the_gap_that_streams_were_promised() -> None:
    kept = drive(run_s=0.004, token_s=0.001, itl_slo_s=0.0065)
    kept.add(request("r", ROUND, 120, forced_ids=ROUND * 20))
    kept.finish()
    assert max(len(row.token_ids) for plan in kept.plans[20:] for row in plan.rows) == 2


def test_no_drafts_beside_a_prompt_or_more_streams_than_pay() -> None:
    many = drive(max_step_rows=8, max_step_tokens=16)
    many.add(*(request(f"r{i}", ROUND, 30, forced_ids=ROUND * 5) for i in range(5)))
    for _ in range(10):
        many.step()
    assert many.scheduler.stats.draft_tokens == 0

    beside = drive(max_step_rows=8, max_step_tokens=16, max_queue=8)
    beside.add(request("r", ROUND, 60, forced_ids=ROUND * 10))
    while beside.scheduler.stats.draft_tokens == 0:
        assert beside.step()
    beside.add(request("long", [i % 3 for i in range(150)], 2))
    while (plan := beside.step()) and any(len(row.token_ids) > 9 for row in plan.rows):
        (stream,) = [row for row in plan.rows if row.request_id == "r"]
        assert len(stream.token_ids) == 1


def test_drafts_end_where_the_request_ends() -> None:
    short = drive()
    short.add(request("r", ROUND * 4, 9, forced_ids=ROUND * 2))
    short.finish()
    assert short.ids("r") == (ROUND * 2)[:9]
    assert max(row.start + len(row.token_ids) for plan in short.plans for row in plan.rows) <= 4 * len(ROUND) + 9
