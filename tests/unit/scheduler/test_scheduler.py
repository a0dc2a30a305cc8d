from __future__ import annotations

import pytest

from firstlight.errors import OverloadedError, RequestError
from firstlight.scheduler import Status, StepLoad, StepTimeModel
from firstlight.scheduler.budget import STARVATION_S, STARVED_CHUNK_TOKENS
from firstlight.types import FinishReason, StepPlan
from tests.unit.scheduler.drive import VOCAB, Drive, ids_alone, request


def tokens_by_request(plan: StepPlan | None) -> dict[str, int]:
    assert plan is not None
    return {row.request_id: len(row.token_ids) for row in plan.rows}


def machine(token_s: float = 0.001) -> StepTimeModel:
    """A step-time model of a machine where a step costs 4 ms, and each token `token_s` more."""
    model = StepTimeModel()
    for num in (1, 2, 16, 64, 3, 128, 8) * 30:
        load = StepLoad()
        load.add(0, num)
        model.observe(load, 0.004 + token_s * num)
    return model


# -- intake


def test_add_prompt_of_capacity_minus_one_answers_one_token() -> None:
    drive = Drive(num_blocks=4, block_size=4)
    drive.add(request("r", range(15), 10))
    drive.finish()
    assert len(drive.ids("r")) == 1
    assert drive.ends("r") == [FinishReason.LENGTH]


@pytest.mark.parametrize("num", [16, 17, 500])
def test_add_prompt_that_leaves_no_room_for_output_is_refused(num: int) -> None:
    drive = Drive(num_blocks=4, block_size=4)
    with pytest.raises(RequestError, match=f"`prompt` is {num} tokens.*the 16 tokens"):
        drive.add(request("r", [1] * num))
    assert not drive.scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "forced", "named"),
    [
        ([], 4, (), "prompt"),
        ([VOCAB], 4, (), "prompt"),
        ([-1], 4, (), "prompt"),
        ([1], 0, (), "max_tokens"),
        ([1], 4, (VOCAB,), "forced_ids"),
    ],
)
def test_add_value_out_of_range_is_refused_by_name(
    prompt: list[int], max_tokens: int, forced: tuple[int, ...], named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        Drive().add(request("r", prompt, max_tokens, forced_ids=forced))
    assert caught.value.param == named


def test_add_open_id_is_refused_and_the_first_goes_on() -> None:
    drive = Drive()
    drive.add(request("r", [1, 2]))
    with pytest.raises(RequestError, match="in use"):
        drive.add(request("r", [3]))
    drive.finish()
    assert drive.ends("r") == [FinishReason.LENGTH]


def test_add_beyond_max_queue_is_overloaded_with_a_time() -> None:
    drive = Drive(max_queue=2, step_time=machine(token_s=0.1))
    drive.add(request("a", [1] * 40), request("b", [2] * 40))
    with pytest.raises(OverloadedError, match="2 requests wait, `max_queue` is 2") as caught:
        drive.add(request("c"))
    assert caught.value.retry_after_s == pytest.approx(80 * 0.1, rel=0.2)


# -- steps


def test_plan_nothing_open_is_none() -> None:
    assert Drive().step() is None


def test_prefill_long_prompt_is_cut_into_chunks_and_samples_only_at_its_end() -> None:
    drive = Drive(max_step_tokens=16)
    drive.add(request("r", [i % VOCAB for i in range(40)], 1))
    drive.finish()
    rows = [plan.rows[0] for plan in drive.plans]
    assert [(row.start, len(row.token_ids), row.sample_at) for row in rows] == [
        (0, 16, ()),
        (16, 16, ()),
        (32, 8, (7,)),
    ]


def test_streams_are_in_every_step_whatever_waits() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=8, step_time=machine())
    drive.add(request("stream", [1], 20))
    drive.step()
    drive.add(*(request(f"long{i}", [i] * 40, 2) for i in range(3)))
    while not drive.ends("stream"):
        assert tokens_by_request(drive.step())["stream"] == 1


