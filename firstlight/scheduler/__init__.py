"""Which request computes what in the next step. Knows tokens, blocks and predicted time; no text, no device."""

from firstlight.scheduler.counted import CountedScheduler
from firstlight.scheduler.drafts import Drafter, accept
from firstlight.scheduler.limits import SchedulerLimits, SchedulerStats
from firstlight.scheduler.scheduler import Scheduler
from firstlight.scheduler.state import RequestState, Status
from firstlight.scheduler.steptime import Coefficients, StepLoad, StepTimeModel

__all__ = [
    "Coefficients",
    "CountedScheduler",
    "Drafter",
    "RequestState",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStats",
    "Status",
    "StepLoad",
    "StepTimeModel",
    "accept",
]
