"""Drives a scheduler over the fake backend on virtual time, auditing after every step; and the oracle it is held to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from firstlight.backend.fake import FakeBackend, VirtualClock
from firstlight.cache import KVCache, make_policy
from firstlight.cache.tiers import DiskTier, Tiers
from firstlight.scheduler import Drafter, Scheduler, SchedulerLimits, StepTimeModel
from firstlight.types import (
    CacheReport,
    CoreRequest,
    FinishReason,
    Pin,
    RowResult,
    RowSampling,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
    TokenEvent,
    TokenLogprob,
)

VOCAB = 40
SPACE = bytes(32)
MODEL_LEN = 64


def request(
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    *,
    stop_ids: Sequence[int] = (),
    arrival_s: float = 0.0,
    priority: int = 0,
    salt: bytes = b"",
    tenant: bytes = b"",
    deadline_s: float | None = None,
    seed: int = 0,
    forced_ids: Sequence[int] = (),
    pins: Sequence[tuple[int, float | None]] = (),
    prompt_logprobs: int | None = None,
    **params: float,
) -> CoreRequest:
    return CoreRequest(
        request_id=request_id,
        prompt_ids=list(prompt),
        params=SamplingParams(**{"temperature": 0.0, **params}),  # type: ignore[arg-type]
        seed=seed,
        max_tokens=max_tokens,
        stop_ids=frozenset(stop_ids),
        arrival_s=arrival_s,
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        deadline_s=deadline_s,
        forced_ids=tuple(forced_ids),
        pins=tuple(Pin(num_tokens=num, ttl_s=ttl_s) for num, ttl_s in pins),
        prompt_logprobs=prompt_logprobs,
    )


@dataclass
class Drive:
    """A scheduler, its backend and everything it said. `step` audits before the step runs and after it is absorbed."""

    num_blocks: int = 32
    block_size: int = 4
    max_step_rows: int = 4
    max_step_tokens: int = 16
    max_step_samples: int = 0
    max_model_len: int = MODEL_LEN
    max_queue: int = 1024
    max_queue_s: float = 0.0
    itl_slo_s: float = 0.0
    mode: str = "continuous"
    batch_size: int = 3
    batch_wait_s: float = 0.0
    reserve_output: bool = True
    preempt: str = "least-work"
    prefix_cache: bool = True
    max_pinned: int = 0
    eviction: str = "lru"
    host_blocks: int = 0
    disk: Path | None = None
    reserve: int = 0
    drafter: Drafter | None = None
    speculate: str = "off"
    run_s: float = 0.001
    token_s: float = 0.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    events: list[TokenEvent] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = FakeBackend(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            max_step_tokens=self.max_step_tokens,
            max_step_rows=self.max_step_rows,
            max_step_samples=self.max_step_samples,
        )
        limits = SchedulerLimits(
            max_step_rows=self.max_step_rows,
            max_step_tokens=self.max_step_tokens,
            max_step_samples=self.max_step_samples,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            max_queue=self.max_queue,
            max_queue_s=self.max_queue_s,
            itl_slo_s=self.itl_slo_s,
            mode=self.mode,
            batch_size=self.batch_size,
            batch_wait_s=self.batch_wait_s,
            reserve_output=self.reserve_output,
            preempt=self.preempt,
            speculate=self.speculate,
        )
        cache = KVCache(
            self.num_blocks,
            self.block_size,
            b"w",
            prefix_cache=self.prefix_cache,
            policy=make_policy(self.eviction, self.num_blocks),
            max_pinned=self.max_pinned,
        )
        if self.host_blocks or self.disk:
            block_bytes = self.backend.info.kv_bytes_per_block
            disk = DiskTier(self.disk, SPACE, 10_000_000) if self.disk else None
            tiers = Tiers(
                self.backend,
                SPACE,
                block_bytes,
                host_bytes=self.host_blocks * block_bytes,
                disk=disk,
                on_read=lambda: None,
                clock=self.clock,
            )
            cache.attach(tiers, self.backend, self.reserve)
        self.cache = cache
        self.scheduler = Scheduler(cache, limits, clock=self.clock, step_time=self.step_time, drafter=self.drafter)

    def add(self, *requests: CoreRequest) -> None:
        for one in requests:
            self.scheduler.add(one)
            self.scheduler.check()

    def abort(self, request_id: str) -> TokenEvent | None:
        event = self.scheduler.abort(request_id)
        self.events += [event] if event else []
        self.scheduler.check()
        return event

    def step(self) -> StepPlan | None:
        """Runs a step; None when none is planned: with requests open, the clock moves on to when one may be."""
        dropped = self.scheduler.drop_expired()
        self.events += dropped
        self.scheduler.check()
        plan = self.scheduler.plan()
        if plan is None and (wake_s := self.scheduler.wake_at_s) is not None:
            self.clock.advance(max(1e-6, wake_s - self.clock()))
        while plan is None and self.scheduler.is_loading:
            time.sleep(1e-4)
            plan = self.scheduler.plan()
        if plan is None:
            return None
        self.scheduler.check()
        result = self.backend.run(plan)
        run_s = self.run_s + self.token_s * self.scheduler.planned_load.tokens
        self.clock.advance(run_s)
        self.events += self.scheduler.absorb(StepResult(step_id=result.step_id, rows=result.rows, run_s=run_s))
        self.scheduler.check()
        self.plans.append(plan)
        self.cache.spill_ahead()
        self.scheduler.check()
        return plan

    def finish(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if self.step() is None and not self.scheduler.has_work:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def ids(self, request_id: str) -> list[int]:
        return [token for event in self.events if event.request_id == request_id for token in event.token_ids]

    def prompt_logprobs(self, request_id: str) -> list[list[TokenLogprob] | None]:
        """What each event of a request said of its prompt."""
        return [event.prompt_logprobs for event in self.events if event.request_id == request_id]

    @property
    def reports(self) -> dict[str, CacheReport]:
        """What the prefix cache did for each request that has ended."""
        return {event.request_id: event.cache for event in self.events if event.cache is not None}

    def ends(self, request_id: str) -> list[FinishReason]:
        return [e.finish for e in self.events if e.request_id == request_id and e.finish is not None]


def prompt_logprobs_alone(one: CoreRequest) -> list[TokenLogprob]:
    """What the model says of the prompt's tokens, all of them in one row. Knows no scheduler."""
    backend = FakeBackend(num_blocks=MODEL_LEN, block_size=1, vocab_size=VOCAB, max_model_len=MODEL_LEN)
    row = StepRow(
        request_id="alone",
        token_ids=one.prompt_ids,
        start=0,
        block_table=list(range(MODEL_LEN)),
        targets=one.prompt_ids[1:],
        num_rivals=one.prompt_logprobs or 0,
    )
    return backend.run(StepPlan(step_id=0, rows=[row])).rows[0].target_logprobs


