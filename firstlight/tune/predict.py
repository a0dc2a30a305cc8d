"""The simulator as a function of settings and rate."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from firstlight.config import EngineConfig
from firstlight.errors import ConfigError
from firstlight.measure.objectives import Objective
from firstlight.measure.workload import Session
from firstlight.simulate import Hardware, Setup, simulate
from firstlight.tune.load import at_rate, trace_of
from firstlight.tune.outcome import Correction, Outcome, outcome_of
from firstlight.tune.space import Settings

__all__ = ["Predictor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Runs the load on a virtual clock. `hardware` by threads; 0 stands for what the engine takes itself."""

    hardware: Mapping[int, Hardware]
    sessions: Sequence[Session]
    """At `unit_rate`."""
    objectives: Sequence[Objective]
    config: EngineConfig
    """What is not among the settings."""
    is_plain: bool

    def __call__(self, settings: Settings, rate: float, correction: Correction) -> Outcome:
        """The outcome at `rate` sessions a second."""
        options = {**dataclasses.asdict(self.config), **settings}
        hardware = _as_set(self._hardware(int(options["threads"])), options, correction)
        trace = trace_of(
            at_rate(self.sessions, rate),
            hardware.step_s + hardware.token_s,
            is_plain=self.is_plain,
            has_cache=bool(options["prefix_cache"]),
        )
        setup = Setup(
            hardware=hardware,
            policy=str(options["eviction"]),
            cache_blocks=int(options["num_blocks"]),
            mode=str(options["mode"]),
            batch_size=int(options["batch_size"]),
            itl_slo_s=float(options["itl_slo_ms"]) / 1e3,
        )
        gc.disable()  # no step makes cycles, and looking for them takes a seventh of the time
        try:
            timed = simulate(trace, setup)
        except ConfigError as error:  # no request fits these KV blocks
            return Outcome(error=error.message)
        finally:
            gc.enable()
        return outcome_of(timed.level, self.objectives, timed.refused, correction.gap)

    def _hardware(self, threads: int) -> Hardware:
        return self.hardware.get(threads) or next(iter(self.hardware.values()))


def _as_set(hardware: Hardware, options: Mapping[str, object], correction: Correction) -> Hardware:
    costs = {name: correction.step * getattr(hardware, name) for name in _STEP_COSTS}
    costs |= {name: correction.prompt * getattr(hardware, name) for name in _PROMPT_COSTS}
    rows, tokens = int(str(options["max_step_rows"])), int(str(options["max_step_tokens"]))
    return msgspec.structs.replace(hardware, **costs, max_step_rows=min(rows, tokens), max_step_tokens=tokens)


_STEP_COSTS = ("step_s", "weights_s", "row_s", "context_s")
_PROMPT_COSTS = ("token_s", "pair_s")
