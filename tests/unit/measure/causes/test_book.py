from __future__ import annotations

import threading
import time

import pytest

from firstlight.measure.causes import FinishedRequest, FinishedRing, Stamps, StepShare, TraceBook
from firstlight.measure.causes import finished as finished_module
from firstlight.measure.causes.run_delay import RunDelay, cpu_ns, machine_s, workers
from tests.unit.measure.causes.histories import step, trace


def request(name: str, e2e_s: float = 0.1, ttft_s: float | None = 0.1, num_steps: int = 1) -> FinishedRequest:
    steps = [step(0.0, 0.1, StepShare("me", 0, 1, True)) for _ in range(num_steps)]
    return FinishedRequest(
        answer_id=name,
        request_id=name + "-sent",
        route="/v1/completions",
        status=200,
        finish="length",
        is_stream=True,
        arrival_unix_s=0.0,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        ttft_s=ttft_s,
        longest_gap_s=0.0,
        gap_end_s=None,
        stamps=Stamps(arrival_s=0.0, end_s=e2e_s),
        traces=[trace(1, 0.0, *steps, end_s=e2e_s)],
    )


def test_book_gives_each_request_its_steps_and_why_it_waited() -> None:
    book = TraceBook()
    early, late = book.open("early", 4, 0.0), book.open("late", 4, 0.015)
    book.taken("early", 0.001)
    book.waited(0.01, 0.02, "order")
    book.stepped(step(0.01, 0.02, StepShare("early", 0, 4, True)))
    book.taken("late", 0.02)
    book.waited(0.02, 0.03, "kv")
    book.waited(0.03, 0.04, "kv")
    book.ended(["early"], 0.04)
    book.stepped(step(0.04, 0.05, StepShare("late", 0, 4, True)))
    book.ended(["late"], 0.05)
    assert (len(early.steps), early.end_s, early.waits) == (1, 0.04, [])
    waits = [(wait.start_s, wait.end_s, wait.reason) for wait in late.waits]
    assert waits == [(0.01, 0.02, "order"), (0.02, 0.04, "kv")]
    book.stepped(step(0.05, 0.06, StepShare("late", 4, 1, False)))
    assert len(late.steps) == 1, "nothing is added to a request that has ended"


def test_book_keeps_why_a_request_waited_that_never_ran() -> None:
    book = TraceBook()
    refused, waiting = book.open("refused", 4, 0.0), book.open("waiting", 4, 0.0)
    book.forget("refused")
    book.waited(0.0, 0.5, "kv", held=[("waiting", "load")])
    book.ended(["refused", "waiting"], 1.0)
    assert refused.end_s is None
    assert (waiting.end_s, [wait.reason for wait in waiting.waits]) == (1.0, ["kv", "load"])


def test_ring_forgets_recent_requests_before_slow_ones() -> None:
    ring = FinishedRing(slow_ttft_s=0.5, slow_gap_s=0.5)
    ring.add(request("slow", e2e_s=2.0, ttft_s=1.0))
    for at in range(finished_module.NUM_RECENT):
        ring.add(request(f"r{at}"))
    assert ring.find("slow") is not None
    assert [r.answer_id for r in ring.slowest(1)] == ["slow"]
    assert len(ring.recent(10_000)) == finished_module.NUM_RECENT
    assert ring.recent(1)[0].answer_id == f"r{finished_module.NUM_RECENT - 1}"
    assert ring.find("r0") is not None
    ring.add(request("last"))
    assert ring.find("r0") is None
    assert ring.find("last-sent") is not None


def test_ring_is_bounded_by_the_steps_it_refers_to() -> None:
    ring = FinishedRing(slow_ttft_s=0.5, slow_gap_s=0.5)
    for at in range(6):
        ring.add(request(f"r{at}", num_steps=finished_module.MAX_STEP_REFS // 4))
    assert [r.answer_id for r in ring.recent(9)] == ["r5", "r4", "r3", "r2"]


def test_ring_ranks_a_request_without_a_first_token_by_its_whole_time() -> None:
    ring = FinishedRing(slow_ttft_s=0.5, slow_gap_s=0.5)
    ring.add(request("early", e2e_s=9.0, ttft_s=0.1))
    ring.add(request("never", e2e_s=3.0, ttft_s=None))
    assert [r.answer_id for r in ring.slowest(2, "ttft")] == ["never", "early"]
    assert [r.answer_id for r in ring.slowest(2, "e2e")] == ["early", "never"]


def test_run_delay_without_threads_to_read_is_none() -> None:
    delay = RunDelay([2**22 + 1])
    assert delay.since_last_s() == 0.0
    delay.close()


def test_machine_takes_the_share_of_the_threads_that_a_neighbour_kept_away() -> None:
    assert machine_s(0.003, 0.010, 2, ran_alone=False) == 0.003
    assert machine_s(0.002, 0.010, 2, ran_alone=True) == pytest.approx(0.002 + 0.004)
    assert machine_s(0.012, 0.010, 4, ran_alone=True) == 0.012
    assert machine_s(0.0, 0.010, 1, ran_alone=True) == 0.0


@pytest.mark.skipif(not cpu_ns(), reason="this system keeps no counts per thread")
def test_workers_are_the_threads_that_ran_since() -> None:
    before, is_done, may_end = cpu_ns(), threading.Event(), threading.Event()
    others = [thread.native_id for thread in threading.enumerate()]

    def work() -> None:
        while time.thread_time() < 0.05:
            pass
        is_done.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_done.wait()
    found, known = workers(others, before), workers([*others, thread.native_id], before)
    may_end.set()
    thread.join()
    assert found == [thread.native_id]
    assert thread.native_id not in known
