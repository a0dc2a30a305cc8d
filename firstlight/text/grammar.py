"""Grammars compiled for a tokenizer, and where one answer stands in one: which tokens may come next.

Knows token ids and bits, not requests or devices. The parsing is the llguidance library's; here are limits, a cache,
and errors that name the place.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.errors import RequestError
from firstlight.text.schema import checked_schema, place_of
from firstlight.text.tokenizer import Tokenizer
from firstlight.types import GrammarSpec

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarLimits", "GrammarState", "embedded_schema", "mask_words"]

Bits = npt.NDArray[np.uint32]

JSON_WHITESPACE = r"( |\n[ \t]{0,24})"
"""Between two JSON tokens: nothing, one space, or one line break with indentation. Unbounded, a small model may choose
white space for ever."""
SLOW_MASK_S = 0.005
"""Masks and moves above this count against `max_slow_s`. Measured over 97,689 tokens of 478 real schemas: median 6 us,
99 % below 0.11 ms, 1 ms at most."""
MAX_COUNTED_S = 0.05
"""The most that one of them counts: above what the parser's limits allow (37 ms seen), the machine had paused."""
_PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,
    "step_max_items": 20_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
}
"""What bounds one mask: work that is counted, not timed, so that a grammar fails everywhere or nowhere. An ambiguous
grammar's time grows with the square of a row's items; real schemas need up to some 250."""
_NUM_PROBED = 3
"""Tokens that a grammar is tried on when it is compiled."""
_MAX_ERROR_CHARS = 400
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What a request's grammar may cost. A step waits for its masks, so a slow one is felt by everybody in it.

    One mask is bounded by counted work; `max_slow_s` bounds all slow masks of one answer together, in time of the
    thread, of which no single mask can use up more than a part.
    """

    max_bytes: int = 256 * 1024
    max_depth: int = 96
    max_cached: int = 256
    max_slow_s: float = 0.5


def embedded_schema(text: str, field: str, max_depth: int = 96) -> Any:
    """A JSON schema ready to stand inside a grammar, where it is compiled as one of its own would be.

    Raises:
        RequestError: as `GrammarCompiler.compile`, for what is wrong with the JSON.
    """
    schema = checked_schema(GrammarSpec(kind="json_schema", text=text, field=field), max_depth)
    if not isinstance(schema, dict):
        return {"not": {}} if schema is False else {}
    return {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit per token."""
    return (vocab_size + 31) // 32


class GrammarCompiler:
    """Turns grammars into `CompiledGrammar`s for one tokenizer, and keeps the most recently used.

    Threads may share one; compiling releases the interpreter lock.

    Args:
        vocab_size: width of the model's logits; ids without a piece are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits | None = None) -> None:
        self.vocab_size = vocab_size
        self.limits = limits or GrammarLimits()
        self.eos_ids = sorted(tokenizer.eos_ids)
        self._tokenizer = tokenizer
        self._native: Any = None
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, str, str], CompiledGrammar] = OrderedDict()

    def cached(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """The grammar where it is compiled already. Cost: a look-up."""
        with self._lock:
            found = self._recent.get(_key(spec))
            if found is not None:
                self._recent.move_to_end(_key(spec))
            return found

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compiled grammar, from the cache where it is there. Takes about a millisecond, bounded by fuel.

        Raises:
            RequestError: the grammar is too large or not valid, or uses what is not supported; names the place.
        """
        found = self.cached(spec)
        if found is not None:
            return found
        self._require_size(spec)
        compiled = self._compiled(spec)
        with self._lock:
            self._recent[_key(spec)] = compiled
            while len(self._recent) > self.limits.max_cached:
                self._recent.popitem(last=False)
        return compiled

    def warm_up(self) -> None:
        """Builds the token trie (some 100 ms), so that the first grammar does not wait for it. Any thread."""
        self._native_tokenizer()

    def _require_size(self, spec: GrammarSpec) -> None:
        size = len(spec.text.encode("utf-8", "surrogatepass"))
        if size > self.limits.max_bytes:
            raise RequestError(
                f"`{spec.field}` is {size} bytes, `max_grammar_kb` allows {self.limits.max_bytes}: send a smaller one",
                param=spec.field,
            )

    def _compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        schema = checked_schema(spec, self.limits.max_depth) if spec.kind == "json_schema" else None
        error, matcher = self._try(spec, schema)
        if error is None:
            return CompiledGrammar(matcher, self.eos_ids, self.vocab_size, self.limits)
        place = spec.field
        if schema is not None:
            path, error = place_of(schema, error, lambda part: self._try(spec, part)[0])
            place += path
        raise RequestError(f"`{place}` cannot be used: {error}", param=spec.field)

    def _try(self, spec: GrammarSpec, schema: Any) -> tuple[str | None, Any]:
        """(None, a matcher that has computed its first mask), or (what is wrong, None)."""
        import llguidance
        import msgspec

        try:
            if spec.kind == "json_schema":
                text = msgspec.json.encode(schema).decode()
                source = llguidance.LLMatcher.grammar_from_json_schema(
                    text, overrides={"whitespace_pattern": JSON_WHITESPACE}
                )
            elif spec.kind == "regex":
                source = llguidance.LLMatcher.grammar_from_regex(spec.text)
            else:
                source = llguidance.grammar_from("grammar", spec.text)
            if spec.preamble:
                source = _behind(spec.preamble, source)
            limits = llguidance.LLParserLimits(**_PARSER_LIMITS, verbose_errors=False)
            matcher = llguidance.LLMatcher(self._native_tokenizer(), source, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            return _shortened(str(error)), None
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it builds is kept, and copied with the matcher
        if matcher.is_error():
            wrong = _shortened(matcher.get_error())
            return ("no text can satisfy it" if wrong.startswith("NoExtension") else wrong), None
        wrong = self._fails_soon(matcher.deep_copy())
        if wrong:
            return f"it is too complex: simplify it, or use smaller repetition counts ({wrong})", None
        return None, matcher

    def _fails_soon(self, matcher: Any) -> str:
        """What the matcher fails with within its first tokens, whatever they are; empty where it does not.

        A repetition that needs too much shows it only behind its first token.
        """
        out = np.empty(mask_words(self.vocab_size), np.uint32)
        for _ in range(_NUM_PROBED):
            matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
            if matcher.is_error():
                break
            (allowed,) = np.nonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))
            texts = [token for token in allowed[: len(self.eos_ids) + 1].tolist() if token not in self.eos_ids]
            if not texts or not matcher.consume_token(texts[0]):
                break
        return _shortened(matcher.get_error()) if matcher.is_error() else ""

    def _native_tokenizer(self) -> Any:
        with self._lock:
            if self._native is None:
                import llguidance

                source = llguidance.TokenizerWrapper(_TokenizerView(self._tokenizer, self.vocab_size))
                self._native = llguidance.LLTokenizer(source, n_vocab=self.vocab_size, eos_token=self.eos_ids)
            return self._native


