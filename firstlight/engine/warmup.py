"""A few requests over the real path before the first real one: pages are touched, kernels chosen, step times learned.

Knows scheduler and backend; its requests never enter the engine's own cache or counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from firstlight.backend.base import Backend
from firstlight.cache import KVCache
from firstlight.scheduler import Scheduler, SchedulerLimits, StepLoad, StepTimeModel
from firstlight.types import CoreRequest, SamplingParams

__all__ = ["warm_up"]

BATCHES = ((1, 48, 6), (4, 16, 4), (16, 4, 4), (1, 160, 2))
"""(requests together, prompt tokens each, output tokens each): one stream, small and large batch, a longer prefill."""


def warm_up(
    backend: Backend,
    limits: SchedulerLimits,
    step_time: StepTimeModel,
    clock: Callable[[], float],
    batches: Sequence[tuple[int, int, int]] = BATCHES,
    on_step: Callable[[StepLoad], None] = lambda load: None,
) -> None:
    """Runs `batches`, each cut to what the limits allow, and feeds `step_time`. Raises BackendError.

    `on_step` is told of every step when it was absorbed.

    Mutates: overwrites KV blocks, so call it before the first request.
    """
    info = backend.info
    limits = replace(limits, mode="continuous", max_queue_s=0.0, speculate="off")
    for num_rows, num_prompt, num_output in batches:
        cache = KVCache(info.num_blocks, info.block_size, info.fingerprint, prefix_cache=False)
        scheduler = Scheduler(cache, limits, clock=clock, step_time=step_time)
        num_prompt = min(num_prompt, scheduler.capacity_tokens - 1)
        for i in range(min(num_rows, limits.max_step_rows, limits.max_queue)):
            prompt = [(7 * j + i) % limits.vocab_size for j in range(num_prompt)]
            scheduler.add(_request(f"warm-up-{i}", prompt, num_output))
        while (plan := scheduler.plan()) is not None:
            load = scheduler.planned_load
            scheduler.absorb(backend.run(plan))
            on_step(load)


def _request(request_id: str, prompt: list[int], num_output: int) -> CoreRequest:
    return CoreRequest(
        request_id=request_id,
        prompt_ids=prompt,
        params=SamplingParams(),
        seed=0,
        max_tokens=num_output,
        stop_ids=frozenset(),
        arrival_s=0.0,
    )
