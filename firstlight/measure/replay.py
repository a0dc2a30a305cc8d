"""Sends sessions at their own times, whatever the server does: an open loop.

Waiting counts: a server that falls behind is felt as latency, not as a slower client. Knows sessions and records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from firstlight.measure.bench import LevelResult, Prompt, RequestRecord, probe_lag, send
from firstlight.measure.client import Endpoint
from firstlight.measure.workload import Session

__all__ = ["run_sessions"]


async def run_sessions(
    endpoint: Endpoint,
    model: str,
    sessions: Sequence[Session],
    *,
    ignore_eos: bool,
    streams: int = 0,
    is_streamed: bool = True,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LevelResult:
    """The records of all turns. `streams` above 0 closes the loop: so many sessions at a time, begin times ignored."""
    records: list[RequestRecord] = []
    lags_s: list[float] = []
    zero_s = time.perf_counter()

    async def run_one(session: Session) -> None:
        history: list[dict[str, str]] = []
        due_s = time.perf_counter() - zero_s if streams else session.begin_s
        for at, prompt in enumerate(session.prompts):
            due_s += session.thinks_s[at] if session.thinks_s else 0.0
            await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - zero_s)))
            messages = history + prompt.messages
            record = await send(
                endpoint, model, Prompt(messages, prompt.max_tokens), ignore_eos, zero_s, is_streamed=is_streamed
            )
            record.late_s = record.sent_s - due_s
            records.append(record)
            on_done(record)
            due_s = record.end_s
            if session.is_conversation:
                history = [*messages, {"role": "assistant", "content": record.text}]
            if record.error:
                break  # what follows would not be the recorded conversation

    async def run_stream(waiting: list[Session]) -> None:
        while waiting:
            await run_one(waiting.pop(0))

    probe = asyncio.create_task(probe_lag(lags_s))
    cpu_before_s = time.process_time()
    try:
        if streams:
            waiting = list(sessions)
            await asyncio.gather(*(run_stream(waiting) for _ in range(streams)))
        else:
            await asyncio.gather(*(run_one(session) for session in sessions))
        wall_s = time.perf_counter() - zero_s
        client_cpu_s = time.process_time() - cpu_before_s
    finally:
        probe.cancel()
    return LevelResult(streams, records, wall_s, client_cpu_s, lags_s)
