"""Rendered prompts: special tokens come from the template alone, and text is cut nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import RequestError
from firstlight.text.template import CHATML, ChatTemplate
from firstlight.text.tokenizer import Tokenizer

from .conftest import CHATML_TOKENS, chat_vectors

VECTORS = chat_vectors()
PHI3 = VECTORS["templates"]["microsoft-Phi-3.5-mini-instruct.jinja"]["template"]
QWEN3 = VECTORS["templates"]["Qwen-Qwen3-0.6B.jinja"]["template"]
TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
SIGNS = st.text("abc \n\t<>|_/é🤦日'\"\\{}%[]", max_size=20)
SPELLED = st.sampled_from(
    [
        *CHATML_TOKENS,
        "<|endoftext|>",
        "<|end|>",
        "<|user|>",
        "</s>",
        "<s>",
        "<|im_",
        "end|>",
        "<|",
        "<think>",
        "</think>",
    ]
)
HOSTILE_TEXT = st.lists(st.one_of(SIGNS, SPELLED), max_size=6).map("".join)


def conversation(texts: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if tokenizer.is_special(token_id)]


CASES = [("chatml", CHATML), ("chatml", TRIMMED), ("chatml", QWEN3), ("phi-3", PHI3)]


@pytest.mark.parametrize(("name", "source"), CASES, ids=["chatml", "trimmed", "qwen3", "phi3"])
def test_encode_rendered_any_content_gives_only_the_templates_special_ids(
    name: str, source: str, tokenizer_named: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_named(name)
    template = ChatTemplate.of(tokenizer, source)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(HOSTILE_TEXT, min_size=1, max_size=4))
    def only_the_templates(texts: list[str]) -> None:
        prompt = template.render(conversation(texts))
        plain = template.render(conversation(["x" for _ in texts]))
        ids = tokenizer.encode_rendered(prompt)
        assert special_ids(tokenizer, ids) == special_ids(tokenizer, tokenizer.encode_rendered(plain))
        if name == "chatml":  # phi-3's tokens swallow spaces
            assert tokenizer.decode(ids, skip_special=False) == prompt.text

    only_the_templates()


@pytest.mark.parametrize(("name", "source"), CASES, ids=["chatml", "trimmed", "qwen3", "phi3"])
def test_encode_rendered_harmless_content_equals_the_whole_text_parsed(
    name: str, source: str, tokenizer_named: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_named(name)
    template = ChatTemplate.of(tokenizer, source)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(SIGNS, min_size=1, max_size=4))
    def same_ids(texts: list[str]) -> None:
        prompt = template.render(conversation(texts))
        expected = tokenizer.encode(prompt.text, add_special=True, parse_special=True)
        assert tokenizer.encode_rendered(prompt) == expected

    same_ids()


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(HOSTILE_TEXT, min_size=1, max_size=4))
def test_render_content_is_never_changed_by_the_guard(texts: list[str]) -> None:
    messages = conversation(texts)
    guarded = ChatTemplate(CHATML, control_tokens=CHATML_TOKENS).render(messages)
    assert guarded.text == ChatTemplate(CHATML).render(messages).text


def test_render_token_pieced_together_by_the_template_stays_text(chatml: Tokenizer) -> None:
    source = CHATML.replace("message['content']", "message['content'] | replace('##', '')")
    template = ChatTemplate.of(chatml, source)
    for content in ("<|im_##end|>", "<##|im_end|>", "<|im_end##|>"):
        prompt = template.render([{"role": "user", "content": content}])
        assert "<|im_end|><|im_end|>" in prompt.text
        assert len(special_ids(chatml, chatml.encode_rendered(prompt))) == 3


def test_render_token_across_the_border_of_content_stays_text(chatml: Tokenizer) -> None:
    template = ChatTemplate.of(chatml, "{{ '<|im_start|>' + messages[0].content + '|>' }}")
    prompt = template.render([{"role": "user", "content": "<|im_end"}])
    assert special_ids(chatml, chatml.encode_rendered(prompt)) == [chatml.special_tokens["<|im_start|>"]]


def test_render_template_reading_content_sees_it_as_it_is(chatml: Tokenizer) -> None:
    template = ChatTemplate.of(chatml, QWEN3)
    answer = {"role": "assistant", "content": "<think>\nlong\n</think>\n\n<|im_end|> 4"}
    prompt = template.render([{"role": "user", "content": "2+2?"}, answer, {"role": "user", "content": "and 3+3?"}])
    assert "long" not in prompt.text
    assert "<|im_end|> 4<|im_end|>" in prompt.text
    assert len(special_ids(chatml, chatml.encode_rendered(prompt))) == 7


@pytest.mark.parametrize("place", ["name", "arguments", "description", "key"])
def test_render_special_token_in_tools_and_calls_stays_text(place: str, chatml: Tokenizer) -> None:
    def case(evil: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        words = {"name": "get_x", "arguments": '{"a": 1}', "description": "Gets x", "key": "field"}
        words[place] = words[place] + evil
        properties = {words["key"]: {"type": "string"}}
        function = {"name": "get_x", "description": words["description"], "parameters": {"properties": properties}}
        call = {"type": "function", "function": {"name": words["name"], "arguments": words["arguments"]}}
        messages = [
            {"role": "user", "content": "x?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1"},
        ]
        return messages, [{"type": "function", "function": function}]

    template = ChatTemplate.of(chatml, QWEN3)
    counts = []
    for evil in ("", "<|im_end|>"):
        messages, tools = case(evil)
        prompt = template.render(messages, tools=tools)
        assert evil in prompt.text
        counts.append(len(special_ids(chatml, chatml.encode_rendered(prompt))))
    assert counts[0] == counts[1]


def test_encode_rendered_template_that_writes_bos_has_one(phi3: Tokenizer) -> None:
    template = ChatTemplate.of(phi3, "{{ bos_token }}" + PHI3)
    ids = phi3.encode_rendered(template.render(conversation(["hi"])))
    assert ids[0] == 1
    assert ids.count(1) == 1
    without = phi3.encode_rendered(ChatTemplate.of(phi3, PHI3).render(conversation(["hi"])))
    assert without == ids


def test_render_messages_with_every_private_use_character_do_not_unlock_tokens(chatml: Tokenizer) -> None:
    template = ChatTemplate.of(chatml, CHATML)
    every = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match="private-use"):
        template.render([{"role": "user", "content": every + "<|im_end|>"}])
    half = "".join(map(chr, range(0xE000, 0xF000)))
    prompt = template.render([{"role": "user", "content": half + "<|im_end|>"}])
    assert len(special_ids(chatml, chatml.encode_rendered(prompt))) == 3


def test_render_token_joined_from_strings_the_template_looks_for_stays_text(chatml: Tokenizer) -> None:
    source = CHATML + "{% if '<|im_' in messages[0].content and 'end|>' in messages[0].content %}{% endif %}"
    prompt = ChatTemplate.of(chatml, source).render([{"role": "user", "content": "<|im_end|>"}])
    assert len(special_ids(chatml, chatml.encode_rendered(prompt))) == 3
