"""`firstlight bench` under an open loop, over repeats, as a search for the highest rate, or on two servers in turn."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

from firstlight.cli.commands import BenchConfig
from firstlight.cli.console import dim, note
from firstlight.cli.own_server import own_server
from firstlight.cli.version import package_version
from firstlight.errors import ConfigError
from firstlight.measure.bench import (
    LevelResult,
    LoadShape,
    RequestRecord,
    first_contact,
    prompt_source,
    refuse_failures,
)
from firstlight.measure.bench_report import percentile, render_table, report_document
from firstlight.measure.client import Endpoint
from firstlight.measure.objectives import Objective, goodput, interval, meets, parse_objectives, ratio_interval
from firstlight.measure.pictures import Bars, Lines, Table, render_page, write_png
from firstlight.measure.replay import run_sessions
from firstlight.measure.workload import (
    Session,
    arrivals_s,
    file_sessions,
    single_turns,
    synthetic_prompts,
    trace_sessions,
)

__all__ = ["draw", "figures", "run_load", "write_files"]

_DEFAULT_REQUESTS = 32
_MAX_SEARCH_RUNS = 8


def run_load(config: BenchConfig, engine_options: dict[str, object]) -> int:
    """Runs the load that `config` describes; raises BackendError when a request failed."""
    objectives = parse_objectives(config.slo)
    _check(config, objectives)
    if config.compare or config.url:
        urls = config.compare or (config.url,)
        return _run_on([Endpoint.parse(url, config.api_key) for url in urls], config, objectives)
    with own_server(engine_options) as endpoint:
        return _run_on([endpoint], config, objectives)


def _check(config: BenchConfig, objectives: tuple[Objective, ...]) -> None:
    if config.compare and len(config.compare) != 2:
        raise ConfigError(f"`--compare` has {len(config.compare)} addresses, it takes 2", hint="--compare URL_A,URL_B")
    if config.find_max and not (objectives and config.rate):
        raise ConfigError("`--find-max` needs `--slo` and a first `--rate`", hint="--rate 1 --slo ttft_p95=500ms")
    if config.find_max and (config.compare or config.trace):
        raise ConfigError("`--find-max` draws its own arrivals on one server", hint="leave --compare and --trace out")
    if config.rate < 0 or config.trace_speed <= 0 or config.repeats < 1:
        raise ConfigError("`--rate` has to be 0 or more, `--trace-speed` above 0, `--repeats` 1 or more")
    if config.prefix_tokens and not config.input_tokens:
        raise ConfigError("`--prefix-tokens` belongs to synthetic prompts", hint="give `--input-tokens` too")
    for path in filter(None, (config.json, config.jsonl, config.html, config.png)):
        if not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"`{path}`: its folder does not exist", hint="create the folder first")


def build_sessions(config: BenchConfig, rate: float, seed: int) -> list[Session]:
    """The load's sessions; without a rate they all begin at once, for a closed loop to take in order."""
    count = config.requests or _DEFAULT_REQUESTS
    begins_s = arrivals_s(rate, config.arrivals, seed) if rate else itertools.repeat(0.0)
    if config.trace:
        sessions, num_skipped = trace_sessions(
            config.trace,
            count=count,
            speed=config.trace_speed,
            max_input_tokens=config.input_tokens,
            begins_s=begins_s if rate else None,
        )
        if num_skipped:
            note(dim(f"{num_skipped} rows of the trace are longer than {config.input_tokens} tokens and were skipped"))
        return sessions
    if config.prompts:
        return file_sessions(config.prompts, begins_s, count, config.max_tokens)
    if config.input_tokens:
        prompts = synthetic_prompts(
            seed,
            input_tokens=config.input_tokens,
            prefix_tokens=config.prefix_tokens,
            max_tokens=config.max_tokens,
        )
    else:
        prompts = prompt_source(seed, config.max_tokens)
    return single_turns(itertools.islice(prompts, count), begins_s)