def test_prefill_beside_streams_keeps_the_step_inside_the_promise() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=128, max_step_rows=8, itl_slo_s=0.025, step_time=machine())
    drive.add(request("stream", [1], 30))
    drive.step()
    drive.add(request("long", [2] * 60, 1))
    num = tokens_by_request(drive.step())["long"]
    assert 15 <= num <= 21
    assert drive.step_time.predict_s(StepLoad(rows=2, tokens=num + 1, attended=2000)) < 0.027


def test_prefill_without_streams_takes_the_whole_step() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=48, itl_slo_s=0.001, step_time=machine())
    drive.add(request("long", [2] * 60, 1))
    assert tokens_by_request(drive.step()) == {"long": 48}


@pytest.mark.parametrize(("token_s", "low", "high"), [(0.002, 110, 125), (0.1, 64, 64), (0.00001, 200, 200)])
def test_prefill_without_streams_does_not_make_a_newcomer_wait_long(token_s: float, low: int, high: int) -> None:
    step_time = machine(token_s=token_s)
    drive = Drive(num_blocks=64, max_step_tokens=256, max_model_len=256, step_time=step_time)
    drive.add(request("long", [2] * 200, 1))
    assert low <= tokens_by_request(drive.step())["long"] <= high


def test_prefill_with_no_time_left_gets_a_least_chunk_at_the_starvation_bound() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=64, itl_slo_s=0.001, step_time=machine(), run_s=0.05)
    drive.add(request("stream", [1], 50))
    drive.step()
    drive.add(request("long", [2] * 60, 1))
    seen = []
    for _ in range(13):
        num = tokens_by_request(drive.step()).get("long", 0)
        seen += [(drive.clock(), num)] if num else []
    assert [num for _, num in seen] == [STARVED_CHUNK_TOKENS] * 2
    assert seen[1][0] - seen[0][0] == pytest.approx(STARVATION_S, abs=0.06)


def test_order_short_prompt_overtakes_a_long_one() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=16)
    drive.add(request("long", [1] * 60, 1, arrival_s=0.0))
    drive.step()
    drive.add(request("short", [2] * 4, 1, arrival_s=0.001))
    assert list(tokens_by_request(drive.step())) == ["short", "long"]


def test_order_request_that_waited_long_is_overtaken_no_more() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=16)
    drive.add(request("long", [1] * 60, 1, arrival_s=0.0))
    drive.add(request("short", [2] * 4, 1, arrival_s=60 / 500 + 0.001))
    assert list(tokens_by_request(drive.step())) == ["long"]


def test_order_more_urgent_class_goes_first() -> None:
    drive = Drive(num_blocks=64, max_step_tokens=16)
    drive.add(request("later", [1] * 4, 1, priority=1), request("first", [2] * 60, 1, priority=0))
    assert list(tokens_by_request(drive.step())) == ["first"]


def test_rows_are_bounded_and_the_rest_waits() -> None:
    drive = Drive(max_step_rows=2, num_blocks=64)
    drive.add(*(request(f"r{i}", [i], 3) for i in range(5)))
    drive.step()
    assert (drive.scheduler.num_running, drive.scheduler.num_waiting) == (2, 3)
    drive.finish()
    assert all(drive.ends(f"r{i}") == [FinishReason.LENGTH] for i in range(5))


# -- the prefix cache


def test_second_equal_prompt_computes_only_what_no_full_block_holds() -> None:
    drive = Drive(block_size=4)
    prompt = list(range(13))
    drive.add(request("first", prompt, 1))
    drive.finish()
    drive.add(request("second", prompt, 1))
    assert tokens_by_request(drive.step()) == {"second": 1}
    assert drive.events[-1].cached_tokens == 12


def test_whole_prompt_hit_still_computes_the_last_token() -> None:
    drive = Drive(block_size=4)
    drive.add(request("first", range(12), 1))
    drive.finish()
    drive.add(request("second", range(12), 1))
    assert tokens_by_request(drive.step()) == {"second": 1}
    assert drive.ids("second") == drive.ids("first")


