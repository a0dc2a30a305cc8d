"""The incremental detokenizer: every way of cutting ids gives the same text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.text.detokenizer import IncrementalDetokenizer
from firstlight.text.tokenizer import Tokenizer


@st.composite
def ids_and_cuts(draw: st.DrawFn, vocab_size: int) -> tuple[list[int], list[int]]:
    """Ids that are mostly single bytes, so that code points break, and places to cut them."""
    low = st.integers(0, 260)  # byte tokens live here in both vocabularies
    ids = draw(st.lists(st.one_of(low, low, st.integers(0, vocab_size + 10)), max_size=40))
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=8))
    return ids, sorted(cuts)


@pytest.mark.parametrize("name", ["gpt-2", "phi-3", "chatml"])
@pytest.mark.parametrize("is_continuation", [False, True])
@pytest.mark.parametrize("skip_special", [False, True])
def test_push_any_split_joins_to_whole_decode(
    name: str, is_continuation: bool, skip_special: bool, tokenizer_named: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_named(name)

    @settings(max_examples=40, deadline=None)
    @given(ids_and_cuts(tokenizer.vocab_size))
    def same_text(case: tuple[list[int], list[int]]) -> None:
        ids, cuts = case
        options = {"skip_special": skip_special, "is_continuation": is_continuation}
        detokenizer = IncrementalDetokenizer(tokenizer, **options)
        edges = [0, *cuts, len(ids)]
        pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
        pieces.append(detokenizer.finish())
        assert "".join(pieces) == tokenizer.decode(ids, **options)

    same_text()


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30))
def test_push_one_id_at_a_time_never_tears_a_code_point(text: str, gpt2: Tokenizer) -> None:
    if "\ufffd" in text:
        return
    detokenizer = IncrementalDetokenizer(gpt2)
    pieces = [detokenizer.push([token_id]) for token_id in gpt2.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


def test_push_emoji_over_several_ids_is_held_until_complete(gpt2: Tokenizer) -> None:
    ids = gpt2.encode("🤦")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(gpt2)
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🤦"]


def test_finish_open_code_point_gives_replacement_character(gpt2: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(gpt2)
    assert detokenizer.push(gpt2.encode("🤦")[:-1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_fork_continues_apart_from_the_original(gpt2: Tokenizer) -> None:
    ids = gpt2.encode("🤦")
    detokenizer = IncrementalDetokenizer(gpt2)
    detokenizer.push(ids[:1])
    fork = detokenizer.fork()
    assert fork.push(ids[1:]) == "🤦"
    assert detokenizer.push(ids[1:]) == "🤦"


def test_push_sixty_thousand_ids_one_by_one_joins_to_whole_decode(gpt2: Tokenizer) -> None:
    ids = gpt2.encode("The quick brown fox — 日本語 🤦🏼‍♂️. ") * 3000
    ids = ids[:60_000]
    detokenizer = IncrementalDetokenizer(gpt2)
    text = "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.finish()
    assert text == gpt2.decode(ids)
