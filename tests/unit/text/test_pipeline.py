"""Ids to shown text: pushes of any size give the same text, stop and number of ids."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.text.pipeline import TextPipeline
from firstlight.text.tokenizer import Tokenizer

TEXTS = st.text("ab\n🤦é ", max_size=20)


def run(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stops: list[str], **options: bool
) -> tuple[str, int, str | None]:
    """Text, ids used and stop of a whole answer, pushed in pieces of the given sizes and then one by one."""
    pipeline = TextPipeline(tokenizer, stops, **options)
    text, num_ids, start = "", 0, 0
    for size in [*sizes, *[1] * len(ids)]:
        step = pipeline.push(ids[start : start + size])
        start += size
        text += step.text
        num_ids += step.num_ids
        if step.stop is not None:
            assert pipeline.push([1]) == ("", 0, step.stop)
            assert pipeline.finish() == ("", 0, step.stop)
            return text, num_ids, step.stop
    last = pipeline.finish()
    return text + last.text, num_ids, last.stop


@settings(max_examples=200, deadline=None)
@given(
    text=TEXTS,
    sizes=st.lists(st.integers(0, 6), max_size=6),
    stops=st.lists(st.text("ab\n🤦 ", min_size=1, max_size=3), max_size=3),
    include_stop=st.booleans(),
)
def test_push_any_sizes_gives_the_same_as_one_by_one(
    text: str, sizes: list[int], stops: list[str], include_stop: bool, gpt2: Tokenizer, phi3: Tokenizer
) -> None:
    for tokenizer in (gpt2, phi3):
        ids = tokenizer.encode(text)
        alone = run(tokenizer, ids, [], stops, include_stop=include_stop)
        assert run(tokenizer, ids, sizes, stops, include_stop=include_stop) == alone
        shown, num_ids, stop = alone
        if stop is None:
            assert (shown, num_ids) == (text, len(ids))
        else:
            whole = shown if include_stop else shown + stop
            assert text.startswith(whole)
            assert whole in tokenizer.decode(ids[:num_ids])
            assert whole not in tokenizer.decode(ids[: num_ids - 1])


def test_push_stop_in_the_middle_of_many_ids_counts_ids_up_to_it(gpt2: Tokenizer) -> None:
    ids = gpt2.encode("one two three four")
    assert TextPipeline(gpt2, [" three"]).push(ids) == ("one two", 3, " three")


def test_finish_held_text_is_given(gpt2: Tokenizer) -> None:
    pipeline = TextPipeline(gpt2, ["<end>"])
    assert pipeline.push(gpt2.encode("yes <en")).text == "yes "
    assert pipeline.finish() == ("<en", 0, None)


def test_finish_open_code_point_may_complete_a_stop(gpt2: Tokenizer) -> None:
    pipeline = TextPipeline(gpt2, ["\ufffd"])
    assert pipeline.push(gpt2.encode("a🤦")[:-1]).text == "a"
    assert pipeline.finish() == ("", 0, "\ufffd")


def test_push_special_ids_show_nothing(chatml: Tokenizer) -> None:
    ids = [*chatml.encode("hi"), chatml.special_tokens["<|im_end|>"]]
    assert TextPipeline(chatml).push(ids) == ("hi", 2, None)
    assert TextPipeline(chatml, skip_special=False).push(ids) == ("hi<|im_end|>", 2, None)
