"""What a simulation says: one JSON object, one screen, plots. Knows results, not how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firstlight.measure.bench_report import summarise
from firstlight.measure.objectives import Objective, goodput
from firstlight.simulate.hits import HitCount
from firstlight.simulate.timed import Timed

__all__ = ["render_simulation", "simulation_document"]

_TIMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def simulation_document(
    setup: dict[str, Any], hits: HitCount | None, timed: Timed | None, objectives: Sequence[Objective]
) -> dict[str, Any]:
    """Everything a simulation found; what was not asked for, or has no answer, is null."""
    document: dict[str, Any] = {
        "setup": setup,
        "prefix_blocks": hits.blocks if hits else None,
        "prefix_block_hits": hits.hits if hits else None,
        "prefix_block_hit_rate": hits.rate if hits else None,
        "timed": None,
    }
    if timed is not None:
        summary = summarise(timed.level)
        for name in ("concurrency", "errors", "first_error", "client"):
            del summary[name]
        document["timed"] = summary | {
            "refused": timed.refused,
            "goodput_per_s": goodput(timed.level, objectives) if objectives else None,
            "served_token_hit_rate": timed.cached_tokens / max(1, timed.prompt_tokens),
            "occupancy_mean": timed.occupancy_mean,
            "occupancy_max": timed.occupancy_max,
            "preemptions": timed.preemptions,
            "steps": timed.num_steps,
            "rows_per_step": timed.mean_rows,
        }
    return document


def render_simulation(document: dict[str, Any]) -> str:
    """The screen a person reads."""
    lines = []
    if document["prefix_block_hit_rate"] is not None:
        share = 100 * document["prefix_block_hit_rate"]
        lines.append(f"prefix blocks hit, in order of arrival: {share:.2f} % of {document['prefix_blocks']:,}")
    timed = document["timed"]
    if timed is None:
        return "\n".join(lines)
    lines += [
        f"requests: {timed['requests']:,} served in {timed['wall_s']:,.0f} s, {timed['refused']} too long",
        f"throughput: {timed['output_tokens_per_s']:,.0f} output tokens/s, {timed['requests_per_s']:.2f} requests/s",
        f"prompt tokens found in the cache: {100 * timed['served_token_hit_rate']:.1f} %",
        f"KV blocks held: {100 * timed['occupancy_mean']:.0f} % on the mean, "
        f"{100 * timed['occupancy_max']:.0f} % at most; {timed['preemptions']} preemptions, "
        f"{timed['rows_per_step']:.1f} rows a step",
    ]
    if timed["goodput_per_s"] is not None:
        lines.append(f"goodput: {timed['goodput_per_s']:.2f} requests/s met every objective")
    lines.append(f"{'ms':<6}{'p50':>12}{'p95':>12}{'p99':>12}")
    for name, title in _TIMES.items():
        cells = ("-" if (value := timed[name][q]) is None else f"{value:,.1f}" for q in ("p50", "p95", "p99"))
        lines.append(f"{title:<6}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
