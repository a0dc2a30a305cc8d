"""Routes that explain: finished requests by cause, recent steps, a trace for Perfetto, and figures to show live.

Never shows text. Open where /debug/* is, and only to who has a key where keys are on.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, get_args
from urllib.parse import parse_qs

from firstlight.errors import NotFoundError, RequestError
from firstlight.measure.causes import FinishedRequest, StepRecord
from firstlight.measure.causes.finished import SlowBy
from firstlight.measure.causes.perfetto import chrome_trace
from firstlight.measure.causes.view import request_view, step_view
from firstlight.server.asgi import Exchange
from firstlight.server.service import Service

__all__ = ["REQUEST_PREFIX", "DebugRoutes"]

REQUEST_PREFIX = "/debug/requests/"
MAX_LISTED = 200
MAX_STEPS = 2048
MAX_TRACE_S = 60.0
MAX_MAP_CELLS = 1024


class DebugRoutes:
    """GET /debug/requests, /debug/requests/{id}, /debug/steps, /debug/trace and /debug/live."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def requests(self, exchange: Exchange) -> None:
        """GET /debug/requests?by=recent|e2e|ttft|gap&num=20: each with its totals and verdict."""
        query = self._admitted(exchange, ("by", "num"))
        by, num = query.get("by", "recent"), int(_number(query, "num", 20, 1, MAX_LISTED))
        ring = self._service.finished
        if by == "recent":
            found = ring.recent(num)
        elif by in get_args(SlowBy):
            found = ring.slowest(num, by)  # type: ignore[arg-type]  # checked in this line's condition
        else:
            raise RequestError(f"`by` is {by[:64]!r}: use recent, e2e, ttft or gap", param="by")
        views = await asyncio.to_thread(_views, found)
        await exchange.respond_json({"requests": views})

    async def request(self, exchange: Exchange) -> None:
        """GET /debug/requests/{answer id or X-Request-Id}: every span."""
        self._admitted(exchange, ())
        name = exchange.path.removeprefix(REQUEST_PREFIX)
        found = self._service.finished.find(name)
        if found is None:
            raise NotFoundError(
                f"no finished request {name[:128]!r} is kept: it may be running, or older than the ring", param="id"
            )
        await exchange.respond_json(await asyncio.to_thread(request_view, found, with_spans=True))

    async def steps(self, exchange: Exchange) -> None:
        """GET /debug/steps?num=200: the most recent steps, oldest first."""
        query = self._admitted(exchange, ("num",))
        num = int(_number(query, "num", 200, 1, MAX_STEPS))
        records = self._service.engine.step_records()[-num:]
        now_s = time.monotonic()
        await exchange.respond_json({"steps": [step_view(record, now_s) for record in records]})

    async def trace(self, exchange: Exchange) -> None:
        """GET /debug/trace?seconds=5: waits so long, then gives what ran meanwhile as Perfetto opens it.

        Steps that begin meanwhile have the time of each kind of op.
        """
        query = self._admitted(exchange, ("seconds",))
        seconds = _number(query, "seconds", 5.0, 0.0, MAX_TRACE_S)
        start_s = time.monotonic()
        self._service.engine.trace_ops(True)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._service.engine.trace_ops(False)
        steps = [record for record in self._service.engine.step_records() if record.end_s >= start_s]
        finished = [r for r in self._service.finished.recent(MAX_LISTED) if r.stamps.end_s >= start_s]
        zero_s = min([start_s, *(r.stamps.arrival_s for r in finished), *(s.start_s for s in steps)])
        await exchange.respond_json(await asyncio.to_thread(chrome_trace, steps, finished, zero_s))

    async def live(self, exchange: Exchange) -> None:
        """GET /debug/live: the last minute's percentiles, what runs and waits, whose the KV blocks are."""
        self._admitted(exchange, ())
        service = self._service
        now_s = time.monotonic()
        stats = service.engine.stats()
        steps = service.engine.step_records()[-64:]
        await exchange.respond_json(
            {
                "model": service.engine.info.model,
                "uptime_s": now_s - service.start_s,
                "now_unix_s": time.time(),
                "running": stats.running,
                "waiting": stats.waiting,
                "requests": service.finished.num_added,
                "predicted_wait_s": stats.predicted_wait_s,
                **service.metrics.live.snapshot(now_s),
                "kv": _block_map(service.engine.block_owners()),
                "steps": [_brief(record, now_s) for record in steps],
                "steps_run": stats.scheduler.steps,
            }
        )

    def _admitted(self, exchange: Exchange, known: tuple[str, ...]) -> dict[str, str]:
        """The query. Raises NotFoundError where the routes are off, AuthError without a key, RequestError."""
        service = self._service
        if not service.has_debug_routes:
            raise NotFoundError("/debug is off: restart with `--debug-routes on`")
        service.access.tenant_salt(exchange)
        service.require_ready()
        query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
        for name in query:
            if name not in known:
                listed = ", ".join(known) or "nothing"
                raise RequestError(f"query field {name[:64]!r} is unknown: {exchange.path} takes {listed}", param=name)
        return {name: values[-1] for name, values in query.items()}


def _views(found: list[FinishedRequest]) -> list[dict[str, Any]]:
    return [request_view(request, with_spans=False) for request in found]


def _brief(record: StepRecord, now_s: float) -> list[float]:
    """What the step timeline draws: id, age, length, predicted length (ms), prefill tokens, decode tokens, machine."""
    view = step_view(record, now_s)
    names = ("step", "age_ms", "ms", "predicted_ms", "prefill_tokens", "decode_tokens", "machine_ms")
    return [view[name] for name in names]


def _block_map(owners: bytes) -> dict[str, Any]:
    """Blocks by owner, and a map of at most MAX_MAP_CELLS cells: each shows the most held of its blocks."""
    size = -(-len(owners) // MAX_MAP_CELLS)
    cells = [max(owners[at : at + size]) for at in range(0, len(owners), size)]
    return {
        "blocks": len(owners),
        "free": owners.count(0),
        "cached": owners.count(1),
        "running": owners.count(2),
        "pinned": owners.count(3),
        "map": "".join("fcrp"[cell] for cell in cells),
        "blocks_per_cell": size,
    }


def _number(query: dict[str, str], name: str, default: float, least: float, most: float) -> float:
    try:
        value = float(query[name]) if name in query else default
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise RequestError(f"`{name}` is {query[name][:32]!r}: use {least:g} to {most:g}", param=name)
    return value
