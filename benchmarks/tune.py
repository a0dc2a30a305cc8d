"""What `firstlight tune` chose beside an exhaustive grid over the same settings, both on real servers.

`grid` runs each combination at rates in steps of STEP around the one that tune found, upwards while the objectives
are met, else downwards to where a setting cannot win any more (goodput is at most the rate). `beside` then runs tune's
choice and the grid's best in turn, A B B A, which says what the search for the best of many noisy figures cannot. Both
add to the file, and stop after `--seconds`: run them again until they say that nothing is left.

    firstlight tune MODEL --slo ... --workload synthetic ... --space "max-step-rows=4,64;itl-slo-ms=0,40" -o tuned.toml
    python -m benchmarks.tune grid tuned.json --out benchmarks/results/tune-NAME.json --seconds 80
    python -m benchmarks.tune beside tuned.json --out benchmarks/results/tune-NAME.json --pairs 4
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.document import conditions, write
from firstlight.cli.commands import TuneConfig
from firstlight.cli.own_server import own_server
from firstlight.cli.tune import load_of
from firstlight.measure.bench import first_contact
from firstlight.measure.objectives import parse_objectives
from firstlight.measure.replay import run_sessions
from firstlight.tune import Outcome, Settings, at_rate, key_of, outcome_of, read_space

STEP = 1.1
MIN_SHARE = 0.85
MAX_SHARE = 1.5


class Live:
    """Runs the load that tune was given on a server with other settings; holds all runs in their order."""

    def __init__(self, tuned: dict[str, Any], out: Path) -> None:
        self.config = msgspec.convert(tuned["options"], TuneConfig)
        self._engine: dict[str, Any] = tuned["engine"]
        self._sessions = load_of(self.config, is_recorded=False)
        self._objectives = parse_objectives(self.config.slo)
        self._out = out
        self.document: dict[str, Any] = conditions("benchmarks.tune", int(self._engine.get("threads", 0)))
        self.document |= {"grid": [], "turns": []}
        if out.exists():
            self.document |= json.loads(out.read_text())
        kept = ("measured_at", "command", "settings", "highest_rate_per_s", "outcome", "live", "num_simulated")
        self.document["tuned"] = {name: tuned[name] for name in kept} | {"options": tuned["options"]}

    def run(self, settings: Settings, rate: float) -> Outcome:
        """One run of the load, on a server of its own."""
        with own_server({**self._engine, **settings}) as endpoint, asyncio.Runner() as runner:
            model = runner.run(first_contact(endpoint))
            level = runner.run(run_sessions(endpoint, model, at_rate(self._sessions, rate), ignore_eos=True))
        return outcome_of(level, self._objectives)

    def keep(self, part: str, row: dict[str, Any]) -> None:
        """Adds a row to the file."""
        print(json.dumps(row), flush=True)
        self.document[part].append(row)
        write(self.document, self._out)


def next_power(rows: list[dict[str, Any]], settings: Settings) -> int | None:
    """Which power of STEP times the middle rate the grid wants next of these settings; None: it is done with them."""
    met = {row["power"]: row["outcome"]["is_met"] for row in rows if key_of(row["settings"]) == key_of(settings)}
    going, power = (1 if met.get(0, True) else -1), 0
    while power in met:
        if met[power] != (going == 1):
            return None
        power += going
    return power if MIN_SHARE <= STEP**power <= MAX_SHARE else None


def grid(live: Live, middle: float, end_s: float) -> bool:
    """Runs what is missing of the grid; whether it is whole."""
    space = read_space(live.config.space)
    names = [knob.name for knob in space]
    for values in itertools.product(*(knob.values for knob in space)):
        settings = dict(zip(names, values, strict=True))
        while (power := next_power(live.document["grid"], settings)) is not None:
            if time.monotonic() > end_s:
                return False
            rate = float(f"{middle * STEP**power:.3g}")
            outcome = msgspec.to_builtins(live.run(settings, rate))
            live.keep("grid", {"settings": settings, "rate": rate, "power": power, "outcome": outcome})
    return True


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the most goodput of those inside the objectives."""
    return max(rows, key=lambda row: (row["outcome"]["is_met"], row["outcome"]["goodput_per_s"]))


def beside(live: Live, rate: float, num_pairs: int, end_s: float) -> bool:
    """Runs tune's choice and the grid's best in turn; whether there are so many pairs."""
    best = best_of(live.document["grid"])
    sides = {"tune": (live.document["tuned"]["settings"], rate), "grid": (best["settings"], best["rate"])}
    turns = live.document["turns"]
    while len(turns) < 2 * num_pairs:
        if time.monotonic() > end_s:
            return False
        side = ("tune", "grid", "grid", "tune")[len(turns) % 4]
        live.keep("turns", {"side": side, "outcome": msgspec.to_builtins(live.run(*sides[side]))})
    return True


def share(document: dict[str, Any]) -> dict[str, Any]:
    """Tune's goodput as a share of the grid's best: as the runs of both searches were, and over the turns."""
    best = best_of(document["grid"])
    found: dict[str, Any] = {
        "grid_best": {name: best[name] for name in ("settings", "rate")} | best["outcome"],
        "grid_runs": len(document["grid"]),
        "searched": document["tuned"]["outcome"]["goodput_per_s"] / best["outcome"]["goodput_per_s"],
    }
    sides = {side: [turn["outcome"] for turn in document["turns"] if turn["side"] == side] for side in ("tune", "grid")}
    if all(sides.values()):
        goodput = {side: [outcome["goodput_per_s"] for outcome in turns] for side, turns in sides.items()}
        found["in_turns"] = statistics.fmean(goodput["tune"]) / statistics.fmean(goodput["grid"])
        found["goodput_in_turns"] = goodput
        found["met_in_turns"] = {side: [outcome["is_met"] for outcome in turns] for side, turns in sides.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("grid", "beside"))
    parser.add_argument("tuned", type=Path, help="the JSON beside what `firstlight tune` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0)
    arguments = parser.parse_args()
    live = Live(json.loads(arguments.tuned.read_text()), arguments.out)
    rate, end_s = live.document["tuned"]["highest_rate_per_s"][0], time.monotonic() + arguments.seconds
    if not rate:
        parser.error("tune found no rate inside the objectives")
    is_whole = grid(live, rate, end_s) if arguments.part == "grid" else beside(live, rate, arguments.pairs, end_s)
    live.document["share_of_grid"] = share(live.document)
    write(live.document, arguments.out)
    print(json.dumps(live.document["share_of_grid"], indent=1))
    print("whole" if is_whole else "more is left: run it again")
    return 0 if is_whole else 3


if __name__ == "__main__":
    sys.exit(main())
