"""What `firstlight tune` leaves behind: every setting of a small space measured live, beside its choice of few runs.

Three steps, each to be given again until it ends well: `tune` is the command itself; `grid` finds the highest rate
inside the objectives of every combination, live; `beside` runs tune's choice and the grid's best in turn, A B B A, each
at its own rate, as the best of many noisy runs looks better than it is. A step ends after `--seconds`, `tune` by
SIGTERM; what was measured is kept in FOLDER.

    python -m benchmarks.tune tune FOLDER
    python -m benchmarks.tune grid FOLDER --seconds 70
    python -m benchmarks.tune beside FOLDER --seconds 70 --out benchmarks/results/tune-smollm2.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.document import conditions, write
from firstlight.cli.bench_load import build_sessions
from firstlight.cli.commands import BenchConfig
from firstlight.cli.own_server import own_server
from firstlight.measure.bench import first_contact
from firstlight.measure.objectives import parse_objectives, ratio_interval
from firstlight.measure.replay import run_sessions
from firstlight.tune import Journal, Outcome, Settings, at_rate, key_of, outcome_of, read_space, unit_rate

SLO = "ttft_p95=1000ms,itl_p95=60ms"
SPACE = "max-step-rows=4,16,64;itl-slo-ms=0,30,60"
REQUESTS, INPUT_TOKENS, MAX_TOKENS = 48, 160, 32
THREADS = 2
LADDER = 1.12
"""From one rate of a combination to the next, up or down, until it is bracketed."""
BRACKET = 1.04
"""Ratio of the lowest missed to the highest met rate at which a combination is done; as near as `tune` goes."""
LOWEST_SHARE = 0.6
"""Of the first rate: a combination that misses there is far from the best, and is left."""
PAIRS = 6


class SpentError(Exception):
    """The time of this call is over."""


@dataclass(slots=True)
class Bench:
    """The load at a rate on a server with settings; what the folder holds is not run again."""

    folder: Path
    end_s: float

    def outcome(self, kind: str, settings: Settings, rate: float, repeat: int = 0) -> Outcome:
        """Measured now or before. Raises SpentError."""
        key = f"{key_of(settings)} {rate:g} {repeat}"
        return self._journal().recall(kind, key, Outcome, lambda: self._measured(settings, rate))

    def _journal(self) -> Journal:
        purpose = {"slo": SLO, "load": [REQUESTS, INPUT_TOKENS, MAX_TOKENS]}
        return Journal(self.folder / "grid.json", purpose)

    def _measured(self, settings: Settings, rate: float) -> Outcome:
        if time.monotonic() > self.end_s:
            raise SpentError
        load = BenchConfig(requests=REQUESTS, input_tokens=INPUT_TOKENS, max_tokens=MAX_TOKENS)
        sessions = at_rate(unit_rate(build_sessions(load, 1.0, 0)), rate)
        with own_server({"threads": THREADS, **settings}) as endpoint, asyncio.Runner() as runner:
            model = runner.run(first_contact(endpoint))
            level = runner.run(run_sessions(endpoint, model, sessions, ignore_eos=True))
        found = outcome_of(level, parse_objectives(SLO))
        print(f"{key_of(settings)} {rate:g}/s: {'met' if found.is_met else 'missed'} {found.values_ms}", flush=True)
        return found


def run_tune(folder: Path) -> None:
    """Becomes the command."""
    options = {"workload": "synthetic", "slo": SLO, "space": SPACE, "requests": REQUESTS, "threads": THREADS}
    options |= {"input-tokens": INPUT_TOKENS, "max-tokens": MAX_TOKENS, "output": folder / "tuned.toml"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    os.execv(sys.executable, [sys.executable, "-m", "firstlight", "tune", *words])


def chosen(folder: Path) -> dict[str, Any]:
    """What `tune` wrote."""
    found: dict[str, Any] = json.loads((folder / "tuned.json").read_text())
    return found


def combinations() -> list[Settings]:
    knobs = read_space(SPACE)
    return [
        dict(zip((knob.name for knob in knobs), values, strict=True))
        for values in itertools.product(*(knob.values for knob in knobs))
    ]


def highest(run: Callable[[float], Outcome], first_rate: float) -> tuple[float, Outcome, int]:
    """The highest rate seen inside the objectives (0: none), its outcome, and how many runs that took."""
    low, high, rate, num = 0.0, math.inf, first_rate, 0
    best = Outcome()
    while high > BRACKET * low and rate >= LOWEST_SHARE * first_rate:
        num += 1
        outcome = run(float(f"{rate:.3g}"))
        if outcome.is_met:
            low, best = rate, outcome
        else:
            high = rate
        rate = LADDER * low if math.isinf(high) else math.sqrt(low * high) if low else high / LADDER
    return low, best, num


def grid(bench: Bench) -> list[dict[str, Any]]:
    """Every combination with its highest rate, the most goodput first."""
    first_rate = chosen(bench.folder)["highest_rate_per_s"][0]
    rows = []
    for settings in combinations():
        rate, outcome, num = highest(lambda rate, s=settings: bench.outcome("grid", s, rate), first_rate)  # type: ignore[misc]
        rows.append({"settings": settings, "rate": rate, "runs": num, "outcome": msgspec.to_builtins(outcome)})
    return sorted(rows, key=lambda row: -row["outcome"]["goodput_per_s"])


def beside(bench: Bench) -> dict[str, Any]:
    """Tune's choice and the grid's best in turn, each at the rate it was found at."""
    rows, tuned = grid(bench), chosen(bench.folder)
    sides = {
        "tune": (tuned["settings"], tuned["highest_rate_per_s"][0]),
        "grid": (rows[0]["settings"], rows[0]["rate"]),
    }
    runs: dict[str, list[Outcome]] = {name: [] for name in sides}
    for repeat in range(PAIRS):
        for name in sides if repeat % 2 == 0 else reversed(sides):
            runs[name].append(bench.outcome(f"beside {name}", *sides[name], repeat))
    goodputs = {name: [outcome.goodput_per_s for outcome in outcomes] for name, outcomes in runs.items()}
    ratio, bounds = ratio_interval(goodputs["grid"], goodputs["tune"])
    return {
        "load": {"requests": REQUESTS, "input_tokens": INPUT_TOKENS, "max_tokens": MAX_TOKENS, "slo": SLO},
        "space": SPACE,
        "grid_live_runs": sum(row["runs"] for row in rows),
        "tune_live_runs": len(tuned["live"]),
        "share_of_grid_as_found": tuned["outcome"]["goodput_per_s"] / rows[0]["outcome"]["goodput_per_s"],
        "share_of_grid_in_turn": {"ratio": ratio, "interval_95": bounds, "pairs": PAIRS},
        "goodput_per_s_median": {name: statistics.median(values) for name, values in goodputs.items()},
        "sides": {name: {"settings": settings, "rate": rate} for name, (settings, rate) in sides.items()},
        "in_turn": {name: msgspec.to_builtins(outcomes) for name, outcomes in runs.items()},
        "grid": rows,
        "tune": {name: tuned[name] for name in ("conclusion", "live", "effects", "correction", "num_simulated")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("tune", "grid", "beside"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    if arguments.step == "tune":
        run_tune(arguments.folder)
    bench = Bench(arguments.folder, time.monotonic() + arguments.seconds)
    try:
        if arguments.step == "grid":
            for row in grid(bench):
                print(f"{row['outcome']['goodput_per_s']:.2f}/s at {row['rate']:.2f}/s: {row['settings']}")
        else:
            write(conditions("benchmarks.tune", THREADS) | beside(bench), arguments.out)
    except SpentError:
        print("the time is over; give the same command again to go on")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
