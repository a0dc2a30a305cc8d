"""Who is let in, who waits, who gives way, who is refused: lengths, tenants, deadlines, queue seconds, batch modes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import DeadlineError, OverloadedError
from firstlight.scheduler import Status, StepLoad, StepTimeModel
from firstlight.scheduler.fairness import MAX_EXCESS_TOKENS, ServedTokens
from firstlight.scheduler.lengths import PRIOR_TOKENS, OutputLengths
from firstlight.types import FinishReason
from tests.unit.scheduler.drive import Drive, request


def machine(step_s: float = 0.004, token_s: float = 0.001) -> StepTimeModel:
    model = StepTimeModel()
    for num in (1, 2, 16, 64, 3, 128, 8) * 30:
        load = StepLoad()
        load.add(0, num)
        model.observe(load, step_s + token_s * num)
    return model


def order_of_first_tokens(drive: Drive) -> list[str]:
    seen: dict[str, None] = {}
    for event in drive.events:
        if event.token_ids:
            seen.setdefault(event.request_id)
    return list(seen)


# -- output lengths


def test_lengths_without_history_expect_the_prior() -> None:
    assert OutputLengths().expect("k", 0, 4000) == PRIOR_TOKENS
    assert OutputLengths().expect("k", 0, 40) == 40


def test_lengths_follow_what_a_class_does_and_no_other() -> None:
    lengths = OutputLengths()
    for _ in range(60):
        lengths.observe("short", 20)
    assert lengths.expect("short", 0, 4000) <= 32
    assert lengths.expect("other", 0, 4000) == PRIOR_TOKENS


def test_lengths_of_an_answer_that_outlives_all_others_decay_to_its_limit() -> None:
    lengths = OutputLengths()
    for num in (10, 10, 10, 10, 10, 10, 200) * 20:
        lengths.observe("k", num)
    assert lengths.expect("k", 0, 4000) < lengths.expect("k", 30, 4000) < 4000
    assert lengths.expect("k", 3000, 4000) == 4000


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(0, 10_000), st.integers(1, 10_000))
def test_lengths_expect_more_than_there_is_and_no_more_than_allowed(past: list[int], so_far: int, left: int) -> None:
    lengths = OutputLengths()
    for num in past:
        lengths.observe("k", num)
    assert so_far < lengths.expect("k", so_far, so_far + left) <= so_far + left


# -- admission and preemption


def crowd(*, reserve_output: bool, preempt: str = "least-work") -> Drive:
    drive = Drive(num_blocks=14, max_step_rows=6, max_step_tokens=64, reserve_output=reserve_output, preempt=preempt)
    drive.add(*(request(f"r{i}", [i] * (4 + i), 12) for i in range(6)))
    drive.finish()
    return drive


def test_admission_that_reserves_output_preempts_nobody_where_greedy_does() -> None:
    greedy, careful = crowd(reserve_output=False), crowd(reserve_output=True)
    assert greedy.scheduler.stats.preemptions > 0
    assert greedy.scheduler.stats.recomputed_tokens > 0
    assert careful.scheduler.stats.preemptions == careful.scheduler.stats.recomputed_tokens == 0
    for i in range(6):
        assert greedy.ids(f"r{i}") == careful.ids(f"r{i}")


def test_preempt_last_in_takes_the_youngest_whatever_it_loses() -> None:
    drive = Drive(num_blocks=8, max_step_tokens=32, reserve_output=False, preempt="last-in")
    drive.add(request("old", [1] * 2, 24))
    drive.step()
    drive.add(request("young", [2] * 14, 12))
    while drive.scheduler.stats.preemptions == 0:
        drive.step()
    assert [s.id for s in drive.scheduler._open.states.values() if s.status is Status.PREEMPTED] == ["young"]


def test_preemption_makes_admission_more_careful_until_answers_end() -> None:
    drive = crowd(reserve_output=False)
    assert drive.scheduler._admission.caution > 0
    before = drive.scheduler._admission.caution
    for i in range(20):
        drive.add(request(f"s{i}", [1], 1))
        drive.finish()
    assert drive.scheduler._admission.caution < before / 2


# -- tenants


def test_tenant_with_many_requests_does_not_push_the_other_to_the_end() -> None:
    drive = Drive(num_blocks=64, max_step_rows=1, max_model_len=64)
    drive.add(*(request(f"greedy{i}", [i] * 8, 8, tenant=b"greedy") for i in range(12)))
    drive.step()
    drive.add(request("modest", [30] * 8, 8, tenant=b"modest"))
    drive.finish()
    assert order_of_first_tokens(drive).index("modest") == 1


def test_tenants_take_turns_by_what_was_computed_for_them() -> None:
    drive = Drive(num_blocks=64, max_step_rows=1)
    for i in range(6):
        drive.add(request(f"a{i}", [i] * 8, 4, tenant=b"a"))
    for i in range(6):
        drive.add(request(f"b{i}", [20 + i] * 8, 4, tenant=b"b"))
    drive.finish()
    order = order_of_first_tokens(drive)
    for num in range(2, 12):
        served = [name[0] for name in order[:num]]
        assert abs(served.count("a") - served.count("b")) <= 2


def test_cached_prompt_tokens_are_not_billed() -> None:
    drive = Drive(num_blocks=64)
    drive.add(request("first", range(24), 1, tenant=b"t"), request("other", [9], 40, tenant=b"o"))
    while not drive.ends("first"):
        drive.step()
    billed = drive.scheduler._served._served[b"t"]
    drive.add(request("again", range(24), 1, tenant=b"t"))
    while not drive.ends("again"):
        drive.step()
    assert drive.scheduler._served._served[b"t"] - billed <= 4 + 2


def test_served_tokens_idle_time_is_no_credit() -> None:
    served = ServedTokens()
    served.opened(b"busy")
    served.add(b"busy", 100_000, 0)
    served.opened(b"late")
    assert served.excess(b"late") == served.excess(b"busy") == 0
    served.add(b"busy", 100_000, 0)
    assert served.excess(b"busy") == MAX_EXCESS_TOKENS
    assert served.num_active == 2


# -- deadlines


def test_expired_request_is_dropped_before_any_of_it_is_computed() -> None:
    drive = Drive(max_step_rows=1, run_s=0.1)
    drive.add(request("first", [1] * 4, 8))
    drive.step()
    drive.add(request("late", [2] * 4, 8, arrival_s=drive.clock(), deadline_s=drive.clock() + 0.25))
    drive.finish()
    (event,) = [e for e in drive.events if e.request_id == "late"]
    assert event.finish is FinishReason.ERROR
    assert event.error_code == DeadlineError.code
    assert "waited 300 ms" in str(event.error)
    assert all(row.request_id != "late" for plan in drive.plans for row in plan.rows)
    assert drive.scheduler.stats.expired == 1


def test_request_that_began_before_its_deadline_runs_to_its_end() -> None:
    drive = Drive(run_s=0.1)
    drive.add(request("r", [1] * 4, 8, deadline_s=0.05))
    drive.finish()
    assert drive.ends("r") == [FinishReason.LENGTH]


# -- queue in predicted seconds


def test_queue_over_its_predicted_seconds_refuses_with_the_time_it_takes_to_fall() -> None:
    drive = Drive(max_queue_s=6.0, step_time=machine(token_s=0.1))
    drive.add(request("a", [1] * 60), request("b", [2] * 60))
    with pytest.raises(OverloadedError, match=r"would wait about 12 s, `max_queue_s` is 6") as caught:
        drive.add(request("c"))
    assert caught.value.retry_after_s == pytest.approx(6, rel=0.2)


def test_predicted_wait_counts_answers_that_must_end_first() -> None:
    drive = Drive(max_step_rows=1, step_time=machine(token_s=0.001), num_blocks=200, max_model_len=400)
    drive.add(request("a", [1], 200))
    drive.step()
    assert drive.scheduler.predicted_wait_s() > 150 * 0.004


def test_empty_queue_refuses_nobody_however_long_the_prompt() -> None:
    drive = Drive(max_queue_s=0.001, step_time=machine(token_s=1.0))
    drive.add(request("a", [1] * 40, 1))
    drive.finish()
    assert drive.ends("a")


# -- batch modes


def test_static_batch_waits_to_fill_then_runs_to_its_last_end() -> None:
    drive = Drive(mode="static", batch_size=2, batch_wait_s=5.0)
    drive.add(request("a", [1] * 3, 2))
    assert drive.step() is None
    assert drive.scheduler.wake_at_s == 5.0
    drive.clock.now_s = 1.0
    drive.add(request("b", [2] * 3, 6, arrival_s=1.0), request("c", [3] * 3, 2, arrival_s=1.0))
    while not drive.ends("b"):
        drive.step()
        assert not drive.ids("c")
    drive.finish()
    assert drive.ends("c") == [FinishReason.LENGTH]
    assert drive.clock() >= 6.0


def test_static_batch_that_does_not_fill_starts_when_the_oldest_has_waited() -> None:
    drive = Drive(mode="static", batch_size=4, batch_wait_s=0.5)
    drive.add(request("a", [1] * 3, 2))
    assert drive.step() is None
    assert drive.clock() == 0.5
    assert drive.step() is not None


@pytest.mark.parametrize(("mode", "starts_s"), [("static", 2.0), ("dynamic", 0.05), ("continuous", 0.0)])
def test_mode_says_how_long_a_batch_waits_to_fill(mode: str, starts_s: float) -> None:
    drive = Drive(mode=mode, batch_size=4)
    drive.add(request("a", [1] * 3, 2))
    while not drive.plans:
        drive.step()
    assert drive.clock() == pytest.approx(starts_s + drive.run_s)