def _run_on(endpoints: list[Endpoint], config: BenchConfig, objectives: tuple[Objective, ...]) -> int:
    with asyncio.Runner() as runner:
        models = [runner.run(first_contact(endpoint)) for endpoint in endpoints]

        def one(at: int, rate: float, seed: int) -> LevelResult:
            sessions = build_sessions(config, rate, seed)
            streams = 0 if config.is_open_loop else config.concurrency[0]
            return runner.run(_one_run(endpoints[at], models[at], sessions, config, streams))

        if config.find_max:
            best, tried = find_max(lambda rate: one(0, rate, config.load_seed), config.rate, objectives)
            is_bounded = any(rate > best for rate, _ in tried)
            words = "highest rate that meets" if is_bounded else "no rate that was tried missed"
            print(f"{words} {config.slo}: {best:.2f} requests/s ({len(tried)} runs)")
            runs = {f"{rate:.2f}/s": [level] for rate, level in tried}
        else:
            names = "AB" if config.compare else [endpoints[0].url]
            runs = {name: [] for name in names}
            for repeat in range(config.repeats):
                # A B, B A, ...: what drifts on the machine meets both alike.
                order = range(len(endpoints)) if repeat % 2 == 0 else reversed(range(len(endpoints)))
                for at in order:
                    runs[names[at]].append(one(at, config.rate, config.load_seed + repeat))
    rows = figures(runs, objectives)
    print("\n".join("  ".join(cell.rjust(12) for cell in row) for row in rows))
    ratios = _ratios(runs["A"], runs["B"], objectives) if config.compare else []
    if ratios:
        print("\n" + "\n".join(f"{row[0]:>16}  B / A = {row[1]}  {row[2]}" for row in ratios[1:]))
    print("\n" + render_table([level for levels in runs.values() for level in levels]))
    tables = [Table("Figures", rows)] + ([Table("B beside A", ratios)] if ratios else [])
    server = {name: url.url for name, url in zip(runs, endpoints, strict=False)}
    write_files(config, "firstlight bench", runs, tables, {**server, "models": models})
    refuse_failures(level for levels in runs.values() for level in levels)
    return 0


