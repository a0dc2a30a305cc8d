"""What continuous batching gains over static and dynamic batches, on a recorded trace at rising load.

    python -m benchmarks.modes simulated azure2023_conv.jsonl.gz --out benchmarks/results/modes-simulated.json
    python -m benchmarks.modes live azure2023_conv.jsonl.gz --out benchmarks/results/modes-smollm2.json

Every mode runs the same requests with their arrivals closer and closer together. Latency is that of whole answers. The
trace is one of Azure's public data set, as JSONL with `timestamp_s`, `input_tokens` and `output_tokens`. `live` drives
the engine's core in this process, with the lengths divided by `--shrink`; it adds to the rows of a file made before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.document import conditions, write
from benchmarks.scheduling import drive
from firstlight.config import EngineConfig
from firstlight.measure.bench_report import summarise
from firstlight.measure.percentile import percentile
from firstlight.simulate import Setup, Trace, read_hardware, read_trace, simulate
from firstlight.types import CoreRequest, SamplingParams

SPEEDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0)
SIMULATED_BATCHES, LIVE_BATCHES = (16, 64, 128, 256), (8,)
SIMULATED_BOUNDS_S, LIVE_BOUNDS_S = (10.0, 12.0, 15.0, 20.0, 30.0), (1.0, 2.0, 3.0)
RELAXED_ITL_MS = 1000.0
"""A step may take so long in `relaxed`: continuous batching that promises streams nothing, as batches do not either."""
HOPELESS_S = 60.0
"""Beyond this p95 only the highest load follows, with the largest batches, for what is served then (simulated)."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to batch. `label`: what the comparison calls it, the best size of batch taken."""

    label: str
    mode: str
    batch_size: int = 1
    itl_slo_ms: float = 0.0

    @property
    def columns(self) -> dict[str, Any]:
        return {"way": self.label, "batch_size": None if self.mode == "continuous" else self.batch_size}


def ways(batches: Sequence[int]) -> Iterator[Way]:
    yield Way("continuous", "continuous")
    yield Way("relaxed", "continuous", itl_slo_ms=RELAXED_ITL_MS)
    for mode in ("dynamic", "static"):
        for size in batches:
            yield Way(mode, mode, size)


# -- simulated ----------------------------------------------------------------------------------------------------


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """One row per way and load."""
    hardware = read_hardware(options.hardware)
    gc.disable()  # no step makes cycles, and looking for them takes a seventh of the time
    rows = []
    for way in ways(SIMULATED_BATCHES):
        setup = Setup(hardware=hardware, mode=way.mode, batch_size=way.batch_size, itl_slo_s=way.itl_slo_ms / 1e3)
        is_largest = way.mode == "continuous" or way.batch_size == SIMULATED_BATCHES[-1]
        p95_s = 0.0
        for speed in SPEEDS:
            if p95_s > HOPELESS_S and not (is_largest and speed == SPEEDS[-1]):
                continue
            trace = read_trace(options.trace, count=options.requests, speed=speed)
            rows.append(way.columns | simulated_row(trace, setup))
            p95_s = rows[-1]["e2e_p95_s"]
            print(rows[-1], file=sys.stderr, flush=True)
    shape = {"requests": options.requests, "simulated": msgspec.to_builtins(hardware)}
    return conditions("benchmarks.modes", 1) | shape | compare(rows, SIMULATED_BOUNDS_S) | {"rows": rows}


def simulated_row(trace: Trace, setup: Setup) -> dict[str, Any]:
    """A run's figures. `arithmetic_share`: of the time, what the tokens alone need at the hardware's best."""
    timed = simulate(trace, setup)
    summary = summarise(timed.level)
    num_tokens = summary["prompt_tokens"] - summary["cached_tokens"] + summary["output_tokens"]
    return {
        "offered_per_s": round(len(trace.requests) / trace.requests[-1].arrival_s, 3),
        "served_per_s": round(summary["requests_per_s"], 3),
        "output_tokens_per_s": round(summary["output_tokens_per_s"], 1),
        "rows_per_step": round(timed.mean_rows, 1),
        "kv_held_mean": round(timed.occupancy_mean, 3),
        "kv_held_max": round(timed.occupancy_max, 3),
        "arithmetic_share": round(setup.hardware.token_s * num_tokens / summary["wall_s"], 3),
        **{f"{name}_p95_s": round(summary[f"{name}_ms"]["p95"] / 1e3, 3) for name in ("ttft", "e2e", "itl")},
    }


# -- live ---------------------------------------------------------------------------------------------------------


def live(options: argparse.Namespace) -> dict[str, Any]:
    """The rows made before, and one per way and rate. Those of a rate follow each other: the machine may change."""
    shape = {"model": options.model, "requests": options.requests, "shrink": options.shrink, "seed": options.seed}
    earlier = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    rows = earlier["rows"] if all(earlier.get(name) == value for name, value in shape.items()) else []
    for rate in options.rates:
        for way in ways(LIVE_BATCHES):
            if not options.ways or way.label in options.ways:
                rows.append(way.columns | live_row(options, way, rate))
                print(rows[-1], file=sys.stderr, flush=True)
    return conditions("benchmarks.modes", os.cpu_count() or 1) | shape | compare(rows, LIVE_BOUNDS_S) | {"rows": rows}


