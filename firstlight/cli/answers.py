"""Where chat answers come from: a model in this process, or a server. Both give the same pieces.

Knows engines and streams; knows no terminal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.cli.commands import ChatConfig
from firstlight.config import EngineConfig
from firstlight.errors import BackendError
from firstlight.measure.bench import served_model
from firstlight.measure.client import Endpoint, stream_events
from firstlight.types import FinishReason, SamplingParams, Usage

if TYPE_CHECKING:
    from firstlight.engine.frontend import AsyncEngine

__all__ = ["AnswerPiece", "AnswerSource", "Message", "open_source"]

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Some text of an answer. The last piece has `finish`, and `usage` where the source knows it."""

    text: str
    finish: str | None = None
    usage: Usage | None = None


class AnswerSource(Protocol):
    """Something that answers conversations."""

    @property
    def model(self) -> str:
        """The name of what answers."""

    def answer(self, messages: list[Message]) -> AsyncGenerator[AnswerPiece, None]:
        """Streams one answer; closing the generator stops it. Raises FirstlightError."""


class LocalSource:
    """Answers from an engine in this process."""

    def __init__(self, engine: AsyncEngine, config: ChatConfig) -> None:
        self._engine = engine
        self._params = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            max_tokens=config.max_tokens or None,
        )
        self._numbers = itertools.count(1)

    @property
    def model(self) -> str:
        return self._engine.info.model

    async def answer(self, messages: list[Message]) -> AsyncGenerator[AnswerPiece, None]:
        prompt_ids = await self._engine.encode_chat(list(messages))
        generation = self._engine.generate(f"chat-{next(self._numbers)}", prompt_ids, self._params)
        try:
            async for delta in generation:
                if delta.finish is FinishReason.ERROR:
                    raise BackendError(f"the answer broke off: {delta.error}")
                yield AnswerPiece(delta.text, delta.finish, delta.usage)
        finally:
            await generation.aclose()


class RemoteSource:
    """Answers from a server."""

    def __init__(self, endpoint: Endpoint, model: str, config: ChatConfig) -> None:
        self._endpoint = endpoint
        self._model = model
        self._options: dict[str, Any] = {"temperature": config.temperature, "top_p": config.top_p}
        if config.top_k:
            self._options["top_k"] = config.top_k
        if config.min_p:
            self._options["min_p"] = config.min_p
        if config.max_tokens:
            self._options["max_tokens"] = config.max_tokens

    @property
    def model(self) -> str:
        return self._model

    async def answer(self, messages: list[Message]) -> AsyncGenerator[AnswerPiece, None]:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        finish = None
        usage = None
        async with contextlib.aclosing(stream_events(self._endpoint, "/v1/chat/completions", body)) as events:
            async for _, event in events:
                if event.get("error"):
                    raise BackendError(f"the answer broke off: {event['error'].get('message', event['error'])}")
                usage = _usage_of(event) or usage
                for choice in event.get("choices") or ():
                    finish = choice.get("finish_reason") or finish
                    if text := choice["delta"].get("content"):
                        yield AnswerPiece(text)
        yield AnswerPiece("", finish or "stop", usage)


def _usage_of(event: dict[str, Any]) -> Usage | None:
    usage = event.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


@contextlib.asynccontextmanager
async def open_source(chat: ChatConfig, engine_config: EngineConfig) -> AsyncIterator[AnswerSource]:
    """The source that the options ask for; the local model is loaded on entry and freed on exit."""
    if chat.url:
        endpoint = Endpoint.parse(chat.url, chat.api_key)
        yield RemoteSource(endpoint, await served_model(endpoint), chat)
        return
    from firstlight.cli.download import fetch_if_missing
    from firstlight.engine.frontend import AsyncEngine

    if engine_config.backend != "fake":
        fetch_if_missing(engine_config.model)
    engine = AsyncEngine(engine_config)
    await engine.start()
    try:
        yield LocalSource(engine, chat)
    finally:
        await engine.close()
