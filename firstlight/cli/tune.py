"""`firstlight tune`: settings for a workload under objectives, simulated first, then confirmed on real servers."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from firstlight.cli.arguments import Invocation, flag_of
from firstlight.cli.bench_load import build_sessions
from firstlight.cli.calibrate import calibrated
from firstlight.cli.commands import BenchConfig, TuneConfig
from firstlight.cli.console import dim, note
from firstlight.cli.own_server import own_server
from firstlight.cli.tune_report import Report, settings_words, try_words, write_report
from firstlight.cli.version import package_version
from firstlight.config import EngineConfig
from firstlight.errors import ConfigError
from firstlight.measure.bench import first_contact
from firstlight.measure.objectives import Objective, parse_objectives
from firstlight.measure.replay import run_sessions
from firstlight.measure.workload import Session, is_trace
from firstlight.simulate import Hardware
from firstlight.tune import (
    Correction,
    Journal,
    Knob,
    Outcome,
    Predictor,
    Settings,
    Try,
    at_rate,
    default_space,
    key_of,
    outcome_of,
    read_space,
    tune,
    unit_rate,
)

__all__ = ["load_of", "run"]

CALIBRATION_ROUNDS = 2
MAX_LIVE_RUNS = 5
LONGEST_WAIT_S = 60.0
"""Sessions of a run begin within this time where the simulator knows no rate."""
HOPELESS_SHARE = 1.5
"""Of a bound, at next to no load: so far off, no live run is worth its time."""


def run(invocation: Invocation) -> int:
    """Tunes, prints what was found, writes the files; 1 where no live run was inside the objectives."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server under test goes too
    try:
        return _run(invocation.config(TuneConfig), invocation.given_from(EngineConfig))
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(config: TuneConfig, given: dict[str, Any]) -> int:
    objectives = parse_objectives(config.slo)
    _check(config, objectives)
    chosen = read_space(config.space)
    for knob in chosen:
        if knob.name in given:
            raise ConfigError(f"`{flag_of(knob.name)}` is given and also in `--space`", hint="leave one of them out")
    is_recorded = _is_file(config) and is_trace(config.workload)
    sessions = load_of(config, is_recorded=is_recorded)
    journal = Journal(_journal_path(config), _purpose(config, given, sessions))
    bench = _Bench(config, given, objectives, sessions, journal, is_recorded or config.workload == "synthetic")
    space, start = bench.calibrate(chosen)
    _refuse_hopeless(bench.predict(start, 2.0**-8, Correction()), objectives)
    note(dim(f"searching {len(space)} settings in the simulator; this takes a minute or a few"))
    tuned = tune(
        space,
        start,
        bench.predict,
        bench.measure,
        max_live=config.live_runs,
        lowest_rate=max(0.25, len(sessions) / LONGEST_WAIT_S),
        on_try=bench.tell,
    )
    report = Report(
        config=config, given=given, objectives=objectives, start=start, tuned=tuned, num_simulated=bench.num_simulated
    )
    write_report(report, bench.predict)
    return 0 if tuned.best.rate else 1


def _check(config: TuneConfig, objectives: Sequence[Objective]) -> None:
    if not objectives:
        raise ConfigError("`tune` needs objectives", hint="--slo ttft_p95=200ms,itl_p95=50ms", param="slo")
    if not 1 <= config.live_runs <= MAX_LIVE_RUNS:
        raise ConfigError(f"`--live-runs` is {config.live_runs}: it has to be 1 to {MAX_LIVE_RUNS}", param="live_runs")
    if config.requests < 2:
        raise ConfigError(f"`--requests` is {config.requests}: a rate takes 2 or more", param="requests")
    if min(config.max_tokens, config.input_tokens, config.prefix_tokens) < 0:
        raise ConfigError("`--max-tokens`, `--input-tokens` and `--prefix-tokens` have to be 0 or more")
    if config.workload == "synthetic" and not config.input_tokens:
        raise ConfigError("a synthetic workload needs a length", hint="--input-tokens 300", param="input_tokens")
    if config.prefix_tokens and config.workload != "synthetic":
        raise ConfigError("`--prefix-tokens` belongs to synthetic prompts", hint="--workload synthetic")
    if config.workload == "chat" and config.input_tokens:
        raise ConfigError("`--input-tokens` does not belong to the built-in chat", hint="--workload synthetic")
    for path in filter(None, (config.output, config.journal, config.html, config.png)):
        if not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"`{path}`: its folder does not exist", hint="create the folder first")


def _is_file(config: TuneConfig) -> bool:
    return config.workload not in ("chat", "synthetic")


def load_of(config: TuneConfig, *, is_recorded: bool) -> list[Session]:
    """The workload as `bench` would send it, at one session a second on the mean."""
    is_file = _is_file(config)
    load = BenchConfig(
        trace=config.workload if is_recorded else "",
        prompts=config.workload if is_file and not is_recorded else "",
        requests=config.requests,
        max_tokens=config.max_tokens,
        arrivals=config.arrivals,
        input_tokens=config.input_tokens,
        prefix_tokens=config.prefix_tokens,
    )
    return unit_rate(build_sessions(load, 0.0 if is_recorded else 1.0, config.load_seed))


