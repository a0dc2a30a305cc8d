"""From stamps to causes: a gap-free list of (cause, start, end) that covers a request's whole life. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firstlight.measure.causes.book import Trace
from firstlight.measure.causes.steps import StepRecord

__all__ = ["CAUSES", "Span", "Stamps", "timeline", "totals_s"]

CAUSES: dict[str, str] = {
    "receive": "reading the request's body",
    "parse": "checking the body",
    "template": "rendering the chat template",
    "tokenise": "turning text into token ids",
    "grammar": "compiling the grammar the answer must follow",
    "submit": "handing the request to the core",
    "queue.step": "waiting for the step that was running to end",
    "queue.capacity": "waiting because the running streams' promised gaps left no time for a prompt",
    "queue.rows": "waiting because as many requests ran as one step may carry",
    "queue.kv": "waiting because too few KV blocks were free",
    "queue.order": "waiting behind other prompts that were computed first",
    "queue.prefix": "waiting for another request that was computing the same prefix",
    "queue.batch": "waiting for a batch (mode static or dynamic)",
    "queue.rate_limit": "held back by the key's rate limit",
    "load_kv": "loading cached KV from a lower tier",
    "prefill.own": "computing its own prompt",
    "prefill.others": "other requests' prompts, while its own was being computed",
    "decode.own": "computing its own tokens",
    "decode.shared": "other streams' tokens in the same steps",
    "decode.chunks": "other requests' prompt chunks in the same steps",
    "preempted": "its KV blocks were taken; waiting to return and computing again what was lost",
    "machine": "the machine ran something else on the cores that its threads wanted",
    "detokenise": "handing tokens over and turning them into text",
    "flush": "writing to the connection",
    "client_slow": "the client, or the network, did not take what was written",
}
"""Every cause, and what it means. `queue.rate_limit` is reserved: who is over a limit is refused at once."""
_OWN_WAITS = {"prefix": "queue.prefix", "load": "load_kv"}
"""Reasons that a request has for itself, and the causes they become."""


class Span(NamedTuple):
    """One stretch of a request's life; seconds on the monotonic clock."""

    cause: str
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Stamps:
    """What the server noted of one request, on the monotonic clock."""

    arrival_s: float
    end_s: float
    stages: list[tuple[str, float]] = field(default_factory=list)
    """(cause, its end), in order, from arrival until the request was submitted."""
    first_ready_s: float | None = None
    """When the first output token was text; None where there was none, or the answer was not streamed."""
    first_left_s: float | None = None
    """When the first output token had left."""
    last_ready_s: float | None = None
    """When the last of the answer was text."""
    blocked: list[tuple[float, float]] = field(default_factory=list)
    """Writes that waited for the client."""


class _Line:
    """Spans one after another: whatever stamps it is given, they leave no gap and do not overlap."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self.spans: list[Span] = []
        self.now_s = start_s
        self._end_s = max(start_s, end_s)

    def until(self, cause: str, end_s: float) -> None:
        """The time up to `end_s`, as far as it is not spoken for, has this cause."""
        end_s = min(end_s, self._end_s)
        if end_s > self.now_s:
            if self.spans and self.spans[-1].cause == cause:
                self.spans[-1] = self.spans[-1]._replace(end_s=end_s)
            else:
                self.spans.append(Span(cause, self.now_s, end_s))
            self.now_s = end_s


def timeline(stamps: Stamps, trace: Trace | None) -> list[Span]:
    """The causes of a request's life, from arrival to its end.

    At each moment the cause is what the answer waited for: the client, where a write was blocked; on the way to the
    first token, text and socket after the step that made it; else what the core did with the request.

    Args:
        trace: of the sequence that ended last; None where it never came to the core.
    """
    line = _Line(stamps.arrival_s, stamps.end_s)
    for cause, end_s in stamps.stages:
        line.until(cause, end_s)
    if trace is not None:
        _core(line, trace)
        if trace.end_s is not None:
            if stamps.last_ready_s is not None:
                line.until("detokenise", stamps.last_ready_s)
            line.until("flush", stamps.end_s)
    line.until(line.spans[-1].cause if line.spans else "receive", stamps.end_s)
    over = _first_token(stamps, trace)
    return _overlaid(_overlaid(line.spans, over), [Span("client_slow", start, end) for start, end in stamps.blocked])


def totals_s(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds per cause, in the order in which causes first came."""
    totals: dict[str, float] = {}
    for cause, start_s, end_s in spans:
        totals[cause] = totals.get(cause, 0.0) + end_s - start_s
    return totals


