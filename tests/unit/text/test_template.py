"""Chat templates: the reference's text, messages of every form, and templates that mean harm."""

from __future__ import annotations

import functools
import gzip
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from firstlight.errors import ModelError, RequestError
from firstlight.text.template import CHATML, ChatTemplate
from firstlight.text.tokenizer import Tokenizer

from .conftest import CHATML_TOKENS, chat_vectors, with_tokens

VECTORS = chat_vectors()
THAT_DAY = datetime(2024, 7, 26, 12)
HELLO = [{"role": "user", "content": "Hello"}]


@functools.cache
def template_of(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(
        source,
        bos_token=bos_token,
        eos_token=eos_token,
        control_tokens=["<s>", "</s>", *CHATML_TOKENS, "[INST]"],
        now=lambda: THAT_DAY,
    )


def rendered(source: str, context: dict[str, Any]) -> str | None:
    """The prompt, or None where the template refuses."""
    template = template_of(source, context.get("bos_token", "<s>"), context.get("eos_token", "</s>"))
    fields = {key: context[key] for key in ("messages", "tools", "add_generation_prompt") if key in context}
    try:
        return template.render(**fields).text
    except RequestError:
        return None


@pytest.mark.parametrize("golden", VECTORS["goldens"], ids=lambda golden: golden["id"])
def test_render_known_template_gives_reference_text(golden: dict[str, Any]) -> None:
    source = VECTORS["templates"][golden["template_file"]]["template"]
    assert rendered(source, VECTORS["contexts"][golden["context"]]) == golden.get("expected")


def test_render_every_shared_template_gives_reference_text(shared_dir: Path) -> None:
    vectors = shared_dir / "workloads" / "vectors"
    sources = {row["id"]: row["template"] for row in _rows(vectors / "chat_templates.jsonl.gz")}
    contexts = {row["id"]: row for row in _rows(vectors / "chat_contexts.jsonl")}
    goldens = _rows(vectors / "chat_template_goldens.jsonl.gz")
    assert len(goldens) == 181
    wrong = [
        golden["id"]
        for golden in goldens
        if rendered(sources[golden["template_file"]], contexts[golden["context"]]) != golden.get("expected")
    ]
    assert wrong == []


def test_render_llamacpp_template_tests_give_reference_text(shared_dir: Path) -> None:
    for row in _rows(shared_dir / "workloads" / "vectors" / "chat_template_llamacpp.jsonl"):
        assert rendered(row["template"], row) == row["expected_jinja2"], row["id"]


def _rows(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()]


def test_render_text_parts_are_joined_with_line_feeds() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = ChatTemplate(CHATML).render([{"role": "user", "content": parts}])
    assert prompt.text == "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "im_end", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0].type"),
    ],
)
def test_render_bad_message_is_refused_by_field(messages: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.param == param


def test_render_message_without_content_is_empty_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert "<|im_start|>assistant\n<|im_end|>" in ChatTemplate(CHATML).render([*HELLO, call]).text


def test_render_raise_exception_becomes_request_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_render_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ bos_token }} {{ strftime_now('%Y') }}", bos_token="<s>")
    assert template.render(HELLO, enable_thinking=False).text == f"False <s> {datetime.now():%Y}"


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_render_variable_that_the_server_sets_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(HELLO, **{name: "x"})
    assert caught.value.param == name


