"""Random histories: whatever else runs, each request says exactly what it says alone."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.cache import POLICIES
from firstlight.errors import RequestError
from firstlight.types import CoreRequest, FinishReason
from tests.unit.scheduler.drive import VOCAB, Drive, ids_alone, prompt_logprobs_alone, request

STOP_ID = VOCAB - 1


@dataclass(frozen=True)
class Arrival:
    request: CoreRequest
    at_step: int
    abort_at_step: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Up to eight requests whose prompts share beginnings, in random order and number, some aborted on the way."""
    bases = [[(7 * i + 3 * j) % VOCAB for j in range(24)] for i in range(2)]
    found = []
    for i in range(draw(st.integers(1, 8))):
        head = draw(st.sampled_from(bases))[: draw(st.integers(0, 24))]
        tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if head else 1, max_size=6))
        is_plain = draw(st.booleans())
        one = request(
            f"r{i}",
            head + tail,
            draw(st.integers(1, 14)),
            stop_ids=[STOP_ID] if draw(st.booleans()) else [],
            arrival_s=i / 100,
            priority=draw(st.sampled_from([-1, 0, 0, 1])),
            tenant=draw(st.sampled_from([b"", b"", b"other"])),
            deadline_s=draw(st.sampled_from([None, None, 0.0, 0.02, 1.0])),
            salt=draw(st.sampled_from([b"", b"", b"tenant"])),
            seed=draw(st.integers(0, 9)),
            pins=draw(st.sampled_from([(), (), ((8, 0.01),), ((24, None), (4, 0.1))])),
            forced_ids=draw(st.sampled_from([(), (), (), (5, 6, 7), (9, STOP_ID, 9)])),
            prompt_logprobs=draw(st.sampled_from([None, None, 2])),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            **({} if is_plain else {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
        )
        begin = draw(st.integers(0, 20))
        end = draw(st.none() | st.integers(0, 25))
        found.append(Arrival(one, begin, None if end is None else begin + end))
    return found


def play(drive: Drive, history: list[Arrival]) -> dict[str, CoreRequest]:
    """Runs the history to its end; the requests that were not refused."""
    served = {}
    for at in range(60):
        for one in history:
            if one.at_step == at:
                try:
                    drive.add(one.request)
                    served[one.request.request_id] = one.request
                except RequestError:
                    assert len(one.request.prompt_ids) >= drive.scheduler.capacity_tokens
            if one.abort_at_step == at:
                drive.abort(one.request.request_id)
        drive.step()
    drive.finish()
    return served


def assert_answers_as_alone(drive: Drive, served: dict[str, CoreRequest]) -> None:
    for request_id, one in served.items():
        alone = ids_alone(one, drive.scheduler.capacity_tokens)
        ends, ids = drive.ends(request_id), drive.ids(request_id)
        assert len(ends) == 1, f"{request_id} has {len(ends)} end events"
        if ends[0] is FinishReason.ABORT:
            assert ids == alone[: len(ids)]
            continue
        if ends[0] is FinishReason.ERROR:
            assert one.deadline_s is not None
            assert ids == [], f"{request_id} was dropped for its deadline after it had begun"
            continue
        assert ids == alone
        said = drive.prompt_logprobs(request_id)
        assert said[0] == (None if one.prompt_logprobs is None else prompt_logprobs_alone(one))
        assert set(map(type, said[1:])) <= {type(None)}, "it is said once"
        assert ends[0] is (FinishReason.STOP if alone[-1] in one.stop_ids else FinishReason.LENGTH)
    cache = drive.cache
    assert cache.num_free + cache.num_pinned + cache.num_moving == drive.num_blocks
    assert {event.request_id for event in drive.events} == set(served)
    stats = drive.scheduler.stats
    assert stats.recomputed_tokens <= stats.prefill_tokens
    assert stats.recomputed_tokens == 0 or stats.preemptions > 0


def assert_plans_keep_their_bounds(drive: Drive) -> None:
    for plan in drive.plans:
        assert 0 < len(plan.rows) <= drive.max_step_rows
        assert sum(len(row.token_ids) for row in plan.rows) <= drive.max_step_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)


machines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 24),
        "block_size": st.integers(1, 6),
        "max_step_rows": st.integers(1, 6),
        "max_step_samples": st.sampled_from([0, 6, 9]),
        "max_step_tokens": st.sampled_from([6, 7, 16, 64]),
        "prefix_cache": st.booleans(),
        "max_pinned": st.sampled_from([0, 3, 24]),
        "eviction": st.sampled_from(POLICIES),
        "itl_slo_s": st.sampled_from([0.0, 0.002, 0.05]),
        "run_s": st.sampled_from([0.001, 0.1]),
        "mode": st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
        "batch_size": st.integers(1, 5),
        "reserve_output": st.booleans(),
        "speculate": st.sampled_from(["off", "lookup"]),
        "preempt": st.sampled_from(["least-work", "least-work", "last-in"]),
    }
)


