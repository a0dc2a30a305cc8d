"""What the routes of one server share: engine, limits, metrics, and a few threads for big bodies.

Knows the state of the engine as a client sees it: loading, ready, stalled, failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from firstlight.config import ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.engine.workers import SizeOrderedPool
from firstlight.errors import BackendError, OverloadedError
from firstlight.measure.causes import FinishedRequest, FinishedRing
from firstlight.measure.metrics import Metrics, Snapshot
from firstlight.measure.otel import SpanSender
from firstlight.server.access import Access
from firstlight.server.asgi import Exchange
from firstlight.server.delivery import Deliveries
from firstlight.server.dialect import Dialect
from firstlight.server.intake import Intake
from firstlight.server.opened import OpenRequests
from firstlight.server.record import RequestRecord
from firstlight.server.resume import KeptStreams
from firstlight.text.tokenizer import Tokenizer

__all__ = ["BIG_TEXT_BYTES", "Service", "package_version"]

_T = TypeVar("_T")

BIG_BODY_BYTES = 64 * 1024
"""Parsed on a thread above this, so that no stream waits for another client's long prompt."""
_NUM_PARSE_THREADS = 2
_LOADING_RETRY_S = 2.0
_RESTART_RETRY_S = 2.0
BIG_TEXT_BYTES = 2000
"""Tokenised on a thread above this: about a millisecond."""


