"""The Python API without asyncio: the same engine on a loop of its own, in a thread of its own.

Knows no more than AsyncEngine offers; every call is handed to it.
"""

from __future__ import annotations

import asyncio
import atexit
import difflib
import itertools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, cast

from firstlight.config import EngineConfig
from firstlight.engine.core import CoreStats
from firstlight.engine.frontend import AsyncEngine, EngineInfo
from firstlight.engine.generation import Completion, Generation, collect
from firstlight.engine.load import EngineParts, load_parts
from firstlight.errors import ConfigError, RequestError
from firstlight.types import OutputDelta, SamplingParams

__all__ = ["Engine"]

EXIT_TIMEOUT_S = 10.0  # how long the interpreter's end waits for engines that nobody closed

T = TypeVar("T")
Prompt = str | list[int]
Messages = list[dict[str, Any]]


class Engine:
    """A loaded model. Use it as a context manager, or `close` it; dropped or left open at exit it closes itself.

    Args:
        model: GGUF file, Hugging Face folder, hf:org/name[:file], or a short name.
        load: builds the parts from the configuration.
        options: any other field of EngineConfig.

    Raises:
        ConfigError: an option or the model cannot be used.

    Threads: any number of threads may call one engine; their requests are batched together.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        load: Callable[[EngineConfig], EngineParts] = load_parts,
        **options: Any,
    ) -> None:
        config = _config(options if model is None else {"model": model, **options})
        self._serial = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_live, args=(self._loop,), name="firstlight-engine", daemon=True)
        self._thread.start()
        self._engine = AsyncEngine(config, load=load)
        self._finish = weakref.finalize(self, _begin_close, self._loop, self._engine)
        _open[self._thread] = self._finish
        try:
            self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is open and frees the model. Idempotent."""
        closing = self._finish()
        if closing is not None:
            closing.result()
        self._thread.join()

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        return self._engine.info

    def stats(self) -> CoreStats:
        """Counters and gauges as of now."""
        return self._engine.stats()

    def check(self) -> None:
        """Audits every block, table and queue. Raises AssertionError saying what is broken."""
        self._run(self._engine.check())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Whole answers, in the order of the prompts; with `n` > 1 the choices of one prompt follow each other.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one per prompt.
            options: `priority`, `deadline_s`, `tenant`, `route`, `cache_salt`, `return_logits`, `forced_ids` of
                AsyncEngine.generate.

        Raises:
            RequestError: a prompt or a parameter cannot be served; nothing of the call goes on running.
        """
        many = _as_list(prompts)
        each = _per_prompt(params, len(many))

        encoders = [partial(self._engine.encode_prompt, prompt) for prompt in many]
        return self._run(self._answer_all(encoders, each, options))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Whole answers to a conversation, or to several at once; with `n` > 1 the choices of one follow each other.

        Args:
            messages: a list of messages, or a list of such lists.
            params, options: as in `generate`.

        Raises:
            RequestError: a message or a parameter cannot be served; nothing of the call goes on running.
        """
        is_one = not messages or not all(isinstance(item, list) for item in messages)
        many = [cast(Messages, messages)] if is_one else list(cast(Sequence[Messages], messages))
        encoders = [partial(self._engine.encode_chat, conversation) for conversation in many]
        return self._run(self._answer_all(encoders, _per_prompt(params, len(many)), options))

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[OutputDelta]:
        """Deltas as they come, of a prompt or of a conversation. Closing the iterator aborts. Raises RequestError."""
        generation = self._run(self._begin(prompt, params or SamplingParams(), options))
        return self._deltas(generation)

    def _deltas(self, generation: Generation) -> Iterator[OutputDelta]:
        try:
            while (delta := self._run(_next_or_none(generation))) is not None:
                yield delta
        finally:
            if self._finish.alive:
                self._run(generation.aclose())

    async def _begin(self, prompt: Prompt | Messages, params: SamplingParams, options: dict[str, Any]) -> Generation:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            ids = await self._engine.encode_chat(prompt)
        else:
            ids = await self._engine.encode_prompt(cast(Prompt, prompt))
        await self._engine.prepare(params)
        return self._engine.generate(f"local-{next(self._serial)}", ids, params, **options)

    async def _answer_all(
        self,
        encoders: Sequence[Callable[[], Awaitable[list[int]]]],
        params: list[SamplingParams],
        options: dict[str, Any],
    ) -> list[Completion]:
        """Runs all, at most as many at once as may wait; the first error cancels the rest."""
        most = max(1, self._engine.config.max_queue // max((p.n for p in params), default=1))
        gate = asyncio.Semaphore(most)

        async def answer(encode: Callable[[], Awaitable[list[int]]], params: SamplingParams) -> list[Completion]:
            async with gate:
                name = f"local-{next(self._serial)}"
                await self._engine.prepare(params)
                generation = self._engine.generate(name, await encode(), params, **options)
                return await collect(generation, params.n)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(*pair)) for pair in zip(encoders, params, strict=True)]
        return [completion for task in tasks for completion in task.result()]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the engine's loop and waits; an interrupt cancels it. RuntimeError once the engine is closed."""
        if not self._finish.alive:
            work.close()
            raise RuntimeError("the engine is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except BaseException:
            future.cancel()
            raise


# Every engine's thread that may be alive, and what begins its end.
_open: weakref.WeakKeyDictionary[threading.Thread, weakref.finalize[..., Engine]] = weakref.WeakKeyDictionary()


def _live(loop: asyncio.AbstractEventLoop) -> None:
    """An engine's thread."""
    loop.run_forever()
    loop.close()


def _begin_close(loop: asyncio.AbstractEventLoop, engine: AsyncEngine) -> Future[None]:
    """Has the loop close the engine and end; waits for nothing: the garbage collector may call it in any thread."""
    return asyncio.run_coroutine_threadsafe(_close(loop, engine), loop)


async def _close(loop: asyncio.AbstractEventLoop, engine: AsyncEngine) -> None:
    try:
        await engine.close()
        await loop.shutdown_default_executor()
    finally:
        loop.call_soon(loop.stop)


@atexit.register
def _close_all() -> None:
    """Closes what is open, so that native memory and files of the cache are let go before the interpreter is."""
    for finish in list(_open.values()):
        finish()
    until_s = time.monotonic() + EXIT_TIMEOUT_S
    for thread in list(_open):
        thread.join(max(0.0, until_s - time.monotonic()))


def _config(options: dict[str, Any]) -> EngineConfig:
    """EngineConfig of the options. Raises ConfigError for a name it does not have."""
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean `{nearest[0]}`?" if nearest else f": known are {', '.join(known)}"
            raise ConfigError(f"`{name}` is not an option of the engine{hint}", param=name)
    return EngineConfig(**options)


async def _next_or_none(generation: Generation) -> OutputDelta | None:
    return await anext(generation, None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise RequestError(f"`params` is a list of {len(params)} for {num} prompts: give one each, or one for all")
    return list(params)
