"""The same recorded load on a real server and in the simulator: how far apart their figures are.

In turns: `calibrate` measures this machine, the load runs on a server of its own through a client, the simulator runs
the same with what was just measured. The trace that is simulated has the lengths which the server counted, template
included. A turn's ratios are simulated over real; what counts is their median, for the machine's speed wavers.

    python -m benchmarks.fidelity TRACE --requests 80 --speed 1.5 --turns 3 --out benchmarks/results/fidelity-NAME.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.document import conditions, write
from firstlight.cli.calibrate import calibrated
from firstlight.cli.own_server import own_server
from firstlight.config import EngineConfig
from firstlight.measure.bench import LevelResult, first_contact
from firstlight.measure.bench_report import summarise
from firstlight.measure.replay import run_sessions
from firstlight.measure.workload import Session, trace_sessions
from firstlight.simulate import Hardware, Setup, read_trace, simulate

FIGURES = (
    ("ttft_ms", "p50"),
    ("ttft_ms", "p95"),
    ("itl_ms", "p50"),
    ("itl_ms", "p95"),
    ("e2e_ms", "p50"),
    ("e2e_ms", "p95"),
    ("output_tokens_per_s", ""),
)
BOUND = 0.15


def figures(level: LevelResult) -> dict[str, float]:
    """What is compared, by name."""
    summary = summarise(level)
    return {f"{name} {q}".strip(): summary[name][q] if q else summary[name] for name, q in FIGURES}


def run_live(model_path: str, sessions: list[Session]) -> LevelResult:
    """The load on a server of its own."""
    with own_server({"model": model_path}) as endpoint, asyncio.Runner() as runner:
        model = runner.run(first_contact(endpoint))
        level = runner.run(run_sessions(endpoint, model, sessions, ignore_eos=True))
    failed = [record.error for record in level.records if record.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first: {failed[0]}")
    return level


def as_counted(level: LevelResult, folder: Path) -> str:
    """What was sent, as a trace: due times and the server's own counts."""
    path = folder / "counted.jsonl"
    rows = [
        {
            "timestamp_s": record.sent_s - record.late_s,
            "input_tokens": record.prompt_tokens,
            "output_tokens": record.completion_tokens,
        }
        for record in level.records
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turn(model_path: str, sessions: list[Session], rounds: int) -> dict[str, Any]:
    """Calibrates, runs, simulates."""
    hardware: Hardware
    hardware, _ = calibrated(EngineConfig(model=model_path), rounds)
    live = run_live(model_path, sessions)
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(as_counted(live, Path(folder)))
        simulated = simulate(trace, Setup(hardware=hardware))
    real, told = figures(live), figures(simulated.level)
    return {
        "hardware": msgspec.to_builtins(hardware),
        "live": real,
        "simulated": told,
        "ratios": {name: told[name] / real[name] for name in real},
        "rows_per_step": simulated.mean_rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--speed", type=float, default=1.0, help="times between arrivals are divided by this")
    parser.add_argument("--max-input-tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="of each calibration")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sessions, num_skipped = trace_sessions(
        arguments.trace, count=arguments.requests, speed=arguments.speed, max_input_tokens=arguments.max_input_tokens
    )
    document = conditions("benchmarks.fidelity", EngineConfig().threads)
    document |= {"requests": sum(len(session.prompts) for session in sessions), "skipped": num_skipped, "turns": []}
    for _ in range(arguments.turns):
        document["turns"].append(turn(arguments.model, sessions, arguments.rounds))
        print(json.dumps(document["turns"][-1]["live"]), json.dumps(document["turns"][-1]["ratios"]), flush=True)
        ratios = {
            name: statistics.median(turn["ratios"][name] for turn in document["turns"])
            for name in document["turns"][0]["ratios"]
        }
        document["median_ratios"] = ratios
        document["within_15_percent"] = sorted(name for name, ratio in ratios.items() if abs(ratio - 1) <= BOUND)
        write(document, arguments.out)


if __name__ == "__main__":
    main()
