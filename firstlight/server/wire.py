"""What clients send, typed: one Struct per route body, and the checked request that leaves this room.

The `*Body` structs are raw input with JSON types only; `GenerationRequest` is checked input. Knows no HTTP, no engine.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from firstlight.server.tools import ToolUse
from firstlight.types import SamplingParams

__all__ = [
    "CancelBody",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationRequest",
    "MessagePin",
    "Prompt",
    "TokenizeBody",
]

Prompt = str | list[int]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SharedBody(msgspec.Struct, kw_only=True):
    """Fields that chat and completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: dict[str, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    timings: bool = False
    timeout: float | None = None
    priority: str | None = None
    deadline_ms: float | None = None
    pace_ms: float | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One part of a message's content. Other kinds than text are refused by name before this type is used."""

    type: Literal["text"]
    text: str


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`cache_control` of a message: keep the KV of the conversation up to its end for `ttl` seconds."""

    type: str
    ttl: float


class MessagePin(msgspec.Struct, frozen=True, kw_only=True):
    """A checked `cache_control`: of which message, and for how many seconds."""

    message: int
    ttl_s: float


class MessageBody(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None


class ChatBody(SharedBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SharedBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: the text is in exactly one of `content`, `prompt`, `text`."""

    content: str | None = None
    prompt: str | None = None
    text: str | None = None
    add_special: bool = False
    parse_special: bool = False
    model: str | None = None


class CancelBody(msgspec.Struct, kw_only=True):
    """POST /v1/cancel."""

    id: str


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for text: what the answer routes work from.

    Exactly one of `messages` and `prompts` is filled. `params.n` answers are made per prompt.
    """

    model: str
    messages: list[dict[str, Any]] = []
    prompts: list[Prompt] = []
    params: SamplingParams
    tools: ToolUse | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    is_prompt_only: bool = False
    """Nothing is to be generated: the one token that is, to compute the prompt, is not shown and not counted."""
    timings: bool = False
    timeout_s: float | None = None
    is_continuation: bool = False
    """The last message is the beginning of the answer."""
    priority: int = 0
    deadline_ms: float | None = None
    pace_ms: float | None = None
    """Longest time a token may be held to even out the stream's gaps; None = as the server is set."""
    pins: tuple[MessagePin, ...] = ()

    @property
    def is_chat(self) -> bool:
        """Came in on the chat route."""
        return bool(self.messages)

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return self.params.n * max(1, len(self.prompts))
