"""What `firstlight tune` found: a few sentences, the options file, everything as JSON, the plots."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firstlight.cli.arguments import flag_of
from firstlight.cli.commands import TuneConfig
from firstlight.cli.config_file import render_file
from firstlight.cli.console import dim, note
from firstlight.cli.version import package_version
from firstlight.measure.bench_report import conditions
from firstlight.measure.objectives import Objective
from firstlight.measure.pictures import Bars, Lines, Table, render_page, write_png
from firstlight.tune import Correction, Outcome, Settings, Try, Tuned, pareto_front, sweep

__all__ = ["Report", "settings_words", "try_words", "write_report"]

Predict = Callable[[Settings, float, Correction], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is written about."""

    config: TuneConfig
    given: dict[str, Any]
    """Engine options that were typed."""
    objectives: Sequence[Objective]
    start: Settings
    """What the engine would take itself."""
    tuned: Tuned
    num_simulated: int

    @property
    def changed(self) -> Settings:
        """The best settings where they differ from the engine's own."""
        return {name: value for name, value in self.tuned.best.settings.items() if value != self.start[name]}


def settings_words(settings: Settings) -> str:
    """The settings as options."""
    return " ".join(f"{flag_of(name)} {value}" for name, value in settings.items())


def try_words(each: Try, objectives: Sequence[Objective]) -> str:
    """One line on a live run."""
    found = each.measured
    if found.error:
        return f"{each.rate:g}/s: missed, {found.error.splitlines()[0]}"
    values = ", ".join(f"{o.label} {found.values_ms[o.label]:.0f} of {1e3 * o.bound_s:.0f} ms" for o in objectives)
    return f"{each.rate:g}/s: {'met' if found.is_met else 'missed'}, goodput {found.goodput_per_s:.2f}/s, {values}"


def conclusion(report: Report) -> str:
    """What was found, a sentence a line."""
    tuned = report.tuned
    best = tuned.best.outcome
    if not tuned.best.rate:
        return f"no live run was inside {report.config.slo}: {best.error or _worst_words(best)}"
    if math.isinf(tuned.missed_rate):
        rates = (
            f"at least {tuned.best.rate:g} sessions/s; with these settings no run missed, "
            "more `--requests` may show where it ends"
        )
    else:
        rates = f"between {tuned.best.rate:g} (met) and {tuned.missed_rate:g} (missed) sessions/s"
    lines = [
        f"highest rate inside {report.config.slo}: {rates}",
        f"goodput there {best.goodput_per_s:.2f} requests/s; {_worst_words(best)}",
        f"settings: {settings_words(report.changed) or 'the engine already takes the best that was found'}",
    ]
    binding = tuned.binding
    if binding is None:
        lines.append("no setting binds: moving any one of them costs less than 2 % in the simulator; the machine does")
    else:
        lines.append(
            f"{flag_of(binding.knob)} binds: at {binding.value} instead of {tuned.best.settings[binding.knob]} "
            f"the highest rate falls by {100 * binding.loss:.0f} % (simulated)"
        )
    return "\n".join(lines)


def _worst_words(outcome: Outcome) -> str:
    return f"{outcome.worst} is at {100 * outcome.worst_share:.0f} % of its bound"


def write_report(report: Report, predict: Predict) -> None:
    """Prints the conclusion; writes the options file, the JSON beside it, and the plots that were asked for."""
    words, config = conclusion(report), report.config
    around = {name: _swept(report, predict, settings) for name, settings in _compared(report).items()}
    document = _document(report, words, around)
    print(words)
    beside = Path(config.output).with_suffix(".json")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    Path(config.output).write_text(render_file({**report.given, **report.changed}, _notes(report, words)), "utf-8")
    parts = [*_tables(report), *_plots(report, around)]
    title = f"firstlight tune: {config.workload} within {config.slo}"
    if config.html:
        Path(config.html).write_text(render_page(title, words.replace("\n", ". "), parts), "utf-8")
    if config.png:
        write_png(config.png, title, parts)
    for path in filter(None, (config.output, str(beside), config.html, config.png)):
        note(dim(f"written: {path}"))
    note(dim(f"use it: firstlight serve --config {config.output}"))