def live_row(options: argparse.Namespace, way: Way, rate: float) -> dict[str, Any]:
    config = EngineConfig(
        model=options.model, mode=way.mode, batch_size=way.batch_size, itl_slo_ms=way.itl_slo_ms, max_queue_s=0.0
    )
    requests = trace_requests(options, rate)
    run, sent = drive(config, requests)
    wall_s = max(run.end_s.values()) - min(sent.values())
    row: dict[str, Any] = {
        "offered_per_s": rate,
        "served_per_s": round(len(requests) / wall_s, 3),
        "output_tokens_per_s": round(sum(map(len, run.ids.values())) / wall_s, 1),
    }
    for name, ends_s in (("ttft", run.first_s), ("e2e", run.end_s)):
        times_s = [ends_s[request_id] - sent_s for request_id, sent_s in sent.items()]
        row |= {f"{name}_p{q}_s": round(percentile(times_s, q) or 0.0, 3) for q in (50, 95)}
    return row


def trace_requests(options: argparse.Namespace, rate: float) -> list[tuple[float, CoreRequest]]:
    """The trace's arrivals at `rate` requests a second, its lengths divided by `--shrink`; prompts share nothing."""
    rng = random.Random(options.seed)
    rows = read_trace(options.trace, count=options.requests).requests
    stretch = (len(rows) - 1) / rate / rows[-1].arrival_s
    requests = []
    for i, row in enumerate(rows):
        request = CoreRequest(
            request_id=f"r{i}",
            prompt_ids=[rng.randrange(1000, 40000) for _ in range(max(1, row.input_tokens // options.shrink))],
            params=SamplingParams(temperature=0.0),
            seed=0,
            max_tokens=max(1, row.output_tokens // options.shrink),
            stop_ids=frozenset(),
            arrival_s=0.0,
        )
        requests.append((row.arrival_s * stretch, request))
    return requests


# -- the comparison -----------------------------------------------------------------------------------------------


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per way, size of batch and load: of repeats, the median of each figure."""
    repeats: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        repeats.setdefault((row["way"], row["batch_size"], row["offered_per_s"]), []).append(row)
    return [
        one[0] | {name: round(statistics.median(row[name] for row in one), 3) for name in one[0] if name.endswith("_s")}
        for one in repeats.values()
    ]


def highest_rate(rows: Sequence[dict[str, Any]], label: str, bound_s: float) -> tuple[float, int | None]:
    """The highest offered rate whose p95 is inside the bound, between two loads by interpolation; and its batch."""
    best: tuple[float, int | None] = (0.0, None)
    for size in {row["batch_size"] for row in rows if row["way"] == label}:
        curve = sorted(
            (row["offered_per_s"], row["e2e_p95_s"]) for row in rows if (row["way"], row["batch_size"]) == (label, size)
        )
        inside = [at for at, (_, p95_s) in enumerate(curve) if p95_s <= bound_s]
        if not inside:
            continue
        rate, p95_s = curve[inside[-1]]
        if inside[-1] + 1 < len(curve):
            above, above_s = curve[inside[-1] + 1]
            rate += (above - rate) * (bound_s - p95_s) / (above_s - p95_s)
        best = max(best, (rate, size), key=lambda one: one[0])
    return best


def compare(rows: Sequence[dict[str, Any]], bounds_s: Sequence[float]) -> dict[str, Any]:
    """Rates at equal p95; p95 at equal load and the most ever served, each way with its best size of batch."""
    rows = medians(rows)
    labels = list(dict.fromkeys(row["way"] for row in rows))
    at_equal_p95 = []
    for bound_s in bounds_s:
        entry: dict[str, Any] = {"e2e_p95_s": bound_s}
        for label in labels:
            rate, size = highest_rate(rows, label, bound_s)
            entry[label] = {"per_s": round(rate, 2), "batch_size": size}
        at_equal_p95.append(entry)
    at_equal_load = []
    for load in sorted({row["offered_per_s"] for row in rows}):
        here = [row for row in rows if row["offered_per_s"] == load]
        p95_s = {
            label: min(row["e2e_p95_s"] for row in here if row["way"] == label)
            for label in dict.fromkeys(row["way"] for row in here)
        }
        at_equal_load.append({"offered_per_s": load, "e2e_p95_s": p95_s})
    most = {label: max(row["output_tokens_per_s"] for row in rows if row["way"] == label) for label in labels}
    return {"at_equal_p95": at_equal_p95, "at_equal_load": at_equal_load, "most_output_tokens_per_s": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("simulated", "live"))
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=0, help="0 = 1,200 (simulated), 48 (live)")
    parser.add_argument("--hardware", default="h100-70b", help="simulated")
    parser.add_argument("--model", default="smollm2-135m", help="live")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5, 2.5, 4.0, 6.0], help="requests a second (live)")
    parser.add_argument("--ways", nargs="+", choices=[way.label for way in ways((1,))], help="some of them (live)")
    parser.add_argument("--shrink", type=int, default=8, help="lengths of the trace are divided by this (live)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (live)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.requests = options.requests or {"simulated": 1200, "live": 48}[options.kind]
    write({"simulated": simulated, "live": live}[options.kind](options), options.out)


if __name__ == "__main__":
    main()
