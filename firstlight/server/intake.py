"""Checked requests from raw bodies: every field is typed, in range or refused by the name the client used.

Knows the wire forms and `SamplingParams`; ranges that every caller shares are checked in `firstlight.text.params`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from firstlight.errors import NotFoundError, RequestError, UnsupportedParameter
from firstlight.server.fields import (
    CANCEL_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    refuse_unknown,
    unknown_name,
)
from firstlight.server.json_body import decode_object
from firstlight.server.pins import checked_pin
from firstlight.server.structured import answer_grammar
from firstlight.server.tools import checked_calls, tool_use
from firstlight.server.urgency import checked_deadline, priority_of
from firstlight.server.wire import (
    CancelBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationRequest,
    MessageBody,
    MessagePin,
    Prompt,
    SharedBody,
    TokenizeBody,
)
from firstlight.text.params import MAX_LOGPROBS
from firstlight.types import SamplingParams

__all__ = ["Intake", "as_prompts", "convert"]

_Body = TypeVar("_Body", bound=msgspec.Struct)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "cache_control"})
_ROLE_FIELDS = {
    "assistant": frozenset({"tool_calls", "reasoning_content"}),
    "tool": frozenset({"tool_call_id"}),
}
_EMPTY_MESSAGE_FIELDS = frozenset({"annotations", "refusal", "audio", "function_call"})
"""Members that client libraries send back from an earlier answer; taken when they hold nothing."""
_DEFAULT_COMPLETION_TOKENS = 16
_INT64 = 2**63
MAX_TIMEOUT_S = 86400.0
MAX_PACE_MS = 2000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """The door of one server: its model's names and its limits."""

    model_names: tuple[str, ...]
    """The served name, then its aliases."""
    max_n: int
    max_prompts: int
    max_tools: int = 128
    max_pin_s: float = 3600.0

    def chat(self, raw: bytes) -> GenerationRequest:
        """The checked request of a POST /v1/chat/completions body. Raises RequestError."""
        members = decode_object(raw)
        refuse_unknown(members, CHAT_FIELDS, "/v1/chat/completions")
        body = convert(members, ChatBody)
        self.require_model(body.model)
        if not body.messages:
            raise RequestError("`messages` is empty: send at least one message", param="messages")
        messages = [_message(message, f"messages[{at}]") for at, message in enumerate(body.messages)]
        pins = self._pins(messages)
        max_tokens = _one_of_two_limits(body.max_tokens, body.max_completion_tokens)
        params = self._params(body, max_tokens, _chat_logprobs(body))
        tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, self.max_tools)
        is_continuation = _continues(body, messages)
        return self._request(body, params, messages=messages, tools=tools, is_continuation=is_continuation, pins=pins)

    def _pins(self, messages: list[dict[str, Any]]) -> tuple[MessagePin, ...]:
        """The messages' `cache_control`, taken out of them: templates do not see it."""
        found = [(at, message.pop("cache_control", None)) for at, message in enumerate(messages)]
        return tuple(checked_pin(c.type, c.ttl, at, self.max_pin_s) for at, c in found if c is not None)

    def completion(self, raw: bytes) -> GenerationRequest:
        """The checked request of a POST /v1/completions body. Raises RequestError."""
        members = decode_object(raw)
        refuse_unknown(members, COMPLETION_FIELDS, "/v1/completions")
        body = convert(members, CompletionBody)
        self.require_model(body.model)
        prompts = as_prompts(body.prompt, self.max_prompts)
        if body.best_of is not None and body.best_of != body.n:
            raise UnsupportedParameter(
                f"`best_of` is {body.best_of} and `n` is {body.n}: only `best_of` equal to `n` is supported",
                param="best_of",
            )
        _require_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        is_prompt_only = body.echo and max_tokens == 0
        _require_range("max_tokens", max_tokens, 0 if is_prompt_only else 1, _INT64)
        params = self._params(body, max(1, max_tokens), body.logprobs)
        return self._request(body, params, prompts=prompts, echo=body.echo, is_prompt_only=is_prompt_only)

    def tokenize(self, raw: bytes) -> tuple[str, bool, bool]:
        """(text, add_special, parse_special) of a POST /tokenize body. Raises RequestError."""
        members = decode_object(raw)
        refuse_unknown(members, TOKENIZE_FIELDS, "/tokenize")
        body = convert(members, TokenizeBody)
        self.require_model(body.model)
        texts = [text for text in (body.content, body.prompt, body.text) if text is not None]
        if len(texts) != 1:
            raise RequestError(f"{len(texts)} of `content`, `prompt`, `text` are given: send one", param="content")
        return texts[0], body.add_special, body.parse_special

    def cancel(self, raw: bytes) -> str:
        """The id of a POST /v1/cancel body. Raises RequestError."""
        members = decode_object(raw)
        refuse_unknown(members, CANCEL_FIELDS, "/v1/cancel")
        return convert(members, CancelBody).id

    def detokenize(self, raw: bytes) -> list[int]:
        """The ids of a POST /detokenize body. Raises RequestError."""
        members = decode_object(raw)
        refuse_unknown(members, DETOKENIZE_FIELDS, "/detokenize")
        body = convert(members, DetokenizeBody)
        self.require_model(body.model)
        return body.tokens

    def require_model(self, name: str | None) -> str:
        """The served name, given it, an alias, or nothing. Raises NotFoundError that lists the names."""
        if name is None or name in self.model_names:
            return self.model_names[0]
        names = ", ".join(f"`{known}`" for known in self.model_names)
        raise NotFoundError(f"model `{name[:128]}` is not served here: use {names}", param="model")

    def _params(self, body: SharedBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        _require_range("n", body.n, 1, self.max_n)
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k == -1 else body.top_k,
            min_p=body.min_p,
            seed=body.seed,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=_logit_bias(body.logit_bias),
            logprobs=logprobs,
            n=body.n,
            grammar=answer_grammar(body),
        )

    def _request(self, body: SharedBody, params: SamplingParams, **rest: Any) -> GenerationRequest:
        options = body.stream_options
        if options is not None and not body.stream:
            raise RequestError("`stream_options` needs `stream` to be true", param="stream_options")
        if options is not None and options.include_obfuscation:
            raise UnsupportedParameter(
                "`stream_options.include_obfuscation` is not supported: leave it out",
                param="stream_options.include_obfuscation",
            )
        return GenerationRequest(
            model=self.model_names[0],
            params=params,
            stream=body.stream,
            include_usage=options is not None and bool(options.include_usage),
            timings=body.timings,
            timeout_s=_timeout(body.timeout),
            priority=priority_of(body.priority),
            deadline_ms=checked_deadline(body.deadline_ms),
            pace_ms=_pace(body),
            **rest,
        )