async def _one_run(
    endpoint: Endpoint, model: str, sessions: list[Session], config: BenchConfig, streams: int
) -> LevelResult:
    num_turns, num_done = sum(len(session.prompts) for session in sessions), 0

    def on_done(record: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        if sys.stderr.isatty():
            filled = 30 * num_done // num_turns
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {num_done}/{num_turns} \x1b[K")
            sys.stderr.flush()

    level = await run_sessions(
        endpoint, model, sessions, ignore_eos=config.ignore_eos, streams=streams, on_done=on_done
    )
    sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
    late_ms = 1e3 * (percentile([record.late_s for record in level.records], 99) or 0.0)
    note(dim(f"{endpoint.url}: {num_done} requests in {level.wall_s:.1f} s, sent at most {late_ms:.1f} ms late (p99)"))
    return level


def find_max(
    run: Any, first_rate: float, objectives: tuple[Objective, ...]
) -> tuple[float, list[tuple[float, LevelResult]]]:
    """The highest rate found to meet the objectives (0: none), by doubling, then halving the interval."""
    low, high, rate = 0.0, math.inf, first_rate
    tried: list[tuple[float, LevelResult]] = []
    while len(tried) < _MAX_SEARCH_RUNS and (math.isinf(high) or high - low > 0.05 * high):
        level = run(rate)
        tried.append((rate, level))
        is_met = meets(level, objectives)
        note(dim(f"{rate:.2f} requests/s: objectives {'met' if is_met else 'missed'}"))
        low, high = (rate, high) if is_met else (low, rate)
        rate = 2 * low if math.isinf(high) else (low + high) / 2
    return low, tried


def _times_ms(level: LevelResult, name: str, percent: float) -> float:
    good = [record for record in level.records if record.error is None and record.times_s]
    values = {
        "ttft": [r.ttft_s for r in good],
        "itl": [gap for r in good for gap in r.gaps_s],
        "tpot": [r.tpot_s for r in good if r.tpot_s is not None],
        "e2e": [r.e2e_s for r in good],
    }[name]
    return 1e3 * (percentile(values, percent) or 0.0)


def _measures(level: LevelResult, objectives: tuple[Objective, ...]) -> dict[str, float]:
    tokens = sum(record.completion_tokens for record in level.records if record.error is None)
    tpot_ms = _times_ms(level, "tpot", 50)
    out = {f"{name}_p{q}": _times_ms(level, name, q) for name in ("ttft", "itl", "tpot", "e2e") for q in (50, 95, 99)}
    out["stream_tok/s"] = 1e3 / tpot_ms if tpot_ms else 0.0
    out["tok/s"] = tokens / level.wall_s if level.wall_s else 0.0
    if objectives:
        out["goodput/s"] = goodput(level, objectives)
    return out


def figures(runs: dict[str, list[LevelResult]], objectives: tuple[Objective, ...]) -> list[list[str]]:
    """A header and one row per measure (times in ms): the mean over repeats, with its 95 % interval from 2 on."""
    columns = {name: [_measures(level, objectives) for level in levels] for name, levels in runs.items()}
    rows = [["", *columns]]
    for measure in next(iter(columns.values()))[0]:
        cells = []
        for repeats in columns.values():
            values = [repeat[measure] for repeat in repeats]
            bounds = interval(values)
            if not any(values) and measure != "goodput/s":
                cells.append("-")  # whole answers have no gaps
                continue
            cells.append(f"{statistics.fmean(values):.1f}" + (f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else ""))
        rows.append([measure, *cells])
    return rows


def _ratios(a: list[LevelResult], b: list[LevelResult], objectives: tuple[Objective, ...]) -> list[list[str]]:
    first, second = ([_measures(level, objectives) for level in levels] for levels in (a, b))
    rows = [["", "B / A", "95 %"]]
    for measure in first[0]:
        ratio, bounds = ratio_interval([m[measure] for m in first], [m[measure] for m in second])
        shown = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "needs --repeats 2 or more"
        rows.append([measure, "-" if math.isnan(ratio) else f"{ratio:.3f}", shown])
    return rows


def draw(runs: dict[str, list[LevelResult]]) -> list[Lines | Bars]:
    """The plots of named runs: distributions of TTFT and ITL, throughput."""
    parts: list[Lines | Bars] = []
    for title, name in (("Time to first token", "ttft"), ("Gap between tokens", "itl")):
        curves = {
            run: [(statistics.fmean(_times_ms(level, name, q) for level in levels), float(q)) for q in range(0, 101, 2)]
            for run, levels in runs.items()
        }
        parts.append(Lines(title, "ms", "% of times at most this", curves, is_log=True))
    longest = {run: statistics.fmean(_times_ms(level, "itl", 100) for level in levels) for run, levels in runs.items()}
    parts.append(Bars("Longest gap between tokens", "ms", longest))
    rates = {run: statistics.fmean(_measures(level, ())["tok/s"] for level in levels) for run, levels in runs.items()}
    parts.append(Bars("Throughput", "output tokens/s", rates))
    return parts


def write_files(
    config: BenchConfig, title: str, runs: dict[str, list[LevelResult]], tables: list[Table], server: dict[str, Any]
) -> None:
    """Writes what was asked for: JSON with every raw time, JSONL per request, the page, the picture."""
    levels = [level for repeats in runs.values() for level in repeats]
    shape = LoadShape(
        concurrency=tuple(level.concurrency for level in levels),
        requests_per_level=tuple(len(level.records) for level in levels),
        max_tokens=config.max_tokens,
        ignore_eos=config.ignore_eos,
        seed=config.load_seed,
    )
    document = report_document(
        levels, shape, server=server, command=["firstlight", *sys.argv[1:]], version=package_version()
    )
    document["options"] = msgspec.to_builtins(config) | {"api_key": ""}
    document["tables"] = {table.title: table.rows for table in tables}
    names = [run for run, repeats in runs.items() for level in repeats for _ in level.records]
    for name, raw in zip(names, document["records"], strict=True):
        raw["run"] = name
    if config.json:
        Path(config.json).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if config.jsonl:
        Path(config.jsonl).write_bytes(b"".join(msgspec.json.encode(raw) + b"\n" for raw in document["records"]))
    hardware = document["hardware"]
    conditions = (
        f"{document['measured_at']}, {hardware['cpu']}, {hardware['usable_cores']} cores, commit {document['commit']}: "
        + " ".join(document["command"])
    )
    parts: list[Table | Lines | Bars] = [*tables, *draw(runs)]
    if config.html:
        Path(config.html).write_text(render_page(title, conditions, parts), "utf-8")
    if config.png:
        write_png(config.png, title, parts)
    for path in filter(None, (config.json, config.jsonl, config.html, config.png)):
        note(dim(f"written: {path}"))