class CompiledGrammar:
    """A grammar at its beginning. Immutable; answers start from copies of it."""

    def __init__(self, matcher: Any, eos_ids: Sequence[int], vocab_size: int, limits: GrammarLimits) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._limits = limits

    def start(self, *, ignores_eos: bool = False) -> GrammarState:
        """A new answer's state. Cost: a copy, some 50 us. `ignores_eos`: end only where nothing else is allowed."""
        matcher = self._matcher.deep_copy()
        avoided = self._eos_ids if ignores_eos else ()
        return GrammarState(matcher, avoided, mask_words(self._vocab_size), self._limits)


class GrammarState:
    """Where one answer stands in its grammar. One writer at a time.

    `error` is set once and for all when a token was outside the grammar or a limit was met; every token is then
    allowed.
    """

    def __init__(self, matcher: Any, avoided_ids: Sequence[int], num_words: int, limits: GrammarLimits) -> None:
        self.error: str | None = None
        self._limits = limits
        self._slow_s = 0.0
        self._matcher = matcher
        self._avoided = np.zeros(num_words, np.uint32)
        for token_id in avoided_ids:
            self._avoided[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._avoids = bool(avoided_ids)

    @property
    def is_complete(self) -> bool:
        """The answer so far is a whole text of the grammar."""
        return bool(self._matcher.is_accepting())

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes tokens of the answer. Sets `error` where one is not allowed."""
        started = time.thread_time()
        for token in tokens:
            if self.error is None and not self._matcher.consume_token(token):
                self._stopped(token)
        self._count(time.thread_time() - started)

    def fill(self, out: Bits) -> None:
        """Writes the allowed next tokens to `out` (`[mask_words] uint32`, C-contiguous)."""
        if self.error is None:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
            took_s = time.thread_time() - started
            if self._matcher.is_error():
                self._stopped()
            else:
                self._count(took_s)
        if self.error is not None:
            out.fill(_ALL)
        elif self._avoids:
            others = out & ~self._avoided
            if others.any():
                out[:] = others

    def fill_drafts(self, drafts: Sequence[int], out: Bits) -> None:
        """Writes the allowed tokens after each of `drafts` to `out` (`[len(drafts), mask_words]`); moves nothing.

        After a draft that is not allowed nothing can be accepted, so what is written there does not matter.
        """
        taken = 0
        for draft, row in zip(drafts, out, strict=True):
            if self.error is not None or self._matcher.validate_tokens([draft]) != 1:
                out[taken:].fill(_ALL)
                break
            self.advance([draft])
            taken += 1
            self.fill(row)
        if taken and not self._matcher.rollback(taken):
            self._fail("the grammar could not go back over drafts")

    def _stopped(self, token: int | None = None) -> None:
        """Sets `error` from what the matcher says, after `token` where it was not taken."""
        reason = self._matcher.get_error()
        if token is not None and "satisfy the grammar" in reason:
            self._fail(f"token {token} is outside the grammar")
        else:
            self._fail(f"the grammar became too complex: simplify it ({_shortened(reason)})")

    def _count(self, took_s: float) -> None:
        """Adds up what slow work took, and ends it where that is too much."""
        if took_s > SLOW_MASK_S:
            self._slow_s += min(took_s, MAX_COUNTED_S)
            if self.error is None and self._slow_s > self._limits.max_slow_s:
                self._fail("the grammar became too slow: simplify it")

    def _fail(self, message: str) -> None:
        self.error = message


class _TokenizerView:
    """Our tokenizer in the form llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ids = range(vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids) if tokenizer.eos_id is None else tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.id_to_bytes(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special(token_id)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _key(spec: GrammarSpec) -> tuple[str, str, str]:
    return spec.kind, spec.text, spec.preamble


def _behind(preamble: str, source: str) -> str:
    """A grammar in the library's form in which `@body` of the preamble is the source (Lark, or that form)."""
    is_lark = not source.startswith("{")
    body = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": preamble}, {**body, "name": "body"}]})


def _shortened(message: str) -> str:
    text = message.replace("<non-verbose/>", "").strip()
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."
