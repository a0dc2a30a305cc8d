"""A recorded trace through the engine's own scheduler and cache on a virtual clock. Knows lengths, no text."""

from firstlight.simulate.hardware import Hardware, hardware_names, read_hardware, roofline
from firstlight.simulate.hits import HitCount, replay_blocks
from firstlight.simulate.optimum import replay_optimum
from firstlight.simulate.report import render_simulation, simulation_document
from firstlight.simulate.timed import ROUTINGS, Setup, Timed, simulate
from firstlight.simulate.trace import Trace, TraceRequest, read_trace

__all__ = [
    "Hardware",
    "HitCount",
    "ROUTINGS",
    "Setup",
    "Timed",
    "Trace",
    "TraceRequest",
    "hardware_names",
    "read_hardware",
    "read_trace",
    "render_simulation",
    "replay_blocks",
    "roofline",
    "replay_optimum",
    "simulate",
    "simulation_document",
]
