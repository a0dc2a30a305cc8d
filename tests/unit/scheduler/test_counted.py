from __future__ import annotations

import random
from collections import defaultdict

import pytest

from firstlight.cache import KVCache, make_policy
from firstlight.errors import RequestError
from firstlight.scheduler import CountedScheduler, Scheduler, SchedulerLimits, StepTimeModel
from firstlight.types import CoreRequest, RowResult, StepResult, TokenEvent

from .drive import request

SAID = 2**20
SIZE = 4


def crowd(rng: random.Random, num: int = 60) -> list[CoreRequest]:
    """Requests with common beginnings, of several priorities and tenants, more than the blocks can hold at once."""
    beginnings = [[i] * (SIZE * rng.randrange(1, 6)) for i in range(4)]
    return [
        request(
            str(i),
            rng.choice(beginnings) + [100 + i] * rng.randrange(1, 20),
            rng.randrange(1, 40),
            arrival_s=round(rng.random() * 1.5, 3),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            tenant=rng.choice((b"", b"", b"other")),
        )
        for i in range(num)
    ]


class Run:
    """One scheduler over the requests on a clock that steps move on, and when everybody got their tokens."""

    def __init__(self, kind: type[Scheduler], requests: list[CoreRequest], **options: object) -> None:
        self.now_s = 0.0
        self.times: dict[str, list[float]] = defaultdict(list)
        self.ends: list[tuple[str, float]] = []
        self.loads: list[tuple[int, int, int, int]] = []
        self._ends_s: list[float] = []
        cache = KVCache(40, SIZE, b"", policy=make_policy("lfu", 40))
        limits = SchedulerLimits(
            max_step_rows=8,
            max_step_tokens=24,
            max_model_len=120,
            vocab_size=2**21,
            **options,  # type: ignore[arg-type]
        )
        extra = {"output_token": SAID} if kind is CountedScheduler else {}
        self.scheduler = kind(cache, limits, clock=lambda: self.now_s, step_time=StepTimeModel(), **extra)
        self._requests = sorted(requests, key=lambda one: one.arrival_s)
        while self._requests or self.scheduler.has_work:
            self._step()

    def _step(self) -> None:
        scheduler = self.scheduler
        while self._requests and self._requests[0].arrival_s <= self.now_s:
            scheduler.add(self._requests.pop(0))
        plan = scheduler.plan()
        if plan is None:
            self.now_s = min(scheduler.wake_at_s or 1e9, self._requests[0].arrival_s if self._requests else 1e9)
            return
        load = scheduler.planned_load
        self.loads.append((load.rows, load.tokens, load.context, load.attended))
        run_s = 0.002 + 0.0005 * load.tokens + 1e-5 * load.context
        self.now_s += run_s
        rows = [RowResult(request_id=row.request_id, token_ids=[SAID] * len(row.sample_at)) for row in plan.rows]
        self._note(scheduler.absorb(StepResult(step_id=plan.step_id, rows=rows, run_s=run_s)))
        if plan.step_id % 11 == 0:
            scheduler.unused_slots()  # looks at every stream
            scheduler.check()

    def _note(self, events: list[TokenEvent]) -> None:
        if isinstance(self.scheduler, CountedScheduler):
            if self.scheduler.num_stream_steps > len(self._ends_s):
                self._ends_s.append(self.now_s)
            for span in self.scheduler.take_spans():
                self.times[span.request_id] += self._ends_s[span.first : span.end]
        for event in events:
            self.times[event.request_id] += [self.now_s] * len(event.token_ids)
            if event.finish is not None:
                self.ends.append((event.request_id, self.now_s))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("reserve_output", [True, False])
def test_counted_streams_get_their_tokens_when_spelled_out_ones_do(seed: int, mode: str, reserve_output: bool) -> None:
    requests = crowd(random.Random(seed))
    spelled, counted = (
        Run(kind, requests, mode=mode, reserve_output=reserve_output) for kind in (Scheduler, CountedScheduler)
    )
    assert counted.loads == spelled.loads
    assert counted.times == spelled.times
    assert counted.ends == spelled.ends
    assert counted.scheduler.stats == spelled.scheduler.stats
    assert counted.scheduler.cache.stats() == spelled.scheduler.cache.stats()
    if not reserve_output and mode == "continuous":
        assert counted.scheduler.stats.preemptions > 0


def test_counted_request_that_ends_by_what_it_says_is_refused() -> None:
    scheduler = CountedScheduler(
        KVCache(8, SIZE, b""),
        SchedulerLimits(max_step_rows=1, max_step_tokens=8, max_model_len=32, vocab_size=SAID + 1),
        clock=lambda: 0.0,
        step_time=StepTimeModel(),
        output_token=SAID,
    )
    with pytest.raises(RequestError, match="stop_ids"):
        scheduler.add(request(stop_ids=[3]))


def test_counted_stream_that_is_aborted_gives_its_blocks_back() -> None:
    run = Run(CountedScheduler, [])
    scheduler = run.scheduler
    scheduler.add(request("r", [1] * 9, 30))
    for _ in range(7):
        run._step()
    assert scheduler.abort("r") is not None
    scheduler.check()
    assert scheduler.cache.num_free == scheduler.cache.num_blocks
