"""How urgent a request says it is: `priority` and `deadline_ms`, checked. Knows names and numbers, no scheduling."""

from __future__ import annotations

import math

from firstlight.errors import RequestError

__all__ = ["checked_deadline", "priority_of"]

_PRIORITIES = {"interactive": -1, "standard": 0, "batch": 1}
_MAX_DEADLINE_MS = 86_400_000.0


def priority_of(name: str | None) -> int:
    """The engine's number for a `priority`; smaller goes first. Raises RequestError for an unknown name."""
    if name is None:
        return 0
    if name not in _PRIORITIES:
        known = ", ".join(_PRIORITIES)
        raise RequestError(f"`priority` is {name[:64]!r}: use one of {known}", param="priority")
    return _PRIORITIES[name]


def checked_deadline(deadline_ms: float | None) -> float | None:
    """The deadline as it came. Raises RequestError when it is not above 0, or beyond a day."""
    if deadline_ms is None:
        return None
    if not (math.isfinite(deadline_ms) and 0 < deadline_ms <= _MAX_DEADLINE_MS):
        raise RequestError(
            f"`deadline_ms` is {deadline_ms:g} ms, it must be above 0 and at most {_MAX_DEADLINE_MS:.0f} (a day)",
            param="deadline_ms",
        )
    return deadline_ms
