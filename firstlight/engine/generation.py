"""One `generate` call while it runs: core events in, decoded deltas out. Knows text and streams, not the core.

Whatever nobody takes is merged as ids and decoded in one go when it is taken, so a slow reader costs no work and
holds one pending delta per choice. Choices with stop strings decode at once, because a stop has to reach the core.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from firstlight.measure.causes import Trace
from firstlight.text.pipeline import TextPipeline
from firstlight.types import CacheReport, FinishReason, OutputDelta, SamplingParams, TokenEvent, TokenLogprob, Usage

__all__ = ["MAX_MERGED_TOKENS", "Choice", "Completion", "Generation", "collect"]

MAX_MERGED_TOKENS = 256
"""Most tokens in one delta, so that what a slow reader has left lying does not become one frame of megabytes (with
`logprobs: 20` a token takes about 2 KB). Text with stop strings is decoded as it comes and not divided again."""


class Mailbox:
    """Which choices have something to take; shared by one call's choices and its one reader, on one loop."""

    def __init__(self) -> None:
        self.ready: deque[Choice] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something is ready."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when something is ready."""
        while not self.ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Choice:
    """One of a call's `n` sequences. Written by the loop's thread alone."""

    def __init__(
        self,
        index: int,
        core_id: str,
        params: SamplingParams,
        pipeline: TextPipeline,
        num_prompt: int,
        mailbox: Mailbox,
    ) -> None:
        self.index = index
        self.core_id = core_id
        self.has_ended = False
        """Its finish is known; nothing more is taken from the core."""
        self.was_taken = False
        self._params = params
        self._pipeline = pipeline
        self._num_prompt = num_prompt
        self._mailbox = mailbox
        self._num_output = 0
        self._cached_tokens = 0
        self._cache: CacheReport | None = None
        self._undecoded: list[int] = []
        self._core_finish: FinishReason | None = None
        self._error: str | None = None
        self._error_code: str | None = None
        self._embedding: Any = None
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._logprobs: list[TokenLogprob] = []
        self._clear_pending()

    def _clear_pending(self) -> None:
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logits: list[Any] = []
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._first_scheduled_s: float | None = None

    def deliver(self, event: TokenEvent) -> bool:
        """Adds one event of the core. Returns: whether a stop string ended the choice, which the core must be told."""
        if not self.has_pending:
            self._mailbox.ready.append(self)
        self._mailbox.wake()
        self._undecoded += event.token_ids
        self._logprobs += event.logprobs or []
        if event.logits is not None:
            self._logits.append(event.logits)
        self._core_finish, self._error, self._error_code = event.finish, event.error, event.error_code
        self._embedding = event.embedding
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        self._cached_tokens = event.cached_tokens
        self._cache = event.cache
        self._first_scheduled_s = self._first_scheduled_s or event.first_scheduled_s
        if self._params.stop:
            self._decode(None)
        else:
            self.has_ended = event.finish is not None
        return self.has_ended and event.finish is None

    def take(self) -> OutputDelta:
        """What is pending as one delta; of much, the first part."""
        self._decode(None if self._logits else MAX_MERGED_TOKENS)
        finish, num = self._finish, len(self._ids)
        delta = OutputDelta(
            choice=self.index,
            text="".join(self._text),
            token_ids=self._ids,
            logprobs=self._logprobs[:num] if self._params.logprobs is not None else None,
            logits=np.concatenate(self._logits)[:num] if self._logits else None,
            finish=finish,
            stop_reason=self._stop_reason,
            error=self._error,
            error_code=self._error_code,
            usage=self._usage() if finish is not None else None,
            first_scheduled_s=self._first_scheduled_s,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )
        self._prompt_logprobs = None
        self.was_taken = finish is not None
        self._logprobs = self._logprobs[num:]
        self._clear_pending()
        return delta

    @property
    def has_pending(self) -> bool:
        """There is something to take."""
        return not self.was_taken and bool(self._ids or self._undecoded or self._finish or self._core_finish)

    def _decode(self, max_tokens: int | None) -> None:
        """Moves undecoded ids through the text pipeline; cuts at a stop string, closes the text at the end."""
        if self._finish is not None:
            return
        ids, self._undecoded = self._undecoded[:max_tokens], self._undecoded[max_tokens:] if max_tokens else []
        core_finish = None if self._undecoded else self._core_finish
        ended_by_id = core_finish is FinishReason.STOP
        hidden = 1 if ended_by_id and not self._params.include_stop_str_in_output else 0
        step = self._pipeline.push(ids[: len(ids) - hidden])
        self._text.append(step.text)
        stop = step.stop
        if stop is None and core_finish is not None:
            tail = self._pipeline.finish()
            self._text.append(tail.text)
            stop = tail.stop
        elif stop is not None:
            ids = ids[: step.num_ids]
        self._ids += ids
        self._num_output += len(ids)
        if stop is not None:
            self._finish, self._stop_reason, self._error = FinishReason.STOP, stop, None
        elif core_finish is not None:
            self._finish = core_finish
            if ended_by_id and ids[-1] in self._params.stop_token_ids:
                self._stop_reason = ids[-1]
        if not self._undecoded:
            self.has_ended = self._finish is not None

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_output,
            cached_tokens=self._cached_tokens,
            cache=self._cache,
        )


class Generation(AsyncIterator[OutputDelta]):
    """One running `generate` call: iterate it for deltas; `aclose` (or dropping it) aborts what is still open.

    Deltas that nobody takes are merged, so a slow reader holds at most one pending delta per choice.
    The last delta of each of the `n` choices has `finish` and `usage` set; iteration ends after the last of them.
    A cancelled `__anext__` aborts too.
    """

    def __init__(
        self,
        request_id: str,
        choices: list[Choice],
        mailbox: Mailbox,
        abort: Callable[[Sequence[Choice]], None],
        traces: Sequence[Trace],
    ) -> None:
        self.request_id = request_id
        self.traces = traces
        """What the core notes of each choice."""
        self._choices = choices
        self._mailbox = mailbox
        self._abort = abort
        self._num_open = len(choices)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._num_open == 0:
            raise StopAsyncIteration
        box = self._mailbox
        try:
            await box.wait()
        except BaseException:
            self._close()
            raise
        choice = box.ready.popleft()
        delta = choice.take()
        if choice.has_pending:
            box.ready.append(choice)
        if delta.finish is not None:
            self._num_open -= 1
        return delta

    async def aclose(self) -> None:
        """Aborts every choice that has not ended. Idempotent."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        self._num_open = 0
        left = [choice for choice in self._choices if not choice.has_ended]
        self._choices = []
        if left:
            self._abort(left)


@dataclass(slots=True, kw_only=True)
class Completion:
    """One whole answer. `logits` is `[len(token_ids), vocab] float32` where asked for."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    logits: Any = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    usage: Usage | None = None

    def add(self, delta: OutputDelta) -> None:
        """Appends one piece of the same choice."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.logits is not None:
            self.logits = delta.logits if self.logits is None else np.concatenate([self.logits, delta.logits])
        self.finish, self.stop_reason, self.error = delta.finish, delta.stop_reason, delta.error
        self.usage = delta.usage


async def collect(generation: Generation, num_choices: int) -> list[Completion]:
    """Reads a call to its end; its choices in order."""
    completions = [Completion(choice=i) for i in range(num_choices)]
    async for delta in generation:
        completions[delta.choice].add(delta)
    return completions
