"""`firstlight simulate`: a recorded trace through the engine's scheduler and cache on a virtual clock."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec

from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import SimulateConfig
from firstlight.errors import ConfigError
from firstlight.measure.bench_report import percentile
from firstlight.measure.objectives import parse_objectives
from firstlight.measure.pictures import Bars, Lines, Table, render_page, write_png
from firstlight.simulate import (
    Setup,
    Timed,
    Trace,
    read_hardware,
    read_trace,
    render_simulation,
    replay_blocks,
    replay_optimum,
    simulate,
    simulation_document,
)

__all__ = ["run"]


def run(invocation: Invocation) -> int:
    """Simulates what the options say; prints a table or one JSON object."""
    config = invocation.config(SimulateConfig)
    _check(config)
    objectives = parse_objectives(config.slo)
    trace = read_trace(config.trace, count=config.requests, speed=config.trace_speed)
    setup = _setup(config)
    cache_blocks = config.cache_blocks
    if setup is not None and trace.block_size:
        cache_blocks = cache_blocks or setup.hardware.kv_tokens // trace.block_size
    hits = None
    if trace.block_size and config.policy == "optimum":
        hits = replay_optimum(trace, cache_blocks)
    elif trace.block_size:
        hits = replay_blocks(trace, config.policy, cache_blocks, config.replicas)
    gc.disable()  # no step makes cycles, and looking for them takes a seventh of the time
    try:
        timed = simulate(trace, setup) if setup is not None and config.policy != "optimum" else None
    finally:
        gc.enable()
    document = simulation_document(_described(config, trace, setup, cache_blocks), hits, timed, objectives)
    print(msgspec.json.encode(document).decode() if config.json else render_simulation(document))
    _draw(config, document, timed)
    return 0


def _check(config: SimulateConfig) -> None:
    if not config.trace:
        raise ConfigError("`simulate` needs a trace", hint="firstlight simulate TRACE --cache-blocks 1000")
    if not config.hardware and not config.cache_blocks:
        raise ConfigError("without `--hardware` the cache has no size", hint="give `--cache-blocks`")
    if config.policy == "optimum" and config.replicas > 1:
        raise ConfigError("`--policy optimum` is worked out for one cache", hint="leave `--replicas` out")
    if min(config.replicas, config.batch_size) < 1 or min(config.cache_blocks, config.requests) < 0:
        raise ConfigError("`--replicas` and `--batch-size` have to be 1 or more, counts 0 or more")
    if config.trace_speed <= 0:
        raise ConfigError(f"`--trace-speed` is {config.trace_speed:g}: it has to be above 0")
    for path in filter(None, (config.html, config.png)):
        if not config.hardware:
            raise ConfigError(f"`{path}`: plots are of times", hint="give `--hardware`")
        if not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"`{path}`: its folder does not exist", hint="create the folder first")


def _setup(config: SimulateConfig) -> Setup | None:
    if not config.hardware:
        return None
    return Setup(
        hardware=read_hardware(config.hardware),
        policy=config.policy,
        cache_blocks=config.cache_blocks,
        num_replicas=config.replicas,
        routing=config.routing,
        mode=config.mode,
        batch_size=config.batch_size,
        itl_slo_s=config.itl_slo_ms / 1e3,
    )


def _described(config: SimulateConfig, trace: Trace, setup: Setup | None, cache_blocks: int) -> dict[str, Any]:
    """The options as they were used, and the hardware with its assumptions."""
    used: dict[str, Any] = msgspec.to_builtins(config)
    for name in ("json", "html", "png"):
        del used[name]
    used["cache_blocks"] = cache_blocks
    used["block_size"] = trace.block_size or None
    used["requests"] = len(trace.requests)
    used["hardware"] = msgspec.to_builtins(setup.hardware) if setup is not None else None
    return used


def _draw(config: SimulateConfig, document: dict[str, Any], timed: Timed | None) -> None:
    if timed is None or not (config.html or config.png):
        return
    records = [record for record in timed.level.records if record.times_s]
    times = {
        "Time to first token": [record.ttft_s for record in records],
        "Gap between tokens": [gap for record in records for gap in record.gaps_s],
        "Whole answer": [record.e2e_s for record in records],
    }
    parts: list[Table | Lines | Bars] = [
        Lines(title, "ms", "% of times at most this", {config.policy: _distribution(values)}, is_log=True)
        for title, values in times.items()
    ]
    title = f"{Path(config.trace).name} on {document['setup']['hardware']['name']}"
    if config.png:
        write_png(config.png, title, parts)
    if config.html:
        table = Table("Result", [["", "value"], *([k, str(v)] for k, v in document["timed"].items())])
        note = ", ".join(f"{name} {value}" for name, value in document["setup"].items() if name != "hardware")
        Path(config.html).write_text(render_page(title, note, [table, *parts]), "utf-8")


def _distribution(values_s: list[float]) -> list[tuple[float, float]]:
    values = sorted(values_s)
    return [(1e3 * (percentile(values, q) or 0.0), float(q)) for q in range(0, 101, 2)]