def test_prompt_that_leaves_a_cached_one_inside_a_block_copies_what_is_equal() -> None:
    drive = Drive(block_size=4)
    drive.add(request("first", range(12), 1))
    drive.finish()
    wanted = request("second", [*range(10), 30, 31, 32], 4)
    drive.add(wanted)
    plan = drive.step()
    assert tokens_by_request(plan) == {"second": 3}
    assert plan is not None
    assert len(plan.copy_blocks) == 1
    drive.finish()
    assert drive.ids("second") == ids_alone(wanted, 64)
    assert drive.reports["second"].hit_tokens == 10


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    drive = Drive(num_blocks=64, block_size=4, max_step_rows=8, max_step_tokens=64)
    prompt = [i % VOCAB for i in range(41)]
    drive.add(*(request(f"r{i}", prompt, 2) for i in range(5)))
    drive.finish()
    assert drive.scheduler.stats.prefill_tokens == 41 + 4 * 1
    assert len({tuple(drive.ids(f"r{i}")) for i in range(5)}) == 1


def test_waiting_for_an_equal_prefix_ends_when_its_owner_is_aborted() -> None:
    drive = Drive(num_blocks=64, block_size=4, max_step_tokens=16)
    prompt = [i % VOCAB for i in range(41)]
    drive.add(request("owner", prompt, 2), request("second", prompt, 2))
    assert list(tokens_by_request(drive.step())) == ["owner"]
    drive.abort("owner")
    assert tokens_by_request(drive.step()) == {"second": 16}
    drive.finish()
    assert drive.ids("second") == ids_alone(request("second", prompt, 2), 64)


def test_urgent_request_does_not_wait_for_an_equal_prefix_of_a_lower_class() -> None:
    drive = Drive(num_blocks=64, block_size=4, max_step_tokens=16)
    prompt = [i % VOCAB for i in range(41)]
    drive.add(request("owner", prompt, 2, priority=1))
    drive.step()
    drive.add(request("urgent", prompt, 2, priority=0))
    assert list(tokens_by_request(drive.step())) == ["urgent"]


def test_next_turn_reuses_the_blocks_of_the_answer() -> None:
    drive = Drive(block_size=4)
    drive.add(request("first", range(6), 8))
    drive.finish()
    drive.add(request("second", [*range(6), *drive.ids("first"), 1, 2], 1))
    drive.finish()
    assert drive.events[-1].cached_tokens == 13


# -- preemption


def full_pool(**options: int) -> Drive:
    """Two streams that together outgrow the pool: "old" has computed more than "young"."""
    drive = Drive(reserve_output=False, num_blocks=8, block_size=4, max_step_tokens=32, **options)
    drive.add(request("old", [1] * 10, 20))
    drive.step()
    drive.add(request("young", [2] * 8, 12, priority=options.get("priority", 0)))
    return drive


def test_preemption_takes_the_request_that_loses_least_and_both_answer_as_alone() -> None:
    drive = full_pool()
    while drive.scheduler.stats.preemptions == 0:
        drive.step()
    (victim,) = [s for s in drive.scheduler._open.states.values() if s.status is Status.PREEMPTED]
    assert victim.id == "young"
    assert victim.num_output > 0
    drive.finish()
    assert drive.ids("old") == ids_alone(request("old", [1] * 10, 20), 32)
    assert drive.ids("young") == ids_alone(request("young", [2] * 8, 12), 32)


def test_preempted_request_returns_before_newcomers() -> None:
    drive = full_pool()
    while drive.scheduler.stats.preemptions == 0:
        drive.step()
    drive.add(request("new", [3] * 2, 1))
    while len(drive.scheduler._open.decodes) == 1:
        rows = tokens_by_request(drive.step())
    assert "new" not in rows


def test_preempted_request_returns_only_after_another_has_ended() -> None:
    drive = full_pool()
    while drive.scheduler.stats.preemptions == 0:
        drive.step()
    while not drive.ends("old"):
        assert list(tokens_by_request(drive.step())) == ["old"]
    assert drive.scheduler.stats.preemptions == 1
    assert list(tokens_by_request(drive.step())) == ["young"]


