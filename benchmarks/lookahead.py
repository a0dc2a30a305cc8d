"""What it gains that `conversation` spares what the queue will use: simulated overload, with that and without.

    python -m benchmarks.lookahead --out benchmarks/results/lookahead-simulated.json TRACE ...

Requests come so fast (--speeds) that a queue stands; the cache has --capacities blocks of the trace. Without means that
the cache does not tell its policy of the queue; no option does that.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.document import conditions, write
from firstlight.cache import KVCache
from firstlight.measure.bench_report import summarise
from firstlight.simulate import Setup, read_hardware, read_trace, simulate


def measure(path: str, capacity: int, speed: float, hardware: str, count: int) -> dict[str, Any]:
    """Both runs of one trace."""
    trace = read_trace(path, count=count, speed=speed)
    setup = Setup(hardware=read_hardware(hardware), policy="conversation", cache_blocks=capacity)
    row: dict[str, Any] = {"trace": Path(path).name.split(".")[0], "cache_blocks": capacity, "speed": speed}
    with mock.patch.object(KVCache, "awaits", return_value=None):
        without = simulate(trace, setup)
    for name, timed in (("without", without), ("with", simulate(trace, setup))):
        summary = summarise(timed.level)
        row[name] = {
            "served_token_hit_rate": round(timed.cached_tokens / timed.prompt_tokens, 4),
            "wall_s": round(summary["wall_s"]),
            "ttft_p50_s": round(summary["ttft_ms"]["p50"] / 1e3),
            "ttft_p95_s": round(summary["ttft_ms"]["p95"] / 1e3),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--hardware", default="h100-70b")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--capacities", type=lambda text: [int(part) for part in text.split(",")], default=[1000, 3000])
    parser.add_argument("--speeds", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 4.0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document = conditions("benchmarks.lookahead", 1) | {"hardware_simulated": options.hardware, "rows": []}
    for path, capacity, speed in itertools.product(options.traces, options.capacities, options.speeds):
        row = measure(path, capacity, speed, options.hardware, options.requests)
        print(row, flush=True)
        document["rows"].append(row)
    write(document, options.out)


if __name__ == "__main__":
    main()
