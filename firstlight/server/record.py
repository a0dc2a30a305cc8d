"""What one generation request did and when: fills the metrics and the one log line. Never holds text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from firstlight.engine.generation import Generation
from firstlight.measure.causes import FinishedRequest, Stamps, Trace
from firstlight.measure.log import log_event
from firstlight.measure.metrics import AbortState, Metrics
from firstlight.types import FinishReason, Usage

__all__ = ["RequestRecord", "cache_facts"]


class _Lane:
    """When the tokens of one choice left: the first, the last, and how many after the first ones."""

    __slots__ = ("first_s", "last_s", "num_since")

    def __init__(self, first_s: float) -> None:
        self.first_s = self.last_s = first_s
        self.num_since = 0


class RequestRecord:
    """Stamps and counts of one request, on the monotonic clock. Written by the task that serves it.

    Args:
        ended: gets the request when it has ended.
        key: the API key's name in metrics; empty where there are no keys.
        traceparent: the caller's span, as its header gave it.
    """

    def __init__(
        self,
        metrics: Metrics,
        ended: Callable[[FinishedRequest], None],
        route: str,
        request_id: str,
        arrival_s: float,
        *,
        key: str = "",
        traceparent: str = "",
    ) -> None:
        self._metrics = metrics
        self._ended = ended
        self._key = key
        self._traceparent = traceparent
        self._stamps = Stamps(arrival_s=arrival_s, end_s=arrival_s)
        self._traces: list[Trace] = []
        self._longest_gap_s = 0.0
        self._gap_end_s: float | None = None
        self._route = route
        self._request_id = request_id
        self._arrival_s = arrival_s
        self._first_s: float | None = None
        self._lanes: dict[int, _Lane] = {}
        self._gaps_s: list[float] = []
        self._finishes: dict[int, FinishReason] = {}
        self._num_output = 0
        self.answer_id = ""
        self.stream = False
        self.num_prompt = 0
        self.queue_s: float | None = None
        self.usage: Usage | None = None
        metrics.opened()

    def stage(self, cause: str) -> None:
        """What was done since the last stage has this cause. Also from the thread that does the request's work."""
        self._stamps.stages.append((cause, time.monotonic()))

    def submitted(self, generation: Generation) -> None:
        """A prompt has gone to the core."""
        self._traces += generation.traces

    def blocked_by(self, writes: list[tuple[float, float]]) -> None:
        """The list that will hold the writes that waited for the client."""
        self._stamps.blocked = writes

    def ready(self) -> None:
        """Output tokens are text and go out next."""
        now_s = self._stamps.last_ready_s = time.monotonic()
        if self.stream and self._stamps.first_ready_s is None:
            self._stamps.first_ready_s = now_s

    def scheduled(self, first_scheduled_s: float) -> None:
        """The request's first choice has entered a step."""
        if self.queue_s is None:
            self.queue_s = max(0.0, first_scheduled_s - self._arrival_s)
            self._metrics.queued(self.queue_s)

    def tokens(self, choice: int, num_tokens: int) -> None:
        """Output tokens of a choice have just left the server (for a whole answer: have been made)."""
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        self._num_output += num_tokens
        lane = self._lanes.get(choice)
        if lane is None:
            self._begun(choice, num_tokens, now_s)
            return
        gap_s = now_s - lane.last_s
        lane.last_s = now_s
        lane.num_since += num_tokens
        self._gaps_s.append(gap_s)
        if gap_s > self._longest_gap_s:
            self._longest_gap_s, self._gap_end_s = gap_s, now_s
        self._metrics.tokens(now_s, gap_s, num_tokens)

    def _begun(self, choice: int, num_tokens: int, now_s: float) -> None:
        """The first tokens of a choice have left."""
        self._lanes[choice] = _Lane(now_s)
        if self._first_s is None:
            self._first_s = now_s
            self._stamps.first_left_s = now_s if self.stream else None
            self._metrics.first_token(now_s, now_s - self._arrival_s)
        self._metrics.tokens(now_s, None, num_tokens)

    def finished(self, choice: int, finish: FinishReason) -> None:
        """A choice has ended."""
        self._finishes[choice] = finish

    def timings(self) -> dict[str, float]:
        """The `timings` extension: milliseconds and tokens per second as this request saw them."""
        now_s = time.monotonic()
        first_s = now_s if self._first_s is None else self._first_s
        decode_s = max((lane.last_s for lane in self._lanes.values()), default=first_s) - first_s
        num_gaps = max(0, self._num_output - max(1, len(self._lanes)))
        spans = {
            "queue_ms": (self.queue_s or 0.0) * 1e3,
            "ttft_ms": (first_s - self._arrival_s) * 1e3,
            "decode_ms": decode_s * 1e3,
            "e2e_ms": (now_s - self._arrival_s) * 1e3,
            "output_tokens_per_s": num_gaps / decode_s if decode_s > 0 else 0.0,
        }
        return {name: round(value, 3) for name, value in spans.items()}

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return (self.usage.prompt_tokens if self.usage else self.num_prompt) + self._num_output

    def close(self, status: int, outcome: str | None) -> FinishedRequest:
        """Counts and logs the request, and gives what is kept of it.

        Args:
            outcome: None where it was answered; else "client_gone", "slow_reader" or the error's code.
        """
        self._stamps.end_s = time.monotonic()
        e2e_s = self._stamps.end_s - self._arrival_s
        num_prompt = self.usage.prompt_tokens if self.usage else self.num_prompt
        finishes = [self._finishes[choice].value for choice in sorted(self._finishes)]
        self._metrics.closed()
        if self.stream and self._gaps_s:
            limit_s = 2 * statistics.median(self._gaps_s)
            self._metrics.reader_gaps(len(self._gaps_s), sum(gap_s > limit_s for gap_s in self._gaps_s))
        finished = self._summary(status, outcome or ",".join(finishes))
        self._ended(finished)
        if self._key:
            self._metrics.billed(self._key, num_prompt, self._num_output)
        if outcome is None:
            self._metrics.answered(e2e_s, num_prompt, self._num_output, finishes)
            for lane in self._lanes.values():
                if lane.num_since:
                    self._metrics.per_token((lane.last_s - lane.first_s) / lane.num_since)
        else:
            self._metrics.ended(num_prompt, self._num_output)
            self._count(outcome, status)
        log_event(
            "request",
            id=self.answer_id,
            request_id=self._request_id,
            route=self._route,
            status=status,
            stream=self.stream,
            prompt_tokens=num_prompt,
            cached_tokens=self.usage.cached_tokens if self.usage else None,
            output_tokens=self._num_output,
            queue_ms=None if self.queue_s is None else self.queue_s * 1e3,
            ttft_ms=None if self._first_s is None else (self._first_s - self._arrival_s) * 1e3,
            e2e_ms=e2e_s * 1e3,
            finish=finished.finish,
        )
        return finished

    def _summary(self, status: int, finish: str) -> FinishedRequest:
        return FinishedRequest(
            answer_id=self.answer_id,
            request_id=self._request_id,
            route=self._route,
            status=status,
            finish=finish,
            is_stream=self.stream,
            arrival_unix_s=time.time() - (self._stamps.end_s - self._arrival_s),
            prompt_tokens=self.usage.prompt_tokens if self.usage else self.num_prompt,
            cached_tokens=self.usage.cached_tokens if self.usage else 0,
            output_tokens=self._num_output,
            ttft_s=None if self._first_s is None else self._first_s - self._arrival_s,
            longest_gap_s=self._longest_gap_s,
            gap_end_s=self._gap_end_s,
            stamps=self._stamps,
            cache_miss=self._cache_miss(),
            traces=self._traces,
            traceparent=self._traceparent,
        )

    def _cache_miss(self) -> tuple[int, str] | None:
        report = self.usage.cache if self.usage is not None else None
        return None if report is None or report.miss is None else (report.miss.first_token, report.miss.reason)

    @property
    def _state(self) -> AbortState:
        """Where it was when its client left."""
        if self.queue_s is None:
            return "queue"
        return "prefill" if self._first_s is None else "decode"

    def _count(self, outcome: str, status: int) -> None:
        if outcome == "client_gone":
            self._metrics.aborted(self._state)
        elif outcome == "slow_reader":
            self._metrics.slow_reader()
        else:
            self._metrics.failed(status, outcome)


def cache_facts(usage: Usage | None) -> dict[str, float | str]:
    """What the prefix cache did for a request with one prompt: what was found, where that ended and why."""
    report = usage.cache if usage is not None else None
    if report is None:
        return {}
    facts: dict[str, float | str] = {"cached_tokens": report.hit_tokens, "pinned_tokens": report.pinned_tokens}
    if report.loaded_tokens:
        facts["loaded_tokens"] = report.loaded_tokens
    if report.miss is not None:
        facts |= {"first_uncached_token": report.miss.first_token, "cache_miss": report.miss.reason}
    return facts
