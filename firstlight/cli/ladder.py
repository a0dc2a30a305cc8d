"""`firstlight bench --ladder`: the same load on this machine's engine, one technique more at each rung."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field, fields

from firstlight.cli.bench_load import figures, write_files
from firstlight.cli.commands import BenchConfig
from firstlight.cli.console import dim, note
from firstlight.cli.own_server import own_server
from firstlight.config import EngineConfig
from firstlight.errors import BackendError, ConfigError
from firstlight.measure.bench import LevelResult, prompt_source, served_model, warm_up
from firstlight.measure.client import Endpoint
from firstlight.measure.pictures import Table
from firstlight.measure.replay import run_sessions
from firstlight.measure.workload import Session, single_turns, synthetic_prompts

__all__ = ["RUNGS", "Rung", "climb", "ladder_sessions"]

_STREAMS = 8
_REQUESTS = 24
_LONG_EVERY = 6
_LONG_TOKENS = 1200
_PREFIX_TOKENS = 200
_NO_BOUND_MS = 600_000.0


@dataclass(frozen=True, slots=True)
class Rung:
    """One step up: engine options beside the ones below, and whether answers come as they are made."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    is_streamed: bool = True


_ALONE = {"prefix_cache": False, "itl_slo_ms": _NO_BOUND_MS, "max_step_tokens": 4096}

RUNGS = (
    Rung("whole answers", {**_ALONE, "max_step_rows": 1}, is_streamed=False),
    Rung("+ streaming", {**_ALONE, "max_step_rows": 1}),
    Rung("+ static batching", {**_ALONE, "mode": "static"}),
    Rung("+ dynamic batching", {**_ALONE, "mode": "dynamic"}),
    Rung("+ continuous batching", {**_ALONE}),
    Rung("+ latency budget", {"prefix_cache": False}),
    Rung("+ prefix cache"),
)
"""Static and dynamic batches keep their own bound of rows; a rung with `max_step_rows` 1 runs one request at a time."""


def ladder_sessions(config: BenchConfig) -> list[Session]:
    """Chat questions behind one shared text; every sixth is a long document, which its neighbours may feel."""
    count = config.requests or _REQUESTS
    shared = next(
        synthetic_prompts(
            config.load_seed, input_tokens=_PREFIX_TOKENS, prefix_tokens=_PREFIX_TOKENS, max_tokens=config.max_tokens
        )
    ).messages[0]["content"]
    long_ones = synthetic_prompts(
        config.load_seed + 1, input_tokens=_LONG_TOKENS, prefix_tokens=0, max_tokens=config.max_tokens
    )
    prompts = []
    for at, prompt in enumerate(itertools.islice(prompt_source(config.load_seed, config.max_tokens), count)):
        if at % _LONG_EVERY == _LONG_EVERY - 1:
            prompts.append(next(long_ones))
        else:
            prompt.messages[0]["content"] += " " + shared
            prompts.append(prompt)
    return single_turns(prompts, itertools.repeat(0.0))


def climb(config: BenchConfig, engine_options: dict[str, object]) -> int:
    """Measures every rung, prints the table, writes the files that were asked for."""
    if config.url or config.compare or config.is_open_loop:
        raise ConfigError("`--ladder` starts its own servers and closes the loop", hint="leave addresses and rates out")
    known = {option.name for option in fields(EngineConfig)}
    set_by_ladder = {name for rung in RUNGS for name in rung.options} & set(engine_options)
    if set_by_ladder:
        raise ConfigError(f"the ladder sets `{min(set_by_ladder)}` itself", hint="leave it out")
    sessions = ladder_sessions(config)
    streams = config.concurrency[0] if len(config.concurrency) == 1 else _STREAMS
    runs: dict[str, list[LevelResult]] = {}
    for rung in RUNGS:
        if not set(rung.options) <= known:
            note(dim(f"{rung.name}: this engine has no option for it"))
            continue
        with own_server({**engine_options, **rung.options}) as endpoint:
            runs[rung.name] = [
                asyncio.run(_measure(endpoint, rung, sessions, streams, config.ignore_eos))
                for _ in range(config.repeats)
            ]
        note(f"{rung.name}: {len(sessions)} requests in {runs[rung.name][-1].wall_s:.1f} s")
    rows = _rungs_as_rows(runs)
    print("\n".join("  ".join(cell.rjust(22 if at == 0 else 12) for at, cell in enumerate(row)) for row in rows))
    title = "What each technique gains on this machine"
    write_files(config, title, runs, [Table(f"{streams} streams, closed loop", rows)], {"started_for_the_run": True})
    errors = [record.error for levels in runs.values() for level in levels for record in level.records if record.error]
    if errors:
        raise BackendError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    return 0


def _rungs_as_rows(runs: dict[str, list[LevelResult]]) -> list[list[str]]:
    """One row per rung: the measures a person feels, and throughput against the rung below."""
    by_measure = {row[0]: row[1:] for row in figures(runs, ())}
    shown = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "e2e_p95", "stream_tok/s", "tok/s")
    rows = [["rung (times in ms)", *shown, "gain"]]
    rates = [float(cell.split(" ")[0]) for cell in by_measure["tok/s"]]
    for at, name in enumerate(runs):
        gain = f"{rates[at] / rates[at - 1]:.2f}x" if at and rates[at - 1] else "-"
        rows.append([name, *(by_measure[measure][at] for measure in shown), gain])
    return rows


async def _measure(
    endpoint: Endpoint, rung: Rung, sessions: list[Session], streams: int, ignore_eos: bool
) -> LevelResult:
    model = await served_model(endpoint)
    await warm_up(endpoint, model)
    return await run_sessions(
        endpoint, model, sessions, ignore_eos=ignore_eos, streams=streams, is_streamed=rung.is_streamed
    )
