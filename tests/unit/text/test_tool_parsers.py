"""Answers taken apart: every format, every way to cut the text, and text that only looks like a call."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.fake import fake_tokenizer
from firstlight.text.grammar import GrammarCompiler, embedded_schema
from firstlight.text.tool_parsers import (
    TOOL_FORMATS,
    AnswerParser,
    Tool,
    ToolFormat,
    call_grammar,
    format_of,
    reasoning_preamble,
    tool_messages,
)
from firstlight.types import GrammarSpec

Read = tuple[str, str, list[tuple[str, str]]]


def read(
    form: str | None, text: str, sizes: list[int] | None = None, *, reasons: bool = False, thinks: bool = False
) -> Read:
    """(content, reasoning, calls) of a text, pushed in pieces of the given sizes and the rest at once."""
    serial = itertools.count()
    chosen = TOOL_FORMATS[form] if form else None
    parser = AnswerParser(chosen, lambda: f"id{next(serial)}", has_reasoning=reasons, is_thinking=thinks)
    parts, start = [], 0
    for size in [*(sizes or []), len(text)]:
        parts += parser.push(text[start : start + size])
        start += size
    parts += parser.finish()
    calls: list[list[str]] = []
    for part in parts:
        if part.kind == "call":
            if part.call_id is not None:
                assert (part.nth, part.call_id) == (len(calls), f"id{len(calls)}")
                calls.append([part.name or "", ""])
            calls[part.nth][1] += part.text
    joined = {kind: "".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning")}
    assert parser.num_calls == len(calls)
    return joined["content"], joined["reasoning"], [(name, text) for name, text in calls]


ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"x": [1, {"y": "}"}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"z": "\\u00e9\\""}, "name": "g"}\n</tool_call>',
        "",
        [("f", '{"x": [1, {"y": "}"}]}'), ("g", '{"z": "\\u00e9\\""}')],
    ),
    ("hermes", 'I look.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "I look.\n", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"x": "cut', "", [("f", '{"x": "cut')]),
    ("hermes", '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    ("hermes", "a < b <tool_ca <tool_call> no </tool_call>", "a < b <tool_ca <tool_call> no </tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("smollm2", '<tool_call>[{"name":"f","arguments":{"x":1}}, {"name":"g"}]</tool_call>', "",
     [("f", '{"x":1}'), ("g", "{}")]),
    ("smollm2", "<tool_call>[]</tool_call>", "", []),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', "",
     [("f", '{"x": 1}'), ("g", "{}")]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1.5e3}}', "",
     [("f", '{"x": 1.5e3}')]),
    ("llama3", '{"answer": 5}', '{"answer": 5}', []),
    ("llama3", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "123456789"}]', "", [("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": {"y": 2}}[TOOL_CALLS]g{"z": 1}', "",
     [("f", '{"x": {"y": 2}}'), ("g", '{"z": 1}')]),
    ("mistral", "[TOOL_CALLS] maybe later", "[TOOL_CALLS] maybe later", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_parser_finds_calls_however_the_text_is_cut(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    if calls or "[]" not in text:
        assert read(form, text) == (content, "", calls)
    for size in (1, 2, 3, 7):
        assert read(form, text, [size] * len(text)) == read(form, text)


PIECES = (
    '<tool_call> </tool_call> [TOOL_CALLS] <|python_tag|> [ARGS] { } [ ] , : ; " \\ < name "name" "f" "arguments" '
    '"parameters" {"name":"f","arguments":{"a":1}} x 1 null'
)
TEXTS = st.lists(st.sampled_from([*PIECES.split(" "), " ", "\n"]), max_size=14).map("".join)


@settings(max_examples=400, deadline=None)
@given(form=st.sampled_from(sorted(TOOL_FORMATS)), text=TEXTS, sizes=st.lists(st.integers(1, 9), max_size=12))
def test_parser_any_text_any_cut_gives_the_same_and_loses_no_text(form: str, text: str, sizes: list[int]) -> None:
    whole = read(form, text)
    assert read(form, text, sizes) == whole
    content, _, calls = whole
    if not calls:
        assert content == text


def test_parser_streams_arguments_as_they_come() -> None:
    parser = AnswerParser(TOOL_FORMATS["hermes"], lambda: "id", has_reasoning=False)
    assert parser.push('<tool_call>\n{"name": "f", "argum') != []
    assert [part.text for part in parser.push('ents": {"city": "Pa')] == ['{"city": "Pa']
    assert [part.text for part in parser.push("ris")] == ["ris"]


@pytest.mark.parametrize(
    ("text", "thinks", "wanted"),
    [
        ("<think>a\nb</think>\n\nso", False, ("so", "a\nb")),
        ("\n<think>a</think>b", False, ("b", "a")),
        ("a</th</think>b", True, ("b", "a</th")),
        ("no </think> here", False, ("no </think> here", "")),
        ("<thin", False, ("<thin", "")),
        ("<think>cut </thi", False, ("", "cut </thi")),
        (" <thick> ", False, (" <thick> ", "")),
    ],
)
def test_parser_reasoning_comes_first_or_not_at_all(text: str, thinks: bool, wanted: tuple[str, str]) -> None:
    for size in (1, 2, 5, 100):
        assert read(None, text, [size] * len(text), reasons=True, thinks=thinks)[:2] == wanted


def test_parser_calls_come_after_reasoning() -> None:
    text = '<think>need {"name": "x"}</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("hermes", text, [1] * len(text), reasons=True) == ("", 'need {"name": "x"}', [("f", "{}")])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, "hermes"),
        ("... '<tool_call>\\n' ...", "hermes"),
        ("[AVAILABLE_TOOLS] ... [TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>assistant", "llama3"),
        ("You are a helpful AI assistant named SmolLM", "smollm2"),
        ("You are SmolLM3 ... <tool_call>", "hermes"),
    ],
)
def test_format_of_a_template(template: str | None, form: str) -> None:
    assert format_of(template).name == form


TOOLS = [
    Tool(
        name="get",
        parameters={
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/small"}},
            "required": ["n"],
            "additionalProperties": False,
            "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
        is_strict=True,
    ),
    Tool(name="now"),
]
GET, BAD_GET, NOW = ({"name": "get", "n": 5}, {"name": "get", "n": 50}, {"name": "now"})


def written(form: ToolFormat, *calls: dict[str, Any]) -> str:
    """Calls as the format has them."""
    texts = []
    for call in calls:
        arguments = {key: value for key, value in call.items() if key != "name"}
        texts.append(json.dumps({"name": call["name"], form.arguments_key: arguments}))
    return form.written(texts)


@pytest.mark.parametrize("form", TOOL_FORMATS.values(), ids=lambda form: form.name)
def test_grammar_of_calls_takes_what_it_must_and_nothing_else(form: ToolFormat) -> None:
    compiler = GrammarCompiler(fake_tokenizer(), 259)

    def takes(text: str, **options: bool) -> bool:
        grammar = call_grammar(
            form,
            TOOLS,
            special_id=lambda mark: None,
            embed=lambda schema: embedded_schema(json.dumps(schema), "tools"),
            **options,
        )
        state = compiler.compile(GrammarSpec(kind="grammar", text=grammar)).start()
        state.advance(list(text.encode()))
        return state.error is None and state.is_complete

    one, two, bad = written(form, GET), written(form, GET, NOW), written(form, BAD_GET)
    for is_required, is_parallel in itertools.product((True, False), (True, False)):
        options = {"is_required": is_required, "is_parallel": is_parallel}
        assert takes(one, **options)
        assert takes(two, **options) or not is_parallel
        assert takes("hello there", **options) is not is_required
        assert not takes(bad, **options)
        if form.end or form.is_bare:  # an open-ended format may go on with text that shows its marks
            assert takes(two, **options) is is_parallel


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize(
    ("kind", "text", "fitting", "other"),
    [
        ("json_schema", '{"const": {"a": 1}}', '{"a": 1}', '{"a": 2}'),
        ("regex", "yes|no", "no", "maybe"),
        ("grammar", 'start: "x" /[0-9]/', "x7", "y7"),
    ],
)
def test_grammar_begins_behind_the_reasoning(kind: Any, text: str, fitting: str, other: str, is_thinking: bool) -> None:
    preamble = reasoning_preamble("<think>", "</think>", is_thinking=is_thinking, special_id=lambda mark: None)
    compiler = GrammarCompiler(fake_tokenizer(), 259)
    compiled = compiler.compile(GrammarSpec(kind=kind, text=text, preamble=preamble))

    def takes(answer: str) -> bool:
        state = compiled.start()
        state.advance(list(answer.encode()))
        return state.error is None and state.is_complete

    head = "" if is_thinking else "<think>"
    assert takes(f'{head}so {{"a": 3}} <b>\n</think>\n\n{fitting}')
    assert takes(f"{head}</think>{fitting}")
    assert not takes(f"{head}so</think>\n{other}")
    assert takes(fitting) is not is_thinking
    assert not takes(f"{head}never ends {fitting}")


def test_prompt_without_template_support_describes_tools_and_writes_calls_as_text() -> None:
    form = TOOL_FORMATS["smollm2"]
    raw = [{"type": "function", "function": {"name": "now", "description": "the time"}}]
    call = {"type": "function", "id": "a", "function": {"name": "now", "arguments": {"zone": "é"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "a"},
    ]
    shown = tool_messages(messages, raw, form)
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert shown[0]["content"].startswith("Be brief.\n\n")
    assert '{"name": "now", "description": "the time"}' in shown[0]["content"]
    assert read("smollm2", shown[2]["content"])[2] == [("now", '{"zone": "é"}')]
    assert shown[3]["content"] == "<tool_response>\n12:00\n</tool_response>"
    assert tool_messages(messages[1:2], raw, form)[0]["role"] == "system"
    assert tool_messages(messages[1:2], [], form) == messages[1:2]