def ids_alone(one: CoreRequest, max_model_len: int) -> list[int]:
    """The oracle: what the request answers by itself, one token at a time in blocks of its own. Knows no scheduler."""
    backend = FakeBackend(num_blocks=max_model_len, block_size=1, vocab_size=VOCAB, max_model_len=max_model_len)
    tokens, start = list(one.prompt_ids), 0
    table = list(range(max_model_len))
    params = one.params
    while True:
        sampling = RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=one.seed,
            output_index=len(tokens) - len(one.prompt_ids),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            history=tokens,
            num_prompt=len(one.prompt_ids),
        )
        row = StepRow(
            request_id="alone",
            token_ids=tokens[start:],
            start=start,
            block_table=table,
            sample_at=(len(tokens) - start - 1,),
            sampling=sampling,
        )
        (result,) = backend.run(StepPlan(step_id=0, rows=[row])).rows
        start = len(tokens)
        num_output = len(tokens) - len(one.prompt_ids)
        is_forced = num_output < len(one.forced_ids)
        tokens.append(one.forced_ids[num_output] if is_forced else result.token_ids[0])
        if tokens[-1] in one.stop_ids or num_output + 1 == one.max_tokens or len(tokens) == max_model_len:
            return tokens[len(one.prompt_ids) :]


def canned(plan: StepPlan, run_s: float, token: int = 1) -> StepResult:
    """A result that says the same token everywhere, for tests of planning alone."""
    rows = [RowResult(request_id=row.request_id, token_ids=[token] * len(row.sample_at)) for row in plan.rows]
    return StepResult(step_id=plan.step_id, rows=rows, run_s=run_s)