def _journal_path(config: TuneConfig) -> Path:
    return Path(config.journal) if config.journal else Path(config.output).with_suffix(".journal.json")


def _purpose(config: TuneConfig, given: dict[str, Any], sessions: Sequence[Session]) -> dict[str, Any]:
    """What has to be the same for earlier answers to hold."""
    load = hashlib.sha256(msgspec.json.encode([dataclasses.asdict(session) for session in sessions])).hexdigest()
    return {"slo": config.slo, "space": config.space, "engine": given, "load": load, "version": package_version()}


def _refuse_hopeless(alone: Outcome, objectives: Sequence[Objective]) -> None:
    if alone.error:
        raise ConfigError(
            f"the workload does not fit: {alone.error}", hint="`--input-tokens` leaves longer rows of a trace out"
        )
    if alone.worst_share > HOPELESS_SHARE:
        bound_ms = 1e3 * next(o.bound_s for o in objectives if o.label == alone.worst)
        raise ConfigError(
            f"{alone.worst} is predicted {alone.values_ms[alone.worst]:.0f} ms at next to no load, "
            f"`--slo` allows {bound_ms:.0f} ms: no setting makes this machine so fast",
            hint="raise the bound, or serve shorter prompts or a smaller model",
        )


def _own_value(engine: EngineConfig, knob: Knob) -> int | float | str:
    """What the engine takes itself, where it is among the values to choose from."""
    own: int | float | str = getattr(engine, knob.name)
    return own if own in knob.values else knob.values[0]


@dataclass(slots=True)
class _Bench:
    """The simulator and the real server as functions that ask the journal first. Written by itself alone."""

    config: TuneConfig
    given: dict[str, Any]
    objectives: Sequence[Objective]
    sessions: Sequence[Session]
    journal: Journal
    is_plain: bool
    predictor: Predictor | None = None
    num_simulated: int = 0

    def calibrate(self, chosen: Sequence[Knob]) -> tuple[tuple[Knob, ...], Settings]:
        """The space, and the settings that the engine takes itself; measures this machine unless the journal has it."""
        own = self._hardware(int(self.given.get("threads", 0)))
        num_threads = int(own.assumptions["threads"])
        hardware = {num_threads: own}
        num_blocks = own.kv_tokens // own.block_size
        has_prefixes = _is_file(self.config) or bool(self.config.prefix_tokens)
        fixed = {*self.given} | ({"num_blocks"} if "kv_memory_mb" in self.given else set())
        counts = [max(1, num_threads - 1), num_threads]
        space = tuple(chosen) or tuple(
            knob
            for knob in default_space(self.objectives, num_blocks, sorted({*counts}), has_prefixes)
            if knob.name not in fixed
        )
        for knob in space:
            if knob.name == "threads":
                hardware |= {int(count): self._hardware(int(count)) for count in knob.values if count != num_threads}
        engine = dataclasses.replace(EngineConfig(**self.given), num_blocks=num_blocks, threads=num_threads)
        self.predictor = Predictor(
            hardware=hardware,
            sessions=self.sessions,
            objectives=self.objectives,
            config=engine,
            is_plain=self.is_plain,
        )
        return space, {knob.name: _own_value(engine, knob) for knob in space}

    def _hardware(self, threads: int) -> Hardware:
        engine = EngineConfig(**self.given | ({"threads": threads} if threads else {}))
        return self.journal.recall(
            "hardware", str(threads), Hardware, lambda: calibrated(engine, CALIBRATION_ROUNDS)[0]
        )

    def predict(self, settings: Settings, rate: float, correction: Correction) -> Outcome:
        """The simulated outcome."""
        assert self.predictor is not None
        predictor = self.predictor
        key = f"{key_of(settings)} {rate:g} {correction.step:g} {correction.prompt:g} {correction.gap:g}"
        found = self.journal.recall("simulated", key, Outcome, lambda: predictor(settings, rate, correction))
        self.num_simulated = self.journal.num_found("simulated")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{self.num_simulated} simulations \x1b[K")
        return found

    def measure(self, settings: Settings, rate: float) -> Outcome:
        """The outcome of the load on a server that is started for it."""
        return self.journal.recall(
            "live", f"{key_of(settings)} {rate:g}", Outcome, lambda: self._measure_live(settings, rate)
        )

    def _measure_live(self, settings: Settings, rate: float) -> Outcome:
        note(dim(f"live run at {rate:g} sessions/s: {settings_words(settings) or 'settings as they are'}"))
        with own_server({**self.given, **settings}) as endpoint, asyncio.Runner() as runner:
            model = runner.run(first_contact(endpoint))
            level = runner.run(run_sessions(endpoint, model, at_rate(self.sessions, rate), ignore_eos=True))
        return outcome_of(level, self.objectives)

    def tell(self, each: Try) -> None:
        """Says what a live run came to."""
        note(("\r\x1b[K" if sys.stderr.isatty() else "") + try_words(each, self.objectives))