class Service:
    """The shared parts of one server. `engine` may still be loading."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.access = Access(config)
        self.created = int(time.time())
        self.start_s = time.monotonic()
        self.max_body_bytes = int(config.max_body_mb * 1e6)
        self._threads = SizeOrderedPool(_NUM_PARSE_THREADS, "firstlight-parse")
        self.open = OpenRequests()
        self.kept = KeptStreams(config)
        self.open_since_s: dict[str, float] = {}
        """Arrival of every generation request that is being answered, by answer id."""

        self.finished = FinishedRing(config.slow_ttft_ms / 1e3, config.slow_gap_ms / 1e3)
        """What the last requests waited for."""

        self.deliveries = Deliveries(config.slow_reader_s)
        self._spans = SpanSender(config.otlp_endpoint, package_version()) if config.otlp_endpoint else None

    def record(self, exchange: Exchange, salt: bytes) -> RequestRecord:
        """The record of a request of this tenant that has just come in. Only once the engine is ready."""
        return RequestRecord(
            self.metrics,
            self._ended,
            exchange.path,
            exchange.request_id,
            exchange.arrival_s,
            key=self.access.key_id(salt),
            traceparent=exchange.headers.get(b"traceparent", b"").decode("latin-1"),
        )

    def _ended(self, request: FinishedRequest) -> None:
        self.finished.add(request)
        if self._spans is not None:
            self._spans.add(request, self.metrics.model_name)

    @property
    def has_debug_routes(self) -> bool:
        """/debug/* are there."""
        setting = self.config.debug_routes
        return setting == "on" or (setting == "auto" and self.access.is_loopback)

    @cached_property
    def intake(self) -> Intake:
        """The door for bodies. Only once the engine is ready."""
        names = (self.config.served_model_name or self.engine.info.model, *self.config.model_aliases)
        return Intake(
            model_names=names,
            max_n=self.config.max_n,
            max_prompts=self.config.max_prompts,
            max_tools=self.config.max_tools,
            max_pin_s=self.config.max_pin_s,
        )

    @cached_property
    def dialect(self) -> Dialect:
        """How the model writes calls and reasoning. Only once the engine is ready."""
        return Dialect(self.engine, self.config)

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics. Only once the engine is ready."""
        metrics = Metrics(self.intake.model_names[0], package_version())
        metrics.watch(self._snapshot)
        return metrics

    def require_ready(self) -> None:
        """Raises OverloadedError (503) while the model loads or the engine closes, BackendError once it has failed."""
        if self.engine.ready:
            return
        if self.engine.is_restarting:
            raise OverloadedError(
                f"the engine has failed and restarts: {self.engine.failed}: try again",
                retry_after_s=_RESTART_RETRY_S,
                status=503,
            )
        if self.engine.failed is not None:
            raise BackendError(f"the engine has failed: {self.engine.failed}")
        raise OverloadedError(
            "the model is loading or the server is shutting down: try again", retry_after_s=_LOADING_RETRY_S, status=503
        )

    def why_not_ready(self) -> str | None:
        """Why /ready says no; None when requests are taken and make progress."""
        if self.engine.failed is not None:
            what = "has failed and restarts" if self.engine.is_restarting else "has failed"
            return f"the engine {what}: {self.engine.failed}"
        if not self.engine.ready:
            return "loading, warming up or shutting down"
        stalled_s = self._stalled_s()
        if stalled_s > self.config.stall_s:
            return f"requests are waiting and no step has ended for {stalled_s:.0f} s"
        return None

    @cached_property
    def max_prompt_bytes(self) -> int:
        """No prompt of more bytes can fit the context, so it is refused without being tokenised. Only once ready."""
        tokenizer: Tokenizer = self.engine.tokenizer
        longest = max(len(tokenizer.id_to_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        return self.engine.info.max_model_len * longest

    async def parsed(self, parse: Callable[[bytes], _T], raw: bytes, big_bytes: int = BIG_BODY_BYTES) -> _T:
        """`parse(raw)`, on a thread where the body is big enough to be felt by the streams."""
        if len(raw) <= big_bytes:
            return parse(raw)
        return await self._threads.run(len(raw), lambda: parse(raw))

    def warm_up(self) -> None:
        """Makes what the first request would otherwise wait for. Blocks for some 10 ms; any thread."""
        assert self.metrics.render()
        assert self.max_prompt_bytes > 0

    def close(self) -> None:
        """Ends the threads, forgets kept streams, and sends the spans that are queued. Idempotent."""
        self.kept.close()
        self._threads.close()
        if self._spans is not None:
            self._spans.close()
            self._spans = None

    def counts(self) -> dict[str, int]:
        """Requests and blocks as of now."""
        stats = self.engine.stats()
        return {
            "waiting": stats.waiting,
            "running": stats.running,
            "num_blocks": stats.cache.num_blocks,
            "free_blocks": stats.cache.free_blocks,
            "used_blocks": stats.cache.num_blocks - stats.cache.free_blocks,
            "cached_blocks": stats.cache.cached_blocks,
        }

    def _snapshot(self) -> Snapshot:
        stats = self.engine.stats()
        num_blocks = stats.cache.num_blocks
        num_used = num_blocks - stats.cache.free_blocks
        return {
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting,
            "kv_cache_usage_perc": num_used / num_blocks if num_blocks else 0.0,
            "kv_cache_blocks": num_blocks,
            "kv_cache_blocks_used": num_used,
            "steps": stats.scheduler.steps,
            "step_run_seconds": stats.run_s,
            "step_predicted_seconds": stats.predicted_s,
            "kv_cache_unused_slots": stats.unused_slots,
            "num_preemptions": stats.scheduler.preemptions,
            "draft_tokens": stats.scheduler.draft_tokens,
            "accepted_draft_tokens": stats.scheduler.accepted_tokens,
            "recomputed_tokens": stats.scheduler.recomputed_tokens,
            "num_expired": stats.scheduler.expired,
            "predicted_wait_seconds": stats.predicted_wait_s,
            "step_time_error_ratio": stats.step_error,
            "prefix_cache_queries": stats.cache.lookup_tokens,
            "prefix_cache_hits": stats.cache.hit_tokens,
            "prefix_cache_tier_hits": stats.cache.hit_tokens_by_tier,
            "prefix_cache_evictions": stats.cache.evictions_by_reason,
            "prefix_cache_pinned_blocks": stats.cache.pinned_blocks,
            "prefix_cache_pins_yielded": stats.cache.pins_yielded,
            **self._tier_counts(),
        }

    def _tier_counts(self) -> dict[str, float]:
        cache = self.engine.stats().cache
        found: dict[str, float] = {"host_cache_blocks": cache.host_blocks, "disk_cache_blocks": cache.disk_blocks}
        for tier in ("host", "disk"):
            counts = cache.tiers.get(tier)
            for name in ("stored", "loaded", "corrupt", "foreign", "dropped"):
                found[f"{tier}_cache_{name}_blocks"] = getattr(counts, name) if counts is not None else 0
        found["cache_audits"], found["cache_audit_mismatches"] = cache.audits, cache.audit_mismatches
        return found

    def _stalled_s(self) -> float:
        """How long the engine has had work and ended no step, from the last step or the oldest open request on."""
        stats = self.engine.stats()
        if not self.open_since_s or stats.waiting + stats.running == 0:
            return 0.0
        return time.monotonic() - max(stats.last_progress_s, min(self.open_since_s.values()))


def package_version() -> str:
    """The version of the installed package."""
    try:
        return version("firstlight")
    except PackageNotFoundError:
        return "unknown"
