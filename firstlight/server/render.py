"""Answers in OpenAI's two forms, as chunks and as a whole: typed structs and one prebuilt encoder.

Knows the JSON shapes; knows no HTTP, no engine and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from firstlight.server.echo import Echo, TextOffset
from firstlight.text.tool_parsers import Part
from firstlight.types import FinishReason, TokenLogprob, Usage

__all__ = ["AnswerForm", "ChatForm", "ChoiceTotal", "CompletionForm", "TokenBytes", "event", "total_usage"]

TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for."""

_ENCODER = msgspec.json.Encoder()
_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the value OpenAI's answers use."""


_NO_LOGPROB = 0.0
"""Stands for the first token of a prompt, which nothing comes before: the published schema takes numbers only."""


class _Logprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _TopLogprob(_Logprob):
    top_logprobs: list[_Logprob]


class _ChatLogprobs(msgspec.Struct):
    content: list[_TopLogprob]
    refusal: None = None


class _CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]

    def then(self, later: _CompletionLogprobs) -> _CompletionLogprobs:
        """These and what follows them."""
        return _CompletionLogprobs(
            self.tokens + later.tokens,
            self.token_logprobs + later.token_logprobs,
            self.top_logprobs + later.top_logprobs,
            self.text_offset + later.text_offset,
        )


