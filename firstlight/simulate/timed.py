"""The trace on a virtual clock: the engine's scheduler and cache plan every step, hardware says how long it takes.

Knows tokens as numbers without meaning; output tokens are as many as the trace recorded.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from firstlight.cache import KVCache, make_policy
from firstlight.errors import ConfigError, RequestError
from firstlight.measure.bench import LevelResult, RequestRecord
from firstlight.scheduler import CountedScheduler, SchedulerLimits, StepTimeModel
from firstlight.simulate.hardware import Hardware
from firstlight.simulate.trace import Trace, TraceRequest
from firstlight.types import CoreRequest, RowResult, SamplingParams, StepPlan, StepResult, TokenEvent

__all__ = ["ROUTINGS", "Setup", "Timed", "simulate"]

ROUTINGS = ("prefix", "round-robin")
PREFIX_MAX_LEAD = 2
"""Routing by prefix sends a request elsewhere when the replica that knows it has so many times the open requests of the
least loaded one, and more than PREFIX_MIN_OPEN."""
PREFIX_MIN_OPEN = 8
VOCAB = 2**32
FIRST_OWN = 2**31
"""Token ids from here on stand for what no other request has: output, and prompts the trace says nothing about."""
NEVER_S = float("inf")
LEARN_EVERY = 8
"""The simulated machine does not change: the model of it is settled soon, and learning is a fifth of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. `cache_blocks` 0: as many as fit the hardware's memory."""

    hardware: Hardware
    policy: str = "lru"
    cache_blocks: int = 0
    num_replicas: int = 1
    routing: str = "prefix"
    mode: str = "continuous"
    batch_size: int = 8
    itl_slo_s: float = 0.0


@dataclass(slots=True)
class Timed:
    """What happened. Written by `simulate` alone."""

    level: LevelResult
    refused: int
    """Requests longer than context or cache allow."""
    num_steps: int
    mean_rows: float
    occupancy_mean: float
    """Share of KV blocks that running requests held, over time."""
    occupancy_max: float
    preemptions: int
    prompt_tokens: int
    cached_tokens: int


class _Replica:
    """One engine: scheduler, cache, and a clock that its steps move on."""

    def __init__(self, setup: Setup, block_size: int, num_blocks: int) -> None:
        hardware = setup.hardware
        limits = SchedulerLimits(
            max_step_rows=hardware.max_step_rows,
            max_step_tokens=hardware.max_step_tokens,
            max_model_len=hardware.max_model_len,
            vocab_size=VOCAB,
            max_queue=2**31,
            itl_slo_s=setup.itl_slo_s,
            mode=setup.mode,
            batch_size=setup.batch_size,
        )
        cache = KVCache(num_blocks, block_size, b"trace", policy=make_policy(setup.policy, num_blocks))
        self.now_s = 0.0
        self.scheduler = CountedScheduler(
            cache,
            limits,
            clock=lambda: self.now_s,
            step_time=StepTimeModel(learn_every=LEARN_EVERY),
            output_token=FIRST_OWN,
        )
        self.inbox: deque[CoreRequest] = deque()
        self.next_s = NEVER_S
        """When its step ends, or when it wants to plan again; infinity while it is idle."""
        self.num_open = 0
        self.num_rows = 0
        self.held_s = self.busy_s = self.held_max = 0.0
        self._hardware = hardware
        self._stream_ends_s: list[float] = []
        """When each step ended that had streams in it."""
        self._plan: StepPlan | None = None
        self._run_s = 0.0

    @property
    def is_idle(self) -> bool:
        """No step runs, and there is work."""
        return self._plan is None and (bool(self.inbox) or self.scheduler.has_work)

    def num_cached(self, request: CoreRequest) -> int:
        """Leading tokens of the request that are cached here."""
        cache = self.scheduler.cache
        return len(cache.peek(cache.table(request.request_id, b""), request.prompt_ids)) * cache.block_size

    def begin(self, now_s: float) -> None:
        """Takes what came in, and plans a step."""
        self.now_s = now_s
        while self.inbox:
            self.scheduler.add(self.inbox.popleft())
        self._plan = self.scheduler.plan()
        if self._plan is None:
            wake_s = self.scheduler.wake_at_s
            self.next_s = NEVER_S if wake_s is None else max(wake_s, now_s + 1e-6)
            return
        load = self.scheduler.planned_load
        self._run_s = self._hardware.run_s(load)
        self.next_s = now_s + self._run_s
        self._note_load(load.rows)

    def _note_load(self, num_rows: int) -> None:
        cache = self.scheduler.cache
        share = 1 - cache.num_free / cache.num_blocks
        self.num_rows += num_rows
        self.busy_s += self._run_s
        self.held_s += share * self._run_s
        self.held_max = max(self.held_max, share)

    def end(self) -> list[TokenEvent]:
        """The running step's events, at `next_s`."""
        plan, self._plan = self._plan, None
        self.now_s, self.next_s = self.next_s, NEVER_S
        if plan is None:
            return []
        rows = [RowResult(request_id=row.request_id, token_ids=[FIRST_OWN] * len(row.sample_at)) for row in plan.rows]
        events = self.scheduler.absorb(StepResult(step_id=plan.step_id, rows=rows, run_s=self._run_s))
        if self.scheduler.num_stream_steps > len(self._stream_ends_s):
            self._stream_ends_s.append(self.now_s)
        return events

    def stream_times(self) -> list[tuple[str, list[float]]]:
        """Of requests that stopped streaming since the last call, when they got their tokens."""
        ends_s = self._stream_ends_s
        return [(span.request_id, ends_s[span.first : span.end]) for span in self.scheduler.take_spans()]