def _notes(report: Report, words: str) -> str:
    config, day = report.config, time.strftime("%Y-%m-%d", time.gmtime())
    tries = [f"{try_words(each, report.objectives)}; {settings_words(each.settings)}" for each in report.tuned.tries]
    return "\n".join(
        [
            f"by firstlight {package_version()} tune, {day}: {config.requests} sessions of {config.workload}",
            words,
            "",
            f"live runs, after {report.num_simulated} simulated ones:",
            *tries,
        ]
    )


def _compared(report: Report) -> dict[str, Settings]:
    """The settings whose curves are drawn, by name: the best, the engine's own, and each neighbour."""
    best = report.tuned.best.settings
    compared: dict[str, Settings] = {"chosen": best}
    if best != report.start:
        compared["engine's own"] = report.start
    for effect in report.tuned.effects:
        compared[f"{flag_of(effect.knob)} {effect.value}"] = {**best, effect.knob: effect.value}
    return compared


def _swept(report: Report, predict: Predict, settings: Settings) -> list[Outcome]:
    tuned = report.tuned
    return sweep(lambda s, rate: predict(s, rate, tuned.correction), settings, tuned.best.rate or tuned.tries[-1].rate)


def _front(around: dict[str, list[Outcome]]) -> list[Outcome]:
    return pareto_front(outcome for outcomes in around.values() for outcome in outcomes)


def _document(report: Report, words: str, around: dict[str, list[Outcome]]) -> dict[str, Any]:
    tuned = report.tuned
    return {
        **conditions(["firstlight", *sys.argv[1:]], package_version()),
        "options": report.config,
        "engine": report.given,
        "conclusion": words.splitlines(),
        "settings": tuned.best.settings,
        "settings_of_the_engine": report.start,
        "highest_rate_per_s": [tuned.best.rate, None if math.isinf(tuned.missed_rate) else tuned.missed_rate],
        "outcome": tuned.best.outcome,
        "live": tuned.tries,
        "correction": tuned.correction,
        "effects": tuned.effects,
        "num_simulated": report.num_simulated,
        "simulated": around,
        "pareto_front": _front(around),
    }


def _tables(report: Report) -> list[Table]:
    labels = [o.label for o in report.objectives]
    rows = [["live run", "rate/s", "goodput/s", *(f"{label} ms" for label in labels), "objectives", "predicted", "why"]]
    for each in report.tuned.tries:
        found = each.measured
        rows.append(
            [
                settings_words(each.settings),
                f"{each.rate:g}",
                f"{found.goodput_per_s:.2f}",
                *(f"{found.values_ms.get(label, 0):.0f}" for label in labels),
                found.error or ("met" if found.is_met else "missed"),
                f"{each.predicted.goodput_per_s:.2f}, {each.predicted.worst_share:.2f} of bound",
                each.reason,
            ]
        )
    moved = [["one setting moved", "highest rate/s (simulated)", "lost"]]
    for effect in report.tuned.effects:
        moved.append([f"{flag_of(effect.knob)} {effect.value}", f"{effect.rate:g}", f"{100 * effect.loss:.0f} %"])
    return [Table("Live runs", rows), Table("Around the chosen settings", moved)]


def _plots(report: Report, around: dict[str, list[Outcome]]) -> list[Lines | Bars]:
    """Goodput against the worst objective's share of its bound: the front, the live runs."""

    def points(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
        shown = [(o.goodput_per_s, min(o.worst_share, _TOP_SHARE)) for o in outcomes if not o.error]
        return sorted(shown)

    live = [each.measured for each in report.tuned.tries]
    front = Lines(
        "What can be had at once (below 1: inside the objectives)",
        "goodput, requests/s",
        "worst objective / its bound",
        {
            "best of all settings (simulated)": points(_front(around)),
            "live runs": points(live),
        },
        dots=frozenset({"live runs"}),
    )
    rates = {f"{flag_of(e.knob)} {e.value}": e.rate for e in report.tuned.effects}
    if report.tuned.best.rate:
        rates = {"chosen (live)": report.tuned.best.rate, **rates}
    return [front, Bars("Highest rate, one setting moved (simulated)", "sessions/s", rates)]


_TOP_SHARE = 3.0
"""Beyond this a share is drawn as this: how far a run missed matters little."""
