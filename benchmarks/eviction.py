"""Prefix blocks hit by every eviction policy, and by the optimum, on recorded traces in order of arrival.

    python -m benchmarks.eviction --out benchmarks/results/eviction.json TRACE[:CAPACITY,...] ...

Capacities are in blocks of the trace. Traces are not part of the repository: docs/caching.md says where they come from.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from firstlight.cache import POLICIES
from firstlight.simulate import read_trace, replay_blocks, replay_optimum

CAPACITIES = "100,300,1000,3000,10000,30000"


def measure(path: str, capacities: list[int]) -> list[dict[str, Any]]:
    """One row per capacity: the share of blocks that each policy and the optimum hit, and CPU seconds taken."""
    trace = read_trace(path)
    rows = []
    for capacity in capacities:
        row: dict[str, Any] = {
            "trace": Path(path).name.split(".")[0],
            "block_size": trace.block_size,
            "blocks": trace.num_blocks,
            "cache_blocks": capacity,
            "hit_rate": {},
            "seconds": {},
        }
        for policy in POLICIES:
            begin_s = time.process_time()
            row["hit_rate"][policy] = round(replay_blocks(trace, policy, capacity).rate, 5)
            row["seconds"][policy] = round(time.process_time() - begin_s, 2)
        row["hit_rate"]["optimum"] = round(replay_optimum(trace, capacity).rate, 5)
        rows.append(row)
        print(render([row]).splitlines()[-1], flush=True)
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """The table of docs/caching.md."""
    names = (*POLICIES, "optimum")
    lines = ["| Trace | blocks cached | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = " | ".join(f"{100 * row['hit_rate'][name]:.1f}" for name in names)
        lines.append(f"| {row['trace']} | {row['cache_blocks']:,} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE[:CAPACITY,...]")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    rows = []
    for entry in options.traces:
        path, _, capacities = entry.partition(":")
        rows += measure(path, [int(part) for part in (capacities or CAPACITIES).split(",")])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    document = {"measured_at": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit, "rows": rows}
    Path(options.out).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    print(render(rows))


if __name__ == "__main__":
    main()