@dataclass(slots=True)
class _Run:
    """Replicas, and the requests' records while they run."""

    replicas: list[_Replica]
    request_s: float
    records: dict[str, RequestRecord] = field(default_factory=dict)
    homes: dict[str, _Replica] = field(default_factory=dict)
    num_sent: int = 0
    refused: int = 0

    def send(self, request: CoreRequest, routing: str) -> None:
        """Routes one request that arrives now."""
        replica = self.replicas[self.num_sent % len(self.replicas)]
        if routing == "prefix" and len(self.replicas) > 1:
            replica = self._by_prefix(request)
        self.num_sent += 1
        try:
            replica.scheduler.validate(request)
        except RequestError:
            self.refused += 1
            return
        self.records[request.request_id] = RequestRecord(request.arrival_s, prompt_tokens=len(request.prompt_ids))
        self.homes[request.request_id] = replica
        replica.num_open += 1
        replica.inbox.append(request)

    def _by_prefix(self, request: CoreRequest) -> _Replica:
        turn = self.num_sent % len(self.replicas)
        order = self.replicas[turn:] + self.replicas[:turn]
        least = min(order, key=lambda replica: replica.num_open)
        best = max(order, key=lambda replica: (replica.num_cached(request), -replica.num_open))
        is_crowded = best.num_open > max(PREFIX_MIN_OPEN, PREFIX_MAX_LEAD * least.num_open)
        return least if is_crowded else best

    def note(self, replica: _Replica, events: list[TokenEvent], now_s: float) -> None:
        """Writes down who got tokens or ended."""
        for request_id, times_s in replica.stream_times():
            self.records[request_id].times_s.extend(time_s + self.request_s for time_s in times_s)
        for event in events:
            record = self.records[event.request_id]
            record.times_s.extend([now_s + self.request_s] * len(event.token_ids))
            if event.finish is not None:
                record.finish = event.finish.value
                record.end_s = now_s + self.request_s
                record.cached_tokens = event.cached_tokens
                record.completion_tokens = len(record.times_s)
                self.homes.pop(event.request_id).num_open -= 1


def simulate(trace: Trace, setup: Setup) -> Timed:
    """Runs the trace to its last request's end. Raises ConfigError where no request fits."""
    block_size = trace.block_size or setup.hardware.block_size
    num_blocks = setup.cache_blocks or setup.hardware.kv_tokens // block_size
    replicas = [_Replica(setup, block_size, num_blocks) for _ in range(setup.num_replicas)]
    run = _Run(replicas, setup.hardware.request_s)
    ends: list[tuple[float, int]] = []
    now_s = 0.0
    at = 0
    while at < len(trace.requests) or ends:
        arrival_s = trace.requests[at].arrival_s if at < len(trace.requests) else NEVER_S
        if ends and ends[0][0] <= arrival_s:
            now_s, number = heapq.heappop(ends)
            replica = replicas[number]
            if replica.next_s != now_s:
                continue
            run.note(replica, replica.end(), now_s)
        else:
            now_s = arrival_s
            while at < len(trace.requests) and trace.requests[at].arrival_s == now_s:
                run.send(_core_request(trace.requests[at], at, block_size), setup.routing)
                at += 1
        for number, replica in enumerate(replicas):
            if replica.is_idle:
                replica.begin(now_s)
                if replica.next_s < NEVER_S:
                    heapq.heappush(ends, (replica.next_s, number))
    if not run.records:
        raise ConfigError(f"no request of the trace fits {num_blocks} blocks of {block_size} tokens")
    return _summed(run, now_s)


def _core_request(request: TraceRequest, number: int, block_size: int) -> CoreRequest:
    """The request with one token per block id, repeated; the last block may be cut."""
    tokens: list[int] = []
    for block in request.blocks:
        tokens += [block] * block_size
    del tokens[request.input_tokens :]
    tokens += [FIRST_OWN + 1 + number] * (request.input_tokens - len(tokens))
    return CoreRequest(
        request_id=str(number),
        prompt_ids=tokens,
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=request.output_tokens,
        stop_ids=frozenset(),
        arrival_s=request.arrival_s,
    )


def _summed(run: _Run, wall_s: float) -> Timed:
    replicas = run.replicas
    steps = sum(replica.scheduler.stats.steps for replica in replicas)
    busy_s = sum(replica.busy_s for replica in replicas)
    stats = [replica.scheduler.cache.stats() for replica in replicas]
    return Timed(
        level=LevelResult(0, list(run.records.values()), wall_s, 0.0, []),
        refused=run.refused,
        num_steps=steps,
        mean_rows=sum(replica.num_rows for replica in replicas) / max(1, steps),
        occupancy_mean=sum(replica.held_s for replica in replicas) / busy_s if busy_s else 0.0,
        occupancy_max=max(replica.held_max for replica in replicas),
        preemptions=sum(replica.scheduler.stats.preemptions for replica in replicas),
        prompt_tokens=sum(stat.lookup_tokens for stat in stats),
        cached_tokens=sum(stat.hit_tokens for stat in stats),
    )
