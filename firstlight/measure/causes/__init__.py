"""Where a request's time went: stamps taken while it runs, and the named causes that are read from them afterwards.

Knows stamps, counts and ids; no text, no tokens. A stamp is an append; everything else happens when someone asks.
"""

from firstlight.measure.causes.book import Trace, TraceBook
from firstlight.measure.causes.finished import FinishedRequest, FinishedRing
from firstlight.measure.causes.steps import StepRecord, StepShare
from firstlight.measure.causes.timeline import CAUSES, Span, Stamps, timeline, totals_s

__all__ = [
    "CAUSES",
    "FinishedRequest",
    "FinishedRing",
    "Span",
    "Stamps",
    "StepRecord",
    "StepShare",
    "Trace",
    "TraceBook",
    "timeline",
    "totals_s",
]
