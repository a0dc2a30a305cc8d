"""The stop matcher against an oracle that looks at the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.text.stops import StopMatcher

LETTERS = st.text("ab<|\n", max_size=30)
STOPS = st.lists(st.text("ab<|\n", min_size=1, max_size=6), max_size=5)


def whole_text_oracle(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """What is shown of `text`, found by trying every end."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@st.composite
def pieces_of(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(LETTERS)
    edges = [0, *sorted(draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    return text, [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(case=pieces_of(), stops=STOPS, include_stop=st.booleans())
def test_push_any_split_gives_what_the_oracle_gives(
    case: tuple[str, list[str]], stops: list[str], include_stop: bool
) -> None:
    text, pieces = case
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown, found, num_read = "", None, 0
    for piece in pieces:
        emitted, found = matcher.push(piece)
        shown += emitted
        num_read += len(piece)
        if found is not None:
            assert text[: num_read - matcher.num_unread].endswith(found)
            break
        held = text[len(shown) : num_read]
        assert shown + held == text[:num_read]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:num_read].endswith(stop[:n])), default=0)
        assert len(held) == longest, "holds back the longest possible beginning of a stop string, and no more"
    if found is None:
        shown += matcher.finish()
    assert (shown, found) == whole_text_oracle(text, stops, include_stop)
    assert matcher.matched == found


def test_push_without_stops_passes_everything() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_push_after_match_gives_nothing() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("abc") == ("", "b")
    assert matcher.finish() == ""


@pytest.mark.parametrize(("include_stop", "shown"), [(False, "x"), (True, "xEND")])
def test_push_stop_over_three_pieces_is_found(include_stop: bool, shown: str) -> None:
    matcher = StopMatcher(["END"], include_stop=include_stop)
    emitted = [matcher.push(piece) for piece in ("xE", "N", "D and more")]
    assert emitted[:2] == [("x", None), ("", None)]
    assert "x" + emitted[2][0] == shown
    assert emitted[2][1] == "END"
    assert matcher.num_unread == len(" and more")


def test_push_long_near_misses_reads_each_character_once() -> None:
    stop = "a" * 500 + "b"
    matcher = StopMatcher([stop])
    shown = "".join(matcher.push("a" * 100)[0] for _ in range(2_000))
    assert len(shown) == 200_000 - 500
    assert matcher.push("b") == ("", stop)
