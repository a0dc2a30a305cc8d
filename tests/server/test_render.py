"""The two answer forms: streamed and whole say the same, whatever the bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.server.echo import Echo
from firstlight.server.render import ChatForm, ChoiceTotal, CompletionForm, total_usage
from firstlight.types import FinishReason, TokenLogprob, Usage
from tests.server.raw import events

USAGE = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)
HEAD = ("id-1", 17, "model", "fp_1")
BYTES = "h\u00e9\U0001f600!".encode()  # 1, 2, 4 and 1 bytes


def byte(token_id: int) -> bytes:
    """The bytes tokenizer."""
    return bytes([token_id])


def chat_form(*, has_logprobs: bool = False) -> ChatForm:
    return ChatForm(*HEAD, byte, has_logprobs=has_logprobs)


def text_form(*, has_logprobs: bool = False, echoes: tuple[str, ...] = ()) -> CompletionForm:
    return CompletionForm(*HEAD, byte, has_logprobs=has_logprobs, echoes=[Echo(echo, []) for echo in echoes])


def whole_of(form: ChatForm | CompletionForm, total: ChoiceTotal) -> Any:
    return json.loads(form.whole([total], USAGE, None))


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_streamed_and_whole_text_are_equal_and_frames_are_single_lines(texts: list[str]) -> None:
    for form in (chat_form(), text_form()):
        frames, total = form.opening(0), ChoiceTotal()
        for at, text in enumerate(texts):
            finish = FinishReason.STOP if at == len(texts) - 1 else None
            frames += form.piece(0, text, None, finish)
            total.add(text, None, finish)
        frames += form.last(None, None)
        assert all(frame.startswith("data: ") for frame in frames.decode().split("\n\n")[:-1])
        *chunks, done = events(frames)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[-1]["finish_reason"] == "stop"
        streamed = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
        whole = whole_of(form, total)["choices"][0]
        assert streamed == "".join(texts) == (whole["text"] if "text" in whole else whole["message"]["content"])


def test_text_that_is_held_back_makes_no_frame() -> None:
    assert chat_form().piece(0, "", None, None) == b""
    assert text_form().piece(0, "", None, None) == b""


@pytest.mark.parametrize("is_split", [False, True])
def test_text_offsets_count_characters_of_whole_code_points(is_split: bool) -> None:
    form = text_form(has_logprobs=True)
    logprobs = [TokenLogprob(token_id, -1.0) for token_id in BYTES]
    parts = [logprobs[:3], logprobs[3:5], logprobs[5:]] if is_split else [logprobs]
    offsets: list[int] = []
    for part in parts:
        offsets += events(form.piece(0, "x", part, None))[0]["choices"][0]["logprobs"]["text_offset"]
    # h at 0; the two bytes of e-acute at 1; the emoji's first three bytes at 2; after its fourth the text is 3 long
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3]


def test_tokens_inside_a_code_point_are_shown_by_their_bytes() -> None:
    chunk = events(chat_form(has_logprobs=True).piece(0, "x", [TokenLogprob(0xC3, -0.5, [(65, -1.0)])], None))[0]
    token = chunk["choices"][0]["logprobs"]["content"][0]
    assert token["token"] == "bytes:\\xc3"
    assert token["bytes"] == [0xC3]
    assert token["top_logprobs"] == [{"token": "A", "logprob": -1.0, "bytes": [65]}]


def test_minus_infinity_is_a_number_in_json() -> None:
    total = ChoiceTotal()
    total.add("A", [TokenLogprob(65, float("-inf"), [(66, float("-inf"))])], FinishReason.LENGTH)
    logprobs = whole_of(text_form(has_logprobs=True), total)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"A": -9999.0, "B": -9999.0}]


def test_usage_counts_each_prompt_once() -> None:
    usages = {
        choice: Usage(prompt_tokens=10 * (1 + choice // 2), completion_tokens=choice, cached_tokens=choice)
        for choice in range(4)
    }
    assert total_usage(usages, 4, n=2) == Usage(prompt_tokens=30, completion_tokens=6, cached_tokens=2)


def test_echo_comes_before_the_text_of_its_choice() -> None:
    form = text_form(echoes=("one ", "two "))
    choice = events(form.opening(1))[0]["choices"][0]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (1, "two ", None)
