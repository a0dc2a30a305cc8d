"""What is refused at the door: requests that could never be served, and those for which the queue has no room.

Knows constants, counts and predicted seconds; may be asked from any thread.
"""

from __future__ import annotations

from firstlight.cache import KVCache
from firstlight.errors import OverloadedError, RequestError
from firstlight.scheduler.admission import Admission
from firstlight.scheduler.forecast import Backlog, wait_s
from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.open_requests import OpenRequests
from firstlight.scheduler.steptime import StepTimeModel
from firstlight.types import CoreRequest

__all__ = ["Intake"]

RETRY_AFTER_BOUNDS_S = (1.0, 120.0)


class Intake:
    """Looks at a request before it is queued."""

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        step_time: StepTimeModel,
        admission: Admission,
        requests: OpenRequests,
    ) -> None:
        self.capacity_tokens = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        """The most tokens, prompt and output, one request can reach."""
        self._cache = cache
        self._limits = limits
        self._step_time = step_time
        self._admission = admission
        self._open = requests

    def validate(self, request: CoreRequest) -> None:
        """Refuses what could never be served. Reads constants only. Raises RequestError."""
        num = len(request.prompt_ids)
        if num == 0:
            raise RequestError("`prompt` has no tokens: send at least one", param="prompt")
        if num + 1 > self.capacity_tokens:
            raise RequestError(
                f"`prompt` is {num} tokens, which with one output token exceeds the {self.capacity_tokens} tokens that "
                "context and KV memory allow: send a shorter prompt, or restart with a larger --max-model-len or "
                "--kv-memory-mb",
                param="prompt",
            )
        vocab = self._limits.vocab_size
        if not (min(request.prompt_ids) >= 0 and max(request.prompt_ids) < vocab):
            raise RequestError(f"`prompt` has a token id outside 0..{vocab - 1}: use this model's ids", param="prompt")
        if request.forced_ids and not (min(request.forced_ids) >= 0 and max(request.forced_ids) < vocab):
            raise RequestError(f"`forced_ids` has a token id outside 0..{vocab - 1}", param="forced_ids")
        if request.max_tokens < 1:
            raise RequestError(f"`max_tokens` is {request.max_tokens}: ask for at least 1", param="max_tokens")

    def refuse_if_full(self, num_ahead: int) -> None:
        """Raises OverloadedError when `num_ahead` requests wait and the queue, by number or seconds, holds no more."""
        limits = self._limits
        if num_ahead >= limits.max_queue:
            again_s = self.retry_after_s()
            raise OverloadedError(
                f"{num_ahead} requests wait, `max_queue` is {limits.max_queue}: try again in {again_s:.0f} s",
                retry_after_s=again_s,
            )
        if limits.max_queue_s == 0 or num_ahead == 0:
            return
        predicted_s = self.predicted_wait_s()
        if predicted_s > limits.max_queue_s:
            again_s = _bounded_s(predicted_s - limits.max_queue_s)
            raise OverloadedError(
                f"a new request would wait about {predicted_s:.0f} s, `max_queue_s` is {limits.max_queue_s:g}: "
                f"try again in {again_s:.0f} s",
                retry_after_s=again_s,
            )

    def predicted_wait_s(self) -> float:
        """Predicted seconds until a request that came now would be admitted and computed."""
        running, waiting = self._open.running(), self._open.waiting
        output = [self._admission.expected_output(state) - state.num_output for state in running]
        mean_tokens = (waiting.tokens + sum(len(s.tokens) for s in running)) / max(1, len(self._open.states))
        mean_output = sum(output) / len(output) if output else waiting.mean_output
        blocks = self._cache.num_blocks_for(round(mean_tokens + mean_output) or 1)
        backlog = Backlog(
            prefill_tokens=waiting.tokens + sum(s.gap for s in running),
            num_open=len(waiting) + len(running),
            num_streams=len(self._open.decodes),
            most_running=max(1, min(self._limits.max_step_rows, self._cache.num_blocks // blocks)),
            mean_tokens=mean_tokens,
            mean_output=mean_output,
        )
        return wait_s(backlog, self._step_time)

    def retry_after_s(self) -> float:
        """`predicted_wait_s` as a client is told it, inside 1..120."""
        return _bounded_s(self.predicted_wait_s())


def _bounded_s(seconds: float) -> float:
    low, high = RETRY_AFTER_BOUNDS_S
    return max(low, min(high, seconds))