class _Function(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class _CallDelta(msgspec.Struct):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: _Function | UnsetType = UNSET


class _Call(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class _Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_CallDelta] | UnsetType = UNSET


class _ChatChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _ChatLogprobs | None = None
    finish_reason: str | None = None


class _Message(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_Call] | UnsetType = UNSET


class _ChatChoice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _ChatLogprobs | None
    finish_reason: str


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: _CompletionLogprobs | None
    finish_reason: str | None


class _Answer(msgspec.Struct):
    """One chunk or one whole answer; `usage` is null on the other chunks of a stream that ends with it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[_ChatChunkChoice | _ChatChoice | _TextChoice]
    usage: dict[str, Any] | UnsetType | None = UNSET
    timings: dict[str, float | str] | UnsetType = UNSET


class ChoiceTotal:
    """Everything one choice has said, for whole answers. Written by the task that serves the request."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish = FinishReason.STOP
        self.parts: list[Part] | None = None
        """The answer taken apart, where it is more than text."""

    def add(
        self,
        text: str,
        logprobs: list[TokenLogprob] | None,
        finish: FinishReason | None,
        parts: list[Part] | None = None,
    ) -> None:
        """Appends one piece."""
        self.texts.append(text)
        if parts is not None:
            self.parts = (self.parts or []) + parts
        self.logprobs += logprobs or ()
        self.finish = finish or self.finish


class AnswerForm(Protocol):
    """How one route's answers look: `opening`, `piece` and `last` give frames of a stream, `whole` a plain body."""

    def opening(self, choice: int, prompt_logprobs: list[TokenLogprob] | None = None) -> bytes:
        """What comes before a choice's first piece; may be empty."""

    def piece(self, choice: int, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> bytes:
        """More text of a choice, its end, or both."""

    def last(self, usage: Usage | None, timings: dict[str, float | str] | None) -> bytes:
        """What comes after the last piece: totals where asked for, and the end mark."""

    def whole(self, totals: list[ChoiceTotal], usage: Usage, timings: dict[str, float | str] | None) -> bytes:
        """The body of an answer that is not streamed."""


class _Form:
    """What both forms hold: the fields that every chunk of one answer repeats."""

    def __init__(
        self, answer_id: str, created: int, model: str, fingerprint: str, token_bytes: TokenBytes, *, has_logprobs: bool
    ) -> None:
        self._repeated = (answer_id, created, model, fingerprint)
        self._token_bytes = token_bytes
        self._has_logprobs = has_logprobs
        self.includes_usage = False

    def _answer(
        self, kind: str, choices: Sequence[Any], usage: Usage | None, timings: dict[str, float | str] | None
    ) -> _Answer:
        answer_id, created, model, fingerprint = self._repeated
        return _Answer(
            id=answer_id,
            object=kind,
            created=created,
            model=model,
            system_fingerprint=fingerprint,
            choices=choices,
            usage=_usage_fields(usage) if usage else None if self.includes_usage else UNSET,
            timings=UNSET if timings is None else timings,
        )

    def _last(self, kind: str, usage: Usage | None, timings: dict[str, float | str] | None) -> bytes:
        done = b"data: [DONE]\n\n"
        if usage is None and timings is None:
            return done
        return event(self._answer(kind, [], usage, timings)) + done


class ChatForm(_Form):
    """`chat.completion` and its chunks."""

    _CHUNK = "chat.completion.chunk"

    def opening(self, choice: int, prompt_logprobs: list[TokenLogprob] | None = None) -> bytes:
        """The role."""
        return event(self._answer(self._CHUNK, [_ChatChunkChoice(choice, _Delta("assistant", ""))], None, None))

    def piece(self, choice: int, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> bytes:
        """A content chunk, a finish chunk, or one after the other. Cost: about 3 us without logprobs."""
        frames = b""
        if text or logprobs:
            content = _ChatChunkChoice(choice, _Delta(content=text), self._logprobs(logprobs))
            frames = event(self._answer(self._CHUNK, [content], None, None))
        if finish is not None:
            end = _ChatChunkChoice(choice, _Delta(), None, finish.value)
            frames += event(self._answer(self._CHUNK, [end], None, None))
        return frames

    def parts(
        self,
        choice: int,
        parts: list[Part],
        logprobs: list[TokenLogprob] | None,
        finish: FinishReason | None,
        *,
        has_calls: bool,
    ) -> bytes:
        """As `piece`, for an answer that is more than text: a chunk per part, the first with the logprobs."""
        deltas = [_part_delta(part) for part in parts] or ([_Delta(content="")] if logprobs else [])
        frames = b""
        for delta in deltas:
            piece = _ChatChunkChoice(choice, delta, self._logprobs(logprobs))
            frames += event(self._answer(self._CHUNK, [piece], None, None))
            logprobs = None
        if finish is not None:
            end = _ChatChunkChoice(choice, _Delta(), None, _finish(finish, has_calls))
            frames += event(self._answer(self._CHUNK, [end], None, None))
        return frames

    def last(self, usage: Usage | None, timings: dict[str, float | str] | None) -> bytes:
        """The usage chunk where asked for, then the end mark."""
        return self._last(self._CHUNK, usage, timings)

    def whole(self, totals: list[ChoiceTotal], usage: Usage, timings: dict[str, float | str] | None) -> bytes:
        """The `chat.completion` body."""
        choices = []
        for at, total in enumerate(totals):
            message = _message(total)
            finish = _finish(total.finish, message.tool_calls is not UNSET)
            choices.append(_ChatChoice(at, message, self._logprobs(total.logprobs), finish))
        return _ENCODER.encode(self._answer("chat.completion", choices, usage, timings))

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> _ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return _ChatLogprobs([self._token(logprob) for logprob in logprobs or ()])

    def _token(self, logprob: TokenLogprob) -> _TopLogprob:
        raw = self._token_bytes(logprob.token_id)
        top = [self._top(token_id, value) for token_id, value in logprob.top]
        return _TopLogprob(_as_text(raw), max(logprob.logprob, _LOWEST_LOGPROB), list(raw), top)

    def _top(self, token_id: int, value: float) -> _Logprob:
        raw = self._token_bytes(token_id)
        return _Logprob(_as_text(raw), max(value, _LOWEST_LOGPROB), list(raw))


def _finish(finish: FinishReason, has_calls: bool) -> str:
    """An answer that ended by itself and calls functions ends for that reason; one that was cut does not."""
    return "tool_calls" if has_calls and finish is FinishReason.STOP else finish.value


def _part_delta(part: Part) -> _Delta:
    if part.kind == "content":
        return _Delta(content=part.text)
    if part.kind == "reasoning":
        return _Delta(reasoning_content=part.text)
    if part.call_id is None or part.name is None:
        return _Delta(tool_calls=[_CallDelta(part.nth, function=_Function(arguments=part.text))])
    begun = _CallDelta(part.nth, part.call_id, "function", _Function(part.name, part.text))
    return _Delta(tool_calls=[begun])


def _message(total: ChoiceTotal) -> _Message:
    """The message of one choice: its text, or what its parts join to."""
    if total.parts is None:
        return _Message("".join(total.texts))
    joined = {kind: "".join(p.text for p in total.parts if p.kind == kind) for kind in ("content", "reasoning")}
    calls: list[_Call] = []
    for part in total.parts:
        if part.kind == "call" and part.call_id is not None and part.name is not None:
            calls.append(_Call(part.call_id, _Function(part.name, part.text)))
        elif part.kind == "call":
            begun = calls[part.nth].function
            begun.arguments = f"{begun.arguments}{part.text}"
    return _Message(
        joined["content"] if joined["content"] or not calls else None,
        reasoning_content=joined["reasoning"] or UNSET,
        tool_calls=calls or UNSET,
    )


class CompletionForm(_Form):
    """`text_completion`, the same shape for chunks and whole answers.

    `echoes` holds the prompt per choice where it was asked for, else nothing.
    """

    def __init__(self, *args: Any, echoes: list[Echo], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._echoes = echoes
        self._offsets: dict[int, TextOffset] = {}

    def opening(self, choice: int, prompt_logprobs: list[TokenLogprob] | None = None) -> bytes:
        """The echoed prompt."""
        if not self._echoes:
            return b""
        logprobs = self._echoed(choice, prompt_logprobs or []) if self._has_logprobs else None
        echo = _TextChoice(choice, self._echoes[choice].text, logprobs, None)
        return event(self._answer("text_completion", [echo], None, None))

    def piece(self, choice: int, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> bytes:
        """One chunk."""
        if not (text or logprobs or finish):
            return b""
        reason = finish.value if finish else None
        part = _TextChoice(choice, text, self._logprobs(choice, logprobs), reason)
        return event(self._answer("text_completion", [part], None, None))

    def last(self, usage: Usage | None, timings: dict[str, float | str] | None) -> bytes:
        """The usage chunk where asked for, then the end mark."""
        return self._last("text_completion", usage, timings)

    def whole(self, totals: list[ChoiceTotal], usage: Usage, timings: dict[str, float | str] | None) -> bytes:
        """The `text_completion` body."""
        choices = []
        for at, total in enumerate(totals):
            text = (self._echoes[at].text if self._echoes else "") + "".join(total.texts)
            echoed = self._echoed(at, total.prompt_logprobs) if self._echoes and self._has_logprobs else None
            logprobs = self._logprobs(at, total.logprobs)
            if echoed is not None and logprobs is not None:
                logprobs = echoed.then(logprobs)
            choices.append(_TextChoice(at, text, logprobs, total.finish.value))
        return _ENCODER.encode(self._answer("text_completion", choices, usage, timings))

    def _logprobs(self, choice: int, logprobs: list[TokenLogprob] | None) -> _CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        offset = self._offsets.setdefault(choice, TextOffset())
        raws = [self._token_bytes(logprob.token_id) for logprob in logprobs or ()]
        return _CompletionLogprobs(
            tokens=[_as_text(raw) for raw in raws],
            token_logprobs=[max(logprob.logprob, _LOWEST_LOGPROB) for logprob in logprobs or ()],
            top_logprobs=[self._rivals(logprob) for logprob in logprobs or ()],
            text_offset=[offset.before(raw) for raw in raws],
        )

    def _echoed(self, choice: int, logprobs: list[TokenLogprob]) -> _CompletionLogprobs:
        """The prompt's logprobs, of which there is none for its first token. Call it before the answer's."""
        echo = self._echoes[choice]
        offset = self._offsets[choice] = TextOffset()
        shown = echo.shown([self._token_bytes(token_id) for token_id, _ in echo.tokens])
        starts = [offset.before(raw) for raw in shown]
        offset.begin_at(len(echo.text))
        return _CompletionLogprobs(
            tokens=[_as_text(self._token_bytes(token_id)) for token_id, _ in echo.tokens],
            token_logprobs=[_NO_LOGPROB, *(max(logprob.logprob, _LOWEST_LOGPROB) for logprob in logprobs)],
            top_logprobs=[{}, *(self._rivals(logprob) for logprob in logprobs)],
            text_offset=starts,
        )

    def _rivals(self, logprob: TokenLogprob) -> dict[str, float]:
        """The most likely tokens by text, the sampled one always among them."""
        pairs = [(logprob.token_id, logprob.logprob), *logprob.top]
        return {_as_text(self._token_bytes(token_id)): max(value, _LOWEST_LOGPROB) for token_id, value in pairs}


def event(answer: msgspec.Struct) -> bytes:
    """One server-sent event. JSON has no raw line break, so one `data:` line is enough."""
    return b"data: " + _ENCODER.encode(answer) + b"\n\n"


def total_usage(usages: dict[int, Usage], num_choices: int, n: int) -> Usage:
    """Counts of the whole request from its choices': each prompt once, as its first choice found it."""
    firsts = [usages[choice] for choice in range(0, num_choices, n)]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        cache=firsts[0].cache if len(firsts) == 1 else None,
    )


def _usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _as_text(raw: bytes) -> str:
    """A token's bytes as text; a piece of a code point is shown by its bytes, so different tokens stay different."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