def test_preemption_spares_the_more_urgent_class() -> None:
    drive = Drive(reserve_output=False, num_blocks=8, block_size=4, max_step_tokens=32)
    drive.add(request("old", [1] * 10, 20, priority=1))
    drive.step()
    drive.add(request("young", [2] * 8, 12, priority=0))
    while drive.scheduler.stats.preemptions == 0:
        drive.step()
    assert [s.id for s in drive.scheduler._open.states.values() if s.status is Status.PREEMPTED] == ["old"]


def test_one_request_alone_can_fill_the_whole_pool() -> None:
    drive = Drive(num_blocks=4, block_size=4)
    drive.add(request("r", [1], 100))
    drive.finish()
    assert len(drive.ids("r")) == 15
    assert drive.scheduler.stats.preemptions == 0


# -- ends


def test_stop_id_ends_the_answer_and_is_part_of_it() -> None:
    drive = Drive()
    drive.add(request("r", [1], 9, forced_ids=(4, 5, 6, 7), stop_ids=[6]))
    drive.finish()
    assert drive.ids("r") == [4, 5, 6]
    assert drive.ends("r") == [FinishReason.STOP]


def test_stop_id_inside_accepted_drafts_drops_what_follows() -> None:
    forced = (4, 5, 6, 7, 8)
    drive = Drive(drafter=lambda request_id, tokens, most: list(forced[len(tokens) - 1 :][:most]))
    drive.add(request("r", [1], 9, forced_ids=forced, stop_ids=[6]))
    drive.finish()
    assert drive.ids("r") == [4, 5, 6]
    assert len(drive.plans) == 2


@pytest.mark.parametrize("where", ["waiting", "prefill", "decode", "preempted"])
def test_abort_in_every_state_ends_once_and_frees_all(where: str) -> None:
    drive = full_pool() if where == "preempted" else Drive(num_blocks=32, max_step_tokens=8)
    if where != "preempted":
        drive.add(request("young", [1] * 20, 9))
    steps = {"waiting": 0, "prefill": 1, "decode": 4, "preempted": 100}[where]
    for _ in range(steps):
        if drive.scheduler.stats.preemptions == 0:
            drive.step()
    event = drive.abort("young")
    assert event is not None
    assert event.finish is FinishReason.ABORT
    assert drive.abort("young") is None
    assert drive.scheduler.stats.aborted[where] == 1
    drive.finish()
    assert drive.ends("young") == [FinishReason.ABORT]


def test_fail_all_between_plan_and_absorb_ends_everything_and_frees_all() -> None:
    drive = Drive()
    drive.add(request("a", [1] * 20), request("b", [2]))
    drive.step()
    drive.scheduler.plan()
    events = drive.scheduler.fail_all("it broke")
    assert sorted((e.request_id, e.finish, e.error) for e in events) == [
        ("a", FinishReason.ERROR, "it broke"),
        ("b", FinishReason.ERROR, "it broke"),
    ]
    drive.scheduler.check()
    assert not drive.scheduler.has_work


def test_finished_ids_are_told_to_the_backend_once() -> None:
    drive = Drive()
    drive.add(request("a", [1], 1), request("b", [2], 3))
    drive.finish()
    assert [plan.finished_ids for plan in drive.plans] == [[], ["a"], []]


def test_first_event_says_when_the_request_was_first_scheduled() -> None:
    drive = Drive()
    drive.clock.advance(5.0)
    drive.add(request("r", [1], 2, arrival_s=5.0))
    drive.finish()
    assert [event.first_scheduled_s for event in drive.events] == [5.0, None]


def cached_after_the_queue(eviction: str) -> int:
    """Prompt tokens that a request in the queue finds in the end, though others needed room before it."""
    drive = Drive(num_blocks=16, block_size=4, max_step_rows=1, eviction=eviction)
    asked = [1] * 16
    drive.add(request("before", asked, 2), request("later", [4] * 16, 2, priority=1))
    drive.finish()
    drive.add(request("long", [2] * 20, 24), request("waits", [*asked, 3], 2, priority=1))
    drive.finish()
    return drive.reports["waits"].hit_tokens


def test_queue_finds_its_prefix_where_the_policy_looks_ahead() -> None:
    assert cached_after_the_queue("conversation") == 16
    assert cached_after_the_queue("lru") < 16