@settings(max_examples=80, deadline=None)
@given(machines, arrivals())
def test_history_any_batch_answers_as_alone(machine: dict[str, int], history: list[Arrival]) -> None:
    drive = Drive(**machine)  # type: ignore[arg-type]
    served = play(drive, history)
    assert_answers_as_alone(drive, served)
    assert_plans_keep_their_bounds(drive)


@settings(max_examples=60, deadline=None)
@given(machines, arrivals(), st.integers(0, 12), st.booleans(), st.integers(0, 6))
def test_history_with_tiers_answers_as_alone(
    machine: dict[str, int], history: list[Arrival], host_blocks: int, has_disk: bool, reserve: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        disk = Path(directory) if has_disk else None
        drive = Drive(
            **machine | {"prefix_cache": True, "host_blocks": host_blocks, "disk": disk, "reserve": reserve}  # type: ignore[arg-type]
        )
        served = play(drive, history)
        assert_answers_as_alone(drive, served)
        counts = drive.cache.stats().tiers
        drive.cache.close()
    for tier in counts.values():
        assert (tier.corrupt, tier.foreign) == (0, 0)


def random_drafter(served: list[CoreRequest], capacity: int, seed: int) -> Callable[[str, list[int], int], list[int]]:
    """Guesses right about two times in three, sometimes nothing, sometimes more than it was asked for."""
    rng = random.Random(seed)
    answers = {one.request_id: [*one.prompt_ids, *ids_alone(one, capacity)] for one in served}

    def draft(request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        truth = answers[request_id][len(tokens) :][: rng.randint(0, max_drafts + 2)]
        return [token if rng.random() < 0.67 else rng.randrange(VOCAB) for token in truth]

    return draft


@settings(max_examples=50, deadline=None)
@given(machines, arrivals(), st.integers(0, 2**16))
def test_history_with_drafts_answers_as_without(machine: dict[str, int], history: list[Arrival], seed: int) -> None:
    drive = Drive(**machine)  # type: ignore[arg-type]
    capacity = drive.scheduler.capacity_tokens
    fitting = [one.request for one in history if len(one.request.prompt_ids) < capacity]
    drive = Drive(**machine, drafter=random_drafter(fitting, capacity, seed))  # type: ignore[arg-type]
    served = play(drive, history)
    assert_answers_as_alone(drive, served)
    assert_plans_keep_their_bounds(drive)


def test_perfect_drafts_are_all_accepted_and_save_steps() -> None:
    one = request("r", range(8), 24)
    truth = [*one.prompt_ids, *ids_alone(one, 64)]
    plain = Drive()
    plain.add(one)
    plain.finish()
    drafted = Drive(drafter=lambda request_id, tokens, most: truth[len(tokens) :][: min(most, 3)])
    drafted.add(one)
    drafted.finish()
    assert drafted.ids("r") == plain.ids("r")
    assert drafted.scheduler.stats.accepted_tokens == drafted.scheduler.stats.draft_tokens > 0
    assert len(drafted.plans) < len(plain.plans) / 2
