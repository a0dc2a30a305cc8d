"""Events: one line each, whatever the values are."""

from __future__ import annotations

import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.measure.log import LOGGER_NAME, log_event


class Lines(logging.Handler):
    """Keeps the messages of the block it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logger = logging.getLogger(LOGGER_NAME)
        self._level = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger(LOGGER_NAME)
        logger.removeHandler(self)
        logger.setLevel(self._level)


def test_event_shows_values_and_leaves_out_none() -> None:
    with Lines() as lines:
        log_event("request", id="a-1", tokens=5, ttft_ms=1.23456789, is_stream=True, queue_ms=None)
    assert lines == ["event=request id=a-1 tokens=5 ttft_ms=1.23457 is_stream=true"]


@pytest.mark.parametrize("value", ["a b", 'a"b', "a=b", "a\nevent=fake", "", "é", "a\\b"])
def test_event_quotes_what_could_break_the_line(value: str) -> None:
    with Lines() as lines:
        log_event("x", value=value)
    quoted = lines[0].removeprefix("event=x value=")
    assert quoted.startswith('"')
    assert json.loads(quoted) == value


@given(st.text())
def test_event_is_one_line_that_gives_the_value_back(value: str) -> None:
    with Lines() as lines:
        log_event("x", value=value, end="yes")
    match = re.fullmatch(r'event=x value=(\S+|"(?:[^"\\]|\\.)*") end=yes', lines[0])
    assert match
    shown = match[1]
    assert (json.loads(shown) if shown.startswith('"') else shown) == value


def test_event_below_the_level_is_not_made() -> None:
    with Lines() as lines:
        log_event("x", logging.DEBUG, value=1)
    assert lines == []
