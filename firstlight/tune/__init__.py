"""Settings for a workload under stated objectives: the simulator searches, few live runs confirm and correct it.

Knows settings, rates and outcomes; starts no server and reads no clock.
"""

from firstlight.tune.front import pareto_front, sweep
from firstlight.tune.journal import Journal
from firstlight.tune.load import at_rate, trace_of, unit_rate
from firstlight.tune.outcome import Correction, Outcome, outcome_of
from firstlight.tune.predict import Predictor
from firstlight.tune.search import Effect, Found, effects, search
from firstlight.tune.session import Try, Tuned, tune
from firstlight.tune.space import Knob, Settings, default_space, key_of, read_space

__all__ = [
    "Correction",
    "Effect",
    "Found",
    "Journal",
    "Knob",
    "Outcome",
    "Predictor",
    "Settings",
    "Try",
    "Tuned",
    "at_rate",
    "default_space",
    "effects",
    "key_of",
    "outcome_of",
    "pareto_front",
    "read_space",
    "search",
    "sweep",
    "trace_of",
    "tune",
    "unit_rate",
]
