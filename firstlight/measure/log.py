"""One log line per event: `event=name key=value ...` on stderr. Knows no requests; is never given their text."""

from __future__ import annotations

import json
import logging
import re
import sys

__all__ = ["LOGGER_NAME", "log_event", "log_to_stderr"]

LOGGER_NAME = "firstlight"

_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
"""Printable ASCII without space, double quote, equals sign and backslash: needs no quotes."""


def log_event(event: str, level: int = logging.INFO, **fields: object) -> None:
    """Logs one line. Floats get six significant digits; what is not plain is quoted as JSON, so a line stays a line."""
    logger = logging.getLogger(LOGGER_NAME)
    if logger.isEnabledFor(level):
        pairs = (f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
        logger.log(level, "%s", " ".join((f"event={event}", *pairs)))


def log_to_stderr(level: int = logging.INFO) -> None:
    """Sends events of `level` and above to stderr: for programs of ours, not where firstlight is a library."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(level)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