def _core(line: _Line, trace: Trace) -> None:
    line.until("submit", trace.submitted_s)
    _queue(line, trace, trace.steps[0].start_s if trace.steps else trace.end_s)
    computed, before = 0, "prefill.others"
    for step in trace.steps:
        at = _place(step, trace.core_id)
        share = step.shares[at]
        is_again = share.is_prefill and share.start < computed  # only a preemption takes back what was computed
        computed = max(computed, share.start + (share.num_tokens if share.is_prefill else 1))
        line.until("preempted" if is_again else before, step.start_s)
        _step(line, step, at, is_prefill=share.is_prefill, is_again=is_again)
        before = "prefill.others" if share.is_prefill else "decode.shared"
    if trace.steps and trace.end_s is not None:
        line.until("decode.shared", trace.end_s)


def _queue(line: _Line, trace: Trace, until_s: float | None) -> None:
    if trace.taken_s is not None:
        line.until("queue.step", trace.taken_s if until_s is None else min(until_s, trace.taken_s))
    queue = [wait for wait in trace.waits if wait.reason not in _OWN_WAITS]
    if until_s is None:
        until_s = queue[-1].end_s if queue else line.now_s
    held = [Span(_OWN_WAITS[w.reason], w.start_s, w.end_s) for w in trace.waits if w.reason in _OWN_WAITS]
    own = _Line(line.now_s, until_s)
    for wait in queue:
        own.until(own.spans[-1].cause if own.spans else "queue.step", wait.start_s)
        own.until(f"queue.{wait.reason}", wait.end_s)
    own.until(own.spans[-1].cause if own.spans else "queue.step", until_s)
    for span in _overlaid(own.spans, held):
        line.until(span.cause, span.end_s)


def _step(line: _Line, step: StepRecord, at: int, *, is_prefill: bool, is_again: bool) -> None:
    split = step.split(at)
    end_s = step.start_s
    others = "prefill.others" if is_prefill else "decode.shared"
    own = "preempted" if is_again else "prefill.own" if is_prefill else "decode.own"
    chunks = "prefill.others" if is_prefill else "decode.chunks"
    for cause, seconds in ((own, split.own_s), (others, split.shared_s), (chunks, split.chunks_s)):
        end_s += seconds
        line.until(cause, end_s)
    line.until("machine" if split.machine_s > 0 else own, step.end_s)


def _place(step: StepRecord, core_id: str) -> int:
    for at, share in enumerate(step.shares):
        if share.request_id == core_id:
            return at
    raise AssertionError(f"step {step.step_id} has no row of {core_id}")


def _first_token(stamps: Stamps, trace: Trace | None) -> list[Span]:
    """What stood between the step that made the first token and the socket."""
    if trace is None or stamps.first_ready_s is None or stamps.first_left_s is None:
        return []
    made_s = next((s.end_s for s in trace.steps if _reaches(s, trace)), None)
    if made_s is None:
        return []
    line = _Line(made_s, stamps.first_left_s)
    line.until("detokenise", stamps.first_ready_s)
    line.until("flush", stamps.first_left_s)
    return line.spans


def _reaches(step: StepRecord, trace: Trace) -> bool:
    share = step.shares[_place(step, trace.core_id)]
    return share.start + share.num_tokens >= trace.num_prompt


def _overlaid(base: Sequence[Span], top: Sequence[Span]) -> list[Span]:
    """`base` with the spans of `top` (in order, not overlapping) in place of what it had there."""
    if not base or not top:
        return list(base)
    end_s = base[-1].end_s
    line = _Line(base[0].start_s, end_s)
    at = 0
    for over in [*top, Span("", end_s, end_s)]:
        while line.now_s < over.start_s and at < len(base):
            line.until(base[at].cause, min(base[at].end_s, over.start_s))
            at += base[at].end_s <= line.now_s
        line.until(over.cause, over.end_s)
        while at < len(base) and base[at].end_s <= line.now_s:
            at += 1
    return line.spans