def _timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"`timeout` is {timeout_s:g} s, it must be above 0 and at most {MAX_TIMEOUT_S:.0f} (a day)", param="timeout"
        )
    return timeout_s


def _pace(body: SharedBody) -> float | None:
    if body.pace_ms is not None and not 0 <= body.pace_ms <= MAX_PACE_MS:
        raise RequestError(f"`pace_ms` is {body.pace_ms:g} ms, it must be from 0 to {MAX_PACE_MS:.0f}", param="pace_ms")
    if body.pace_ms and not body.stream:
        raise RequestError("`pace_ms` needs `stream` to be true", param="pace_ms")
    return body.pace_ms


def _continues(body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    """Whether the answer goes on with the last message; raises RequestError where that cannot be."""
    if body.add_generation_prompt is not None and body.add_generation_prompt == body.continue_final_message:
        raise RequestError(
            "`add_generation_prompt` and `continue_final_message` must be opposites: send one of them",
            param="add_generation_prompt",
        )
    if body.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError(
            "`continue_final_message` needs an assistant message at the end of `messages`",
            param="continue_final_message",
        )
    return body.continue_final_message


def convert(members: dict[str, Any], body_type: type[_Body], path: str = "") -> _Body:
    """The typed body. Raises RequestError with the JSON path of the first member whose type is wrong."""
    try:
        return msgspec.convert(members, body_type)
    except msgspec.ValidationError as error:
        words, _, where = str(error).partition(" - at `")
        param = (path + where.rstrip("`").removeprefix("$")).lstrip(".")
        missing = re.search(r"missing required field `(\w+)`", words)
        if missing:
            param = f"{param}.{missing[1]}".lstrip(".")
            raise RequestError(f"`{param}` is required", param=param) from None
        unknown = re.search(r"unknown field `(.*)`", words)
        if unknown:
            raise unknown_name(unknown[1], (), f"a field of `{param}`", f"{param}.{unknown[1][:64]}") from None
        wanted = words.replace("Expected", "expected", 1).replace("`", "")
        raise RequestError(f"`{param}` has the wrong type: {wanted}", param=param) from None


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    """One message as the chat template takes it: role and plain text."""
    members: dict[str, Any] = {}
    for name, value in message.items():
        if value is None or (name in _EMPTY_MESSAGE_FIELDS and value in ([], "", {})):
            continue
        if name in _EMPTY_MESSAGE_FIELDS:
            raise UnsupportedParameter(f"`{path}.{name}` is not supported yet: leave it out", param=f"{path}.{name}")
        known = _MESSAGE_FIELDS | _ROLE_FIELDS.get(str(message.get("role")), frozenset())
        if name not in known:
            raise unknown_name(name, known, f"a field of `{path}`", f"{path}.{name[:64]}")
        members[name] = value
    _refuse_other_parts(members.get("content"), path)
    body = convert(members, MessageBody, path)
    if body.role not in _ROLES:
        raise RequestError(
            f"`{path}.role` is {body.role[:64]!r}, which is not supported: use one of {', '.join(_ROLES)}",
            param=f"{path}.role",
        )
    calls = checked_calls(body.tool_calls, f"{path}.tool_calls") if body.tool_calls is not None else []
    if body.content is None and not calls:
        raise RequestError(f"`{path}.content` is required", param=f"{path}.content")
    if body.role == "tool" and body.tool_call_id is None:
        raise RequestError(f"`{path}.tool_call_id` is required", param=f"{path}.tool_call_id")
    content = body.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    checked: dict[str, Any] = {"role": "system" if body.role == "developer" else body.role, "content": text}
    extras: dict[str, Any] = {"name": body.name, "tool_calls": calls or None, "tool_call_id": body.tool_call_id}
    extras |= {"reasoning_content": body.reasoning_content, "cache_control": body.cache_control}
    return checked | {name: value for name, value in extras.items() if value is not None}


def _refuse_other_parts(content: object, path: str) -> None:
    """Raises UnsupportedParameter for a content part that is not text, by the kind it has."""
    for at, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            where = f"{path}.content[{at}].type"
            raise UnsupportedParameter(f"`{where}` is {kind[:64]!r}: only text parts are supported", param=where)


def as_prompts(prompt: str | list[str | int | list[int]], max_prompts: int, name: str = "prompt") -> list[Prompt]:
    """The prompts of a body's member `name`: one or several, each text or ids. Raises RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"`{name}` is an empty list: send text or token ids", param=name)
    if all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    prompts: list[Prompt] = []
    for at, part in enumerate(prompt):
        if isinstance(part, int) or type(part) is not type(prompt[0]):
            raise RequestError(
                f"`{name}[{at}]` mixes kinds: send only strings, only ids, or only lists of ids", param=f"{name}[{at}]"
            )
        prompts.append(part)
    if len(prompts) > max_prompts:
        raise RequestError(
            f"`{name}` has {len(prompts)} prompts, the limit is {max_prompts}: send several requests", param=name
        )
    return prompts


def _one_of_two_limits(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    _require_range("max_tokens", max_tokens, 1, _INT64)
    _require_range("max_completion_tokens", max_completion_tokens, 1, _INT64)
    if max_tokens is None:
        return max_completion_tokens
    if max_completion_tokens not in (None, max_tokens):
        raise RequestError(
            f"`max_tokens` is {max_tokens} and `max_completion_tokens` is {max_completion_tokens}: send one of them",
            param="max_tokens",
        )
    return max_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    _require_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return None


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"`logit_bias` has the key {key[:64]!r}: keys are token ids", param="logit_bias")
        checked[int(key)] = value
    return checked


def _require_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high >= _INT64 else f"from {low} to {high}"
        raise RequestError(f"`{name}` is {value}, it must be {limit}", param=name)