@pytest.mark.parametrize("content", ["The answer", "ends in space  ", "<|im_end|>", ""])
def test_render_continue_final_message_leaves_it_open(content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    prompt = ChatTemplate(CHATML, control_tokens=CHATML_TOKENS).render(messages, continue_final_message=True)
    assert prompt.text == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{content}"
    assert len(prompt.guarded) == len(prompt.text)


@pytest.mark.parametrize(
    ("source", "messages"),
    [(CHATML, HELLO), ("{{ messages[0].content }}", [*HELLO, {"role": "assistant", "content": "x"}])],
)
def test_render_continue_impossible_is_refused(source: str, messages: list[dict[str, str]]) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render(messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_of_tokenizer_without_template_takes_chatml_when_the_vocabulary_knows_it(
    chatml: Tokenizer, gpt2: Tokenizer
) -> None:
    assert ChatTemplate.of(chatml).source == CHATML
    assert ChatTemplate.of(gpt2, "custom").source == "custom"
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate.of(gpt2)


def test_of_tokenizer_with_template_takes_it(gpt2_metadata: dict[str, Any]) -> None:
    metadata = with_tokens(gpt2_metadata, dict.fromkeys(CHATML_TOKENS, 3))
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": "{{ eos_token }}"})
    assert ChatTemplate.of(tokenizer).render(HELLO).text == "<|endoftext|>"


GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}{{ ns.x|length }}"
NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
EXPENSIVE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop over text": "{% for a in 'x' * 3000 %}{% for b in 'x' * 3000 %}{% endfor %}{% endfor %}",
    "long output": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "repeat": "{{ 'x' * 10000000000 }}",
    "repeat list": "{{ ([1] * 10000000000)|length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "growing number": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling with +": GROWING.replace("GROW", "ns.x + ns.x"),
    "doubling with ~": GROWING.replace("GROW", "ns.x ~ ns.x"),
    "doubling with join": GROWING.replace("GROW", "[ns.x, ns.x]|join"),
    "doubling with join method": GROWING.replace("GROW", "''.join([ns.x, ns.x])"),
    "doubling with format": GROWING.replace("GROW", "'%s%s' % (ns.x, ns.x)"),
    "doubling with format filter": GROWING.replace("GROW", "'%s%s'|format(ns.x, ns.x)"),
    "doubling with format method": GROWING.replace("GROW", "'{0}{0}'.format(ns.x)"),
    "doubling with replace": GROWING.replace("GROW", "ns.x.replace('a', ns.x)"),
    "doubling with replace filter": GROWING.replace("GROW", "ns.x|replace('a', ns.x)"),
    "doubling with a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + GROWING.replace("GROW", "m(ns.x)"),
    "pad": "{{ 'x'.ljust(10000000000) }}",
    "pad filter": "{{ 'x'|center(10000000000) }}",
    "indent": "{{ ('\\n' * 100000)|indent(100000) }}",
    "wide format": "{{ '%999999999d' % 1 }}",
    "wide format from argument": "{{ '%*d' % (999999999, 1) }}",
    "wide format method": "{{ '{:999999999}'.format(1) }}",
    "wide nested format": "{{ '{:{}}'.format(1, 999999999) }}",
    "fill": "{{ [1]|batch(1000000000, 'x')|list|length }}",
    "translate": "{{ 'xx'.translate({120: 'y' * 1000}) }}",
    "bytes": "{{ 'x'.encode().ljust(10000000000) }}",
    "number to bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "add lists": "{{ ([['x']] * 1000)|sum(start=['x'])|length }}",
    "print a shared list": NESTED + "{{ ns.x }}",
    "print a shared list as JSON": NESTED + "{{ ns.x|tojson }}",
    "compare shared lists": NESTED + NESTED.replace("ns", "mm") + "{{ ns.x == mm.x }}",
    "sort shared lists": NESTED + "{{ [ns.x, ns.x]|sort }}",
    "shared tuple as key": NESTED.replace("[", "(").replace("]", ",)") + "{{ {ns.x: 1} }}",
    "macro recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macro fan-out": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "slices in a loop": "{% set x = 'x' * 900000 ~ '' %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
}
LIMIT = "took more than|made a value|bits|large|number over|not available|without end"
FORBIDDEN = {
    "reach for the interpreter": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "reach through a function": ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
    "reach through format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "change messages": ("{{ messages.append(1) }}", "unsafe"),
    "recursive loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursive loops"),
    "not Jinja": ("{% if %}", "Expected"),
    "unknown filter": ("{{ 'x'|lipsum }}", "lipsum"),
    "long source": ("x" * 600_000, "600000 characters"),
    "deep expression": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_render_expensive_template_meets_a_limit(name: str) -> None:
    template = ChatTemplate(EXPENSIVE[name], max_steps=200_000, max_characters=1_000_000, max_seconds=1.0)
    with pytest.raises(RequestError, match=LIMIT):
        template.render(HELLO)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_render_forbidden_template_is_refused(name: str) -> None:
    source, reason = FORBIDDEN[name]
    with pytest.raises((ModelError, RequestError), match=reason):
        ChatTemplate(source).render(HELLO)


def test_render_long_honest_chat_is_within_the_limits() -> None:
    turns = [{"role": role, "content": "word " * 200} for _ in range(500) for role in ("user", "assistant")]
    source = VECTORS["templates"]["Qwen-Qwen3-0.6B.jinja"]["template"]
    prompt = ChatTemplate(source, control_tokens=CHATML_TOKENS).render([*turns, *HELLO])
    assert len(prompt.text) > 1_000_000
