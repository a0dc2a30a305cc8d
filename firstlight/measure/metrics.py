"""Prometheus metrics of one server: latency histograms filled per request, gauges and counters read at scrape time.

Knows durations in seconds and counts; knows no engine and no HTTP. One loop's thread writes; any thread may render.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from firstlight.measure.histogram import LatencyHistogram
from firstlight.measure.live import LiveWindow

__all__ = ["AbortState", "CONTENT_TYPE", "LATENCY_BUCKETS_S", "SNAPSHOT_METRICS", "Metrics", "Snapshot"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

LATENCY_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.010, 0.015, 0.020, 0.030, 0.050, 0.075),
    *(0.100, 0.150, 0.200, 0.300, 0.500, 0.750, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0),
)
"""Upper bounds from 1 ms to 60 s, at most a factor of 2 apart, so a quantile read from them is off by less."""

SNAPSHOT_METRICS: dict[str, tuple[str, str]] = {
    "num_requests_running": ("gauge", "Requests that have blocks and take part in steps"),
    "num_requests_waiting": ("gauge", "Requests in the queue"),
    "kv_cache_usage_perc": ("gauge", "Share of KV blocks held by requests, 0 to 1"),
    "kv_cache_blocks": ("gauge", "KV blocks in all"),
    "kv_cache_blocks_used": ("gauge", "KV blocks held by requests"),
    "steps": ("counter", "Steps the engine has run"),
    "step_run_seconds": ("counter", "Time of all steps on the backend"),
    "step_predicted_seconds": ("counter", "What the step-time model predicted for them"),
    "kv_cache_unused_slots": ("gauge", "Token slots in held KV blocks that hold nothing yet (fragmentation)"),
    "num_preemptions": ("counter", "Requests whose blocks were taken and computed again later"),
    "recomputed_tokens": ("counter", "Tokens computed again after a preemption"),
    "draft_tokens": ("counter", "Tokens guessed ahead and checked in a step"),
    "accepted_draft_tokens": ("counter", "Of those, the ones that were right"),
    "num_expired": ("counter", "Requests dropped because their deadline passed while they waited"),
    "predicted_wait_seconds": ("gauge", "How long a request that came now would wait, as predicted"),
    "step_time_error_ratio": ("gauge", "Mean error of predicted step times over the last steps, as a share of them"),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache"),
    "prefix_cache_tier_hits": ("counter", "Of the prompt tokens found, those in each tier; loaded ones count there"),
    "prefix_cache_evictions": (
        "counter",
        "Cached blocks that lost their place: to a request (room), to a tier beforehand (ahead), found wrong (audit)",
    ),
    "prefix_cache_pinned_blocks": ("gauge", "Cached blocks that are pinned"),
    "prefix_cache_pins_yielded": ("counter", "Pins given up early for a request that had no room otherwise"),
    **{
        f"{tier}_cache_{name}": (kind, f"{text} ({tier} tier)")
        for tier in ("host", "disk")
        for name, kind, text in (
            ("blocks", "gauge", "Evicted KV blocks that are kept"),
            ("stored_blocks", "counter", "KV blocks that were stored"),
            ("loaded_blocks", "counter", "KV blocks that were brought back"),
            ("corrupt_blocks", "counter", "KV blocks that failed their checksum: misses"),
            ("foreign_blocks", "counter", "KV blocks of other weights, layouts or tokens: misses"),
            ("dropped_blocks", "counter", "KV blocks that could not be written or read"),
        )
    },
    "cache_audits": ("counter", "Cached KV blocks that were computed again and compared"),
    "cache_audit_mismatches": ("counter", "Cached KV blocks that were not equal to the bit: must stay 0"),
}
"""Names (without the `firstlight_` prefix and the `_total` suffix), kinds and help of what `watch` may give."""

SNAPSHOT_LABELS = {"prefix_cache_tier_hits": "tier", "prefix_cache_evictions": "reason"}
"""The label of those that `watch` gives as a mapping from its values."""

_PREFIX = "firstlight_"

Snapshot = Mapping[str, float | Mapping[str, float]]
"""Values of SNAPSHOT_METRICS by name; a mapping by label where SNAPSHOT_LABELS has one."""

AbortState = Literal["queue", "prefill", "decode"]


class _Snapshot(Collector):
    """Reads its numbers at scrape time, so that nothing is counted twice."""

    def __init__(self, read: Callable[[], Snapshot], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            kind, text = SNAPSHOT_METRICS[name]
            family_type = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            if isinstance(value, Mapping):
                family = family_type(_PREFIX + name, text, labels=["model_name", SNAPSHOT_LABELS[name]])
                for label, part in value.items():
                    family.add_metric([self._model_name, label], part)
            else:
                family = family_type(_PREFIX + name, text, labels=["model_name"])
                family.add_metric([self._model_name], value)
            yield family


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        model_name: the value of every metric's `model_name` label.
        version: shown by `firstlight_build_info`.
    """

    def __init__(self, model_name: str, version: str) -> None:
        self._registry = CollectorRegistry()
        self.live = LiveWindow()
        """The last minute, for who looks on."""
        self.model_name = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first output token leaving the server")
        self._itl = self._histogram("inter_token_latency_seconds", "One gap between output tokens of a stream")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last byte of the answer")
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean gap of a choice's tokens after its first")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step that computes the request")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens sent")
        self._aborts = Counter(
            _PREFIX + "request_aborts",
            "Requests ended early because their client left, by where they were: queue, prefill or decode",
            ["model_name", "state"],
            registry=self._registry,
        )
        self._key_tokens = Counter(
            _PREFIX + "key_tokens",
            "Tokens of finished requests by API key (the first 8 hex digits of its SHA-256) and kind: prompt, output",
            ["model_name", "key", "kind"],
            registry=self._registry,
        )
        self._slow_readers = self._counter("slow_readers", "Streams ended because their client did not read")
        self._reader_gaps = self._counter("reader_gaps", "Gaps between frames with tokens, over all streams that ended")
        self._reader_gaps_long = self._counter("reader_gaps_long", "Of these, over twice the median of their stream")
        self._finished = Counter(
            _PREFIX + "request_success",
            "Choices that ended by themselves, by finish reason",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._errors = Counter(
            _PREFIX + "request_errors",
            "Requests answered with an error, by status and code",
            ["model_name", "status", "code"],
            registry=self._registry,
        )
        self._open = Gauge(
            _PREFIX + "http_requests_open",
            "Generation requests being answered",
            ["model_name"],
            registry=self._registry,
        ).labels(model_name)
        for state in ("queue", "prefill", "decode"):
            self._aborts.labels(model_name, state)
        build = Gauge(_PREFIX + "build_info", "Always 1", ["model_name", "version"], registry=self._registry)
        build.labels(model_name, version).set(1)

    def watch(self, read: Callable[[], Snapshot]) -> None:
        """Adds gauges and counters that `read` gives at every scrape; its keys are keys of `SNAPSHOT_METRICS`."""
        self._registry.register(_Snapshot(read, self.model_name))

    def opened(self) -> None:
        """A generation request has come in."""
        self._open.inc()

    def closed(self) -> None:
        """A generation request has been answered, well or badly."""
        self._open.dec()

    def queued(self, queue_s: float) -> None:
        """A request has entered its first step."""
        self._queue.observe(queue_s)

    def first_token(self, now_s: float, ttft_s: float) -> None:
        """The first output token of a request has left."""
        self._ttft.observe(ttft_s)
        self.live.first_token(now_s, ttft_s)

    def tokens(self, now_s: float, gap_s: float | None, num_tokens: int) -> None:
        """`num_tokens` have left together, `gap_s` after the token before them (0 gaps among themselves)."""
        self.live.tokens(now_s, num_tokens, gap_s)
        if gap_s is not None:
            self._itl.observe(gap_s)
            if num_tokens > 1:
                self._itl.observe(0.0, num_tokens - 1)

    def per_token(self, tpot_s: float) -> None:
        """A choice with two tokens or more has ended by itself; this was its mean gap."""
        self._tpot.observe(tpot_s)

    def answered(self, e2e_s: float, prompt_tokens: int, generation_tokens: int, finish_reasons: list[str]) -> None:
        """A request has ended by itself."""
        self._e2e.observe(e2e_s)
        self.ended(prompt_tokens, generation_tokens)
        for reason in finish_reasons:
            self._finished.labels(self.model_name, reason).inc()

    def ended(self, prompt_tokens: int, generation_tokens: int) -> None:
        """Counts the tokens of a request that has ended in any way."""
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generation_tokens)

    def billed(self, key: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Counts a request's tokens for the API key that sent it."""
        self._key_tokens.labels(self.model_name, key, "prompt").inc(prompt_tokens)
        self._key_tokens.labels(self.model_name, key, "output").inc(generation_tokens)

    def aborted(self, state: AbortState) -> None:
        """A client has left before its answer was complete."""
        self._aborts.labels(self.model_name, state).inc()

    def slow_reader(self) -> None:
        """A stream was ended because its client did not read."""
        self._slow_readers.inc()

    def reader_gaps(self, num_gaps: int, num_long: int) -> None:
        """A stream with so many gaps has ended, so many of them long."""
        self._reader_gaps.inc(num_gaps)
        self._reader_gaps_long.inc(num_long)

    def failed(self, status: int, code: str) -> None:
        """A request was answered with an error."""
        self._errors.labels(self.model_name, str(status), code).inc()

    def render(self) -> bytes:
        """The exposition text. Cost: about 1 ms."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> LatencyHistogram:
        histogram = LatencyHistogram(_PREFIX + name, text, self.model_name, LATENCY_BUCKETS_S)
        self._registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, ["model_name"], registry=self._registry).labels(self.model_name)
