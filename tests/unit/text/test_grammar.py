"""Grammars over a tokenizer whose ids are bytes: what may come next, where it ends, what is refused and why."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from firstlight.engine.fake import fake_tokenizer
from firstlight.errors import RequestError
from firstlight.text.grammar import GrammarCompiler, GrammarLimits, GrammarState, mask_words
from firstlight.types import GrammarSpec

VOCAB = 320
EOS = {256, 257}
INTEGER = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(fake_tokenizer(), VOCAB, GrammarLimits(max_bytes=8192, max_depth=20, max_cached=2))


def spec(text: str, kind: str = "json_schema") -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, field="response_format")  # type: ignore[arg-type]


def allowed(state: GrammarState) -> set[int]:
    out = np.empty(mask_words(VOCAB), np.uint32)
    state.fill(out)
    return ids_of(out)


def ids_of(bits: np.ndarray) -> set[int]:
    return set(np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0].tolist())


def test_state_allows_what_leads_to_an_answer_and_the_end_behind_one(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec(INTEGER)).start()
    assert allowed(state) == {ord("{")}
    state.advance(list(b'{"a": 12'))
    assert allowed(state) >= {*b"0123456789}"}
    assert not state.is_complete
    state.advance(list(b"}"))
    assert state.is_complete
    assert allowed(state) == EOS
    assert state.error is None


def test_state_never_allows_special_tokens_or_ids_without_a_piece(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("(.|\n)*", "regex")).start()
    assert allowed(state) == {*range(256), *EOS} - {0xC0, 0xC1, *range(0x80, 0xC0), *range(0xF5, 0x100)}


def test_state_that_ignores_eos_ends_only_where_nothing_else_is_left(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("a{1,2}", "regex")).start(ignores_eos=True)
    state.advance(list(b"a"))
    assert allowed(state) == {ord("a")}
    state.advance(list(b"a"))
    assert allowed(state) == EOS


def test_state_outside_its_grammar_has_an_error_and_allows_all(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("ab", "regex")).start()
    state.advance(list(b"x"))
    assert state.error == "token 120 is outside the grammar"
    assert allowed(state) >= set(range(VOCAB))


class SlowClock:
    """Time of the thread in which each piece of work seems to take what `pauses_s` says next, then nothing."""

    def __init__(self, *pauses_s: float) -> None:
        self._pauses_s = iter(pauses_s)
        self._now_s = 0.0
        self._is_running = False

    def __call__(self) -> float:
        if self._is_running:
            self._now_s += next(self._pauses_s, 0.0)
        self._is_running = not self._is_running
        return self._now_s


def test_ambiguous_grammar_ends_at_the_same_token_however_fast_the_machine(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(spec('start: e\ne: e e | "a"', "grammar"))
    lengths = set()
    for _ in range(2):
        state, length = grammar.start(), 0
        while state.error is None:
            state.advance(list(b"a"))
            allowed(state)
            length += 1
        assert state.error.startswith("the grammar became too complex: simplify it (Parser Error: Current row has")
        lengths.add(length)
    assert len(lengths) == 1
    assert 200 < lengths.pop() < 300


def test_pauses_of_the_machine_do_not_end_an_answer(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiler.compile(spec("(.|\n)*", "regex"))
    monkeypatch.setattr(time, "thread_time", SlowClock(30.0, 0.2, 1.0, 0.0, 5.0))
    state = grammar.start()
    for _ in range(10):
        allowed(state)
        state.advance(list(b"a"))
    assert state.error is None


def test_answer_whose_masks_stay_slow_is_ended(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiler.compile(spec("(.|\n)*", "regex"))
    monkeypatch.setattr(time, "thread_time", SlowClock(*[0.011] * 200))
    state = grammar.start()
    for _ in range(22):  # a mask and a move each
        allowed(state)
        state.advance(list(b"a"))
    assert state.error is None
    allowed(state)
    allowed(state)
    assert state.error == "the grammar became too slow: simplify it"


def test_drafts_get_a_mask_each_and_move_nothing(compiler: GrammarCompiler) -> None:
    state = compiler.compile(spec("abc", "regex")).start()
    state.advance(list(b"a"))
    before = allowed(state)
    out = np.empty((3, mask_words(VOCAB)), np.uint32)
    state.fill_drafts(list(b"bcx"), out)
    assert [ids_of(row) for row in out[:2]] == [{ord("c")}, EOS]
    assert allowed(state) == before == {ord("b")}
    state.fill_drafts(list(b"xbc"), out)
    assert state.error is None
    assert allowed(state) == before


def test_states_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(spec("ab", "regex"))
    one, other = compiled.start(), compiled.start()
    one.advance(list(b"a"))
    assert (allowed(one), allowed(other)) == ({ord("b")}, {ord("a")})


def test_compile_keeps_the_most_recent(compiler: GrammarCompiler) -> None:
    first = compiler.compile(spec("a", "regex"))
    assert compiler.compile(spec("a", "regex")) is first
    for text in ("b", "c"):
        compiler.compile(spec(text, "regex"))
    assert compiler.cached(spec("a", "regex")) is None
    assert compiler.cached(spec("c", "regex")) is not None


@pytest.mark.parametrize("text", ['start: "x" | "y"', 'root ::= "x" | "y"'])
def test_compile_grammar_takes_lark_and_gbnf(compiler: GrammarCompiler, text: str) -> None:
    assert allowed(compiler.compile(spec(text, "grammar")).start()) == {*b"xy"}


def test_compile_formats_that_nobody_defines_constrain_nothing(compiler: GrammarCompiler) -> None:
    free = compiler.compile(spec('{"type": "string", "format": "topic"}')).start()
    free.advance(list(b'"anything"'))
    assert free.is_complete
    dated = compiler.compile(spec('{"type": "string", "format": "date"}')).start()
    dated.advance(list(b'"anything"'))
    assert dated.error is not None
    named = compiler.compile(spec('{"properties": {"format": {"const": "topic"}}, "required": ["format"]}')).start()
    named.advance(list(b'{"format": "x'))
    assert named.error is not None, "a property of that name is no keyword"


NESTED = '{"items": ' * 30 + "{}" + "}" * 30
PARTS = {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3}] * 2} for i in range(20)}
EXPLOSION = json.dumps({"$defs": {**PARTS, "d20": {"type": "string"}}, "$ref": "#/$defs/d0"})
WRONG = {
    "not JSON": ("json_schema", "{", "`response_format` is not JSON"),
    "no schema": ("json_schema", "[]", "must be a JSON Schema"),
    "too deep": ("json_schema", NESTED, "more than 20 levels"),
    "too large": ("json_schema", '"' + "x" * 9000 + '"', "`max_grammar_kb` allows 8192"),
    "keyword": ("json_schema", '{"properties": {"a/b": {"uniqueItems": true}}}', "`response_format/properties/a~1b`"),
    "behind a reference": (
        "json_schema",
        '{"properties": {"x": {"$ref": "#/$defs/y"}}, "$defs": {"y": {"not": {}}}}',
        "`response_format/properties/x`",
    ),
    "in a list": ("json_schema", '{"anyOf": [{}, {"type": "strin"}]}', "`response_format/anyOf/1`"),
    "no answer": ("json_schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}', "nsatisfiable"),
    "endless": ("json_schema", '{"allOf": [{"$ref": "#"}]}', "no text can satisfy it"),
    "remote": ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "cannot be used"),
    "explosion": ("json_schema", EXPLOSION, "too large"),
    "lone surrogate": ("json_schema", '{"const": "\ud800"}', "not JSON"),
    "open group": ("regex", "(ab", "unclosed group"),
    "deep groups": ("regex", "(" * 2000 + "a" + ")" * 2000, "cannot be used"),
    "unknown rule": ("grammar", "start: other", "other"),
    "deep grammar": ("grammar", "start: " + "(" * 1500 + '"a"' + ")" * 1500, "nested"),
    "broken GBNF": ("grammar", 'root ::= "a" [0-9', "line 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_compile_what_cannot_be_used_is_refused_with_its_place(compiler: GrammarCompiler, name: str) -> None:
    kind, text, words = WRONG[name]
    with pytest.raises(RequestError) as caught:
        compiler.compile(spec(text, kind))
    assert words in caught.value.message
    assert caught.value.param == "response_format"
