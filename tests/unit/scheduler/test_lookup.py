"""Prompt lookup finds what a plain search over the ids finds, while a request grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.scheduler import lookup as module
from firstlight.scheduler.lookup import MAX_MATCH, Lookup


def plain(tokens: list[int]) -> tuple[int, int]:
    """The last place of the longest of the latest 3, 2, 1 tokens, and how long the match is."""
    for num in (3, 2, 1):
        for at in range(len(tokens) - num - 1, -1, -1):
            if len(tokens) > num and tokens[at : at + num] == tokens[-num:]:
                length = num
                while (
                    length < MAX_MATCH
                    and at + num - length > 0
                    and tokens[at + num - length - 1] == tokens[len(tokens) - length - 1]
                ):
                    length += 1
                return at + num, length
    return 0, 0


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 257]), min_size=1, max_size=40), st.integers(1, 40))
def test_finds_what_a_plain_search_finds(tokens: list[int], first: int) -> None:
    lookup = Lookup(tokens[:first])
    for end in range(min(first, len(tokens)), len(tokens) + 1):
        assert lookup.find(tokens[:end]) == plain(tokens[:end])


def test_old_tokens_leave_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 8)
    tokens = [1, 2, 3, *range(10, 20)]
    lookup = Lookup(tokens)  # begins with what is last, so 1, 2, 3 are not in it
    assert lookup.find([*tokens, 1, 2, 3]) == (0, 0)
    tokens += [1, 2, 3]
    for token in range(20, 60):
        tokens.append(token)
        assert lookup.find(tokens) == (0, 0)
    tokens += [58, 59]
    assert lookup.find(tokens) == (len(tokens) - 2, 2)
    assert lookup.find([*tokens, 1]) == (0, 0)
