"""`firstlight bench`: puts a short load on a server and says what it felt like.

Without an address it starts `firstlight serve` as a process of its own: what is measured is what a user runs, and the
client's work never takes the server's interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import msgspec

from firstlight.cli.arguments import Invocation, flag_of
from firstlight.cli.commands import BenchConfig
from firstlight.cli.console import dim, note
from firstlight.cli.own_server import own_server
from firstlight.cli.version import package_version
from firstlight.config import EngineConfig
from firstlight.errors import ConfigError
from firstlight.measure.bench import (
    LevelResult,
    LoadShape,
    Prompt,
    RequestRecord,
    first_contact,
    prompt_source,
    refuse_failures,
    run_level,
)
from firstlight.measure.bench_report import render_table, report_document
from firstlight.measure.client import Endpoint

__all__ = ["run"]

ONLY_IN_LOADS = frozenset(
    ("arrivals", "trace_speed", "prompts", "input_tokens", "prefix_tokens", "repeats", "slo", "jsonl", "html", "png")
)
"""Options that the plain closed loop has no use for."""


def run(invocation: Invocation) -> int:
    """Runs the command; 1 when any request failed."""
    config = invocation.config(BenchConfig)
    _check(config)
    if config.ladder:
        from firstlight.cli.ladder import climb

        return climb(config, invocation.given_from(EngineConfig))
    if config.compare or config.is_open_loop:
        from firstlight.cli.bench_load import run_load

        return run_load(config, invocation.given_from(EngineConfig))
    for name in invocation.given_from(BenchConfig).keys() & ONLY_IN_LOADS:
        raise ConfigError(
            f"`{flag_of(name)}` is for an open loop or a comparison, and this is neither",
            hint="add --rate, --trace, --find-max or --compare, or leave it out",
        )
    engine_options = invocation.given_from(EngineConfig)
    if config.url and engine_options:
        name = next(iter(engine_options))
        raise ConfigError(
            f"`{flag_of(name)}` is for a server started for the run, and an address was given",
            hint="leave one of them out",
        )
    if config.url:
        return _measure(Endpoint.parse(config.url, config.api_key), config)
    with own_server(engine_options) as endpoint:
        return _measure(endpoint, config)


def _check(config: BenchConfig) -> None:
    if not config.concurrency or min(config.concurrency) < 1:
        raise ConfigError("`--concurrency` has to be one or more numbers from 1 up", hint="for example 1,4,8,16")
    if config.requests < 0 or config.max_tokens < 0:
        raise ConfigError("`--requests` and `--max-tokens` have to be 0 or more")
    if config.json and not Path(config.json).resolve().parent.is_dir():
        raise ConfigError(f"`--json {config.json}`: its folder does not exist", hint="create the folder first")


def _measure(endpoint: Endpoint, config: BenchConfig) -> int:
    counts = tuple(config.requests or max(4, 2 * streams) for streams in config.concurrency)
    shape = LoadShape(
        concurrency=config.concurrency,
        requests_per_level=counts,
        max_tokens=config.max_tokens,
        ignore_eos=config.ignore_eos,
        seed=config.load_seed,
    )
    prompts = prompt_source(config.load_seed, config.max_tokens)
    with asyncio.Runner() as runner:
        model = runner.run(first_contact(endpoint))
        note(dim(f"{endpoint.url} serves {model}: {sum(counts)} requests, closed loop, prompts of seed {shape.seed}"))
        levels = [
            runner.run(_one_level(endpoint, model, list(itertools.islice(prompts, count)), streams, config.ignore_eos))
            for streams, count in zip(config.concurrency, counts, strict=True)
        ]
    print(render_table(levels))
    if config.json:
        server = {"url": endpoint.url, "model": model, "is_started_for_the_run": not config.url}
        command = ["firstlight", *sys.argv[1:]]
        document = report_document(levels, shape, server=server, command=command, version=package_version())
        Path(config.json).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
        note(dim(f"raw times: {config.json}"))
    refuse_failures(levels)
    return 0


async def _one_level(
    endpoint: Endpoint, model: str, prompts: list[Prompt], streams: int, ignore_eos: bool
) -> LevelResult:
    """One level, with a progress line while it runs."""
    num_done = 0
    is_terminal = sys.stderr.isatty()

    def on_done(record: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        if is_terminal:
            sys.stderr.write(f"\r{streams} streams: {num_done}/{len(prompts)} requests \x1b[K")
            sys.stderr.flush()

    level = await run_level(endpoint, model, prompts, streams, ignore_eos=ignore_eos, on_done=on_done)
    if is_terminal:
        sys.stderr.write("\r\x1b[K")
    else:
        note(f"{streams} streams: {num_done}/{len(prompts)} requests in {level.wall_s:.1f} s")
    return level
