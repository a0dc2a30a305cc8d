"""The engine as the rest of the process sees it: text in, decoded deltas out, on one asyncio loop.

Knows text, streams and aborts; knows no blocks and no steps. One wake-up of the loop per step carries all its events.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from firstlight.backend.base import Backend, BackendInfo
from firstlight.config import EngineConfig
from firstlight.engine.core import CoreStats, EngineCore
from firstlight.engine.declared import declared_prefixes, prefix_requests
from firstlight.engine.generation import Choice, Generation, Mailbox
from firstlight.engine.grammars import Grammars
from firstlight.engine.load import EngineParts, load_parts
from firstlight.engine.relay import LoopRelay
from firstlight.engine.supervisor import Supervisor, Watched
from firstlight.engine.workers import SizeOrderedPool
from firstlight.errors import BackendError, OverloadedError, RequestError
from firstlight.measure.causes import StepRecord
from firstlight.scheduler import Drafter
from firstlight.text.params import check
from firstlight.text.pipeline import TextPipeline
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer
from firstlight.types import CoreRequest, Pin, SamplingParams, TokenEvent

__all__ = ["AsyncEngine", "EngineInfo"]

NUM_TEXT_THREADS = 2
LARGE_TEXT_CHARS = 2000
"""Longer text is tokenised in a worker thread (about a millisecond), so that the loop keeps its streams going."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is being served. `max_model_len` is what one request can reach: context and KV memory both bound it."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    has_chat_template: bool
    backend: BackendInfo


class AsyncEngine:
    """Loads a model, owns the core's thread, and turns requests into streams of `OutputDelta`.

    Every method is called on the loop that ran `start`, except `stats`, `ready`, `failed` and `info` (any thread).

    Args:
        load: builds the parts from the configuration; called in a worker thread.
        drafter: proposes draft tokens; none by default.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        load: Callable[[EngineConfig], EngineParts] = load_parts,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self._load = load
        self._drafter = drafter
        self._parts: EngineParts | None = None
        self._core: EngineCore | None = None
        self._relay: LoopRelay | None = None
        self._grammars: Grammars | None = None
        self._supervisor: Supervisor | None = None
        self._workers = SizeOrderedPool(NUM_TEXT_THREADS, "firstlight-text")
        self._is_closing = False
        self._choices: dict[str, Choice] = {}
        self._serial = itertools.count(1)
        self._random = random.Random(config.seed)

    @classmethod
    def from_parts(
        cls,
        backend: Backend,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        config: EngineConfig,
        model_name: str,
    ) -> AsyncEngine:
        """An engine over parts that are already loaded (tests, the command line). `chat_template` may be None."""
        parts = EngineParts(backend=backend, tokenizer=tokenizer, chat_template=chat_template, model_name=model_name)
        return cls(config, load=lambda config: parts)

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads in a worker thread, starts the core and runs the warm-up.

        Raises:
            ConfigError: an option or the model cannot be used.
            BackendError: the warm-up failed.
        """
        assert self._parts is None, "started twice"
        self._parts = await asyncio.to_thread(self._load, self.config)
        self._relay = LoopRelay(asyncio.get_running_loop(), self._deliver)
        self._grammars = Grammars(self._parts.tokenizer, self._parts.backend.info.vocab_size, self.config)
        try:
            self._core = await self._started_core(self._parts)
        except BaseException:
            self._relay.close()
            raise
        config = self.config
        self._supervisor = Supervisor(
            self._core, self._replaced, watchdog_s=config.watchdog_s, max_restarts=config.max_restarts
        )

    async def _started_core(self, parts: EngineParts) -> EngineCore:
        """A warm core over `parts`. Raises BackendError when a warm-up step fails."""
        assert self._relay is not None
        assert self._grammars is not None
        declared = await asyncio.to_thread(
            declared_prefixes, self.config.shared_prefix, parts.tokenizer, parts.chat_template
        )
        core = EngineCore(
            parts.backend,
            self.config,
            self._relay.put,
            drafter=self._drafter,
            grammars=self._grammars.compiler,
            declared=[one.token_ids for one in declared],
        )
        try:
            await asyncio.to_thread(core.start)
            core.submit(
                prefix_requests(
                    declared,
                    block_size=parts.backend.info.block_size,
                    max_pinned=core.max_pinned,
                    max_tokens=core.max_model_len,
                )
            )
        except BaseException:
            core.stop()
            raise
        return core

    async def _replaced(self, failed: Watched) -> EngineCore:
        """Frees the failed core's memory, loads again and goes on with a new one. Raises what loading raises."""
        assert failed is self._core
        await asyncio.to_thread(self._core.stop)
        parts = await asyncio.to_thread(self._load, self.config)
        core = await self._started_core(parts)
        self._parts, self._core = parts, core
        return core

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets open ones run `drain_s`, aborts the rest, frees the backend. Idempotent."""
        self._is_closing = True
        self._workers.close()
        if self._supervisor is not None:
            await self._supervisor.close()
        if self._core is None:
            return
        if drain_s > 0 and not self._core.failed:
            await asyncio.wait({asyncio.wrap_future(self._core.drain())}, timeout=drain_s)
        try:
            await asyncio.to_thread(self._core.stop)
        except RuntimeError:  # while the interpreter ends no pool takes work
            self._core.stop()
        if self._relay is not None:
            self._relay.close()
        if self._grammars is not None:
            self._grammars.close()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        """Warm-up has passed, nothing has failed, and it is not closing."""
        return self._core is not None and self._core.is_running and not self._is_closing and self.failed is None

    @property
    def failed(self) -> str | None:
        """Why the core cannot serve any more; None while it can."""
        return self._core.failed if self._core is not None else None

    @property
    def is_restarting(self) -> bool:
        """The core has failed and is being replaced."""
        return self.failed is not None and self._supervisor is not None and self._supervisor.will_restart

    @property
    def num_restarts(self) -> int:
        """Cores replaced since the start."""
        return self._supervisor.num_restarts if self._supervisor is not None else 0

    @property
    def info(self) -> EngineInfo:
        """What is served; valid after `start`."""
        parts, core = self._started()
        return EngineInfo(
            model=parts.model_name,
            max_model_len=core.max_model_len,
            vocab_size=parts.backend.info.vocab_size,
            eos_ids=frozenset(parts.tokenizer.eos_ids),
            has_chat_template=parts.chat_template is not None,
            backend=parts.backend.info,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; valid after `start`."""
        return self._started()[0].tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one; valid after `start`."""
        return self._started()[0].chat_template

    def stats(self) -> CoreStats:
        """Counters and gauges as of now."""
        return self._started()[1].stats()

    def step_records(self) -> list[StepRecord]:
        """The most recent steps, oldest first."""
        return list(self._started()[1].traces.steps)

    def block_owners(self) -> bytes:
        """One byte per KV block: 0 free, 1 free but cached, 2 held by requests, 3 pinned. A glance, not a snapshot."""
        return self._started()[1].block_owners()

    def trace_ops(self, on: bool) -> None:
        """Counts one more, or one less, who wants the time of each kind of op in `step_records`."""
        self._started()[1].trace_ops(on)

    async def check(self) -> None:
        """Audits every block, table and queue between two steps. Raises AssertionError saying what is broken."""
        await asyncio.wrap_future(self._started()[1].check())

    # -- text to ids ----------------------------------------------------------------------------------------------

    async def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a plain prompt: BOS where the model wants one; text that spells a special token stays text.

        A list of ids is taken as it is (`generate` checks it).
        """
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self.tokenizer
        if len(prompt) > LARGE_TEXT_CHARS:
            return await self._workers.run(len(prompt), lambda: tokenizer.encode(prompt, add_special=True))
        return tokenizer.encode(prompt, add_special=True)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        stage: Callable[[str], None] | None = None,
        **template_args: Any,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template.

        Args:
            stage: told "template" when the text is rendered; from another thread where the text is long.

        Raises:
            RequestError: the model has no chat template, or it or we refuse the messages.
        """
        template, tokenizer = self._started()[0].chat_template, self.tokenizer
        if template is None:
            raise RequestError("`messages`: this model has no chat template: use /v1/completions", param="messages")

        def encode() -> list[int]:
            rendered = template.render(messages, tools=tools, **template_args)
            if stage is not None:
                stage("template")
            return tokenizer.encode_rendered(rendered)

        size = sum(len(str(message.get("content", ""))) for message in messages if isinstance(message, dict))
        return await self._workers.run(size, encode) if tools or size > LARGE_TEXT_CHARS else encode()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.tokenizer.decode(ids)

    async def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar of `params`, if it has one, on a thread; `generate` then starts at once.

        Raises:
            RequestError: the grammar is not valid, not supported, or over a limit; names the place.
            OverloadedError: too many grammars wait for compilation.
        """
        if params.grammar is not None:
            self._started()
            assert self._grammars is not None
            await self._grammars.prepare(params.grammar)

    # -- generate -------------------------------------------------------------------------------------------------

    def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        tenant: bytes = b"",
        route: str = "",
        cache_salt: bytes = b"",
        return_logits: bool = False,
        forced_ids: Sequence[int] = (),
        shown_marks: Sequence[str] = (),
        prompt_logprobs: int | None = None,
        pooling: Literal["mean", "last"] | None = None,
        pins: Sequence[Pin] = (),
    ) -> Generation:
        """Submits at once and returns the stream of deltas.

        Args:
            priority: smaller goes first: -1 interactive (a tighter promise on gaps too), 0 standard, 1 batch.
            deadline_s: seconds from now by which it must have been admitted; else it ends with finish "error" and
                error code "deadline_exceeded".
            tenant: who is served: active tenants get alike.
            route: a name for the kind of request; output lengths are learned per tenant and route.
            cache_salt: requests share cached prefixes only under an equal salt.
            forced_ids: output ids to take in place of sampled ones.
            shown_marks: special tokens, by their spelling, that stay in the text (marks of tool calls, say).
            prompt_logprobs: each choice's first delta carries the log-probabilities of the prompt's tokens from its
                second on, with so many rivals each; the whole prompt is computed, without the prefix cache.
            pooling: the finishing delta carries the prompt's hidden states, pooled.
            pins: leading tokens of the prompt to keep in the prefix cache, and how long.

        Raises:
            RequestError: at the call: the prompt is empty or too long, an id or a parameter is out of range, the
                grammar cannot be used (one that was not `prepare`d is compiled here, in milliseconds).
            OverloadedError: at the call: `max_queue` requests wait already, or the engine is closing (status 503).
            BackendError: at the call: the core has failed. (A failure later is a delta with finish "error".)
        """
        parts, core = self._started()
        if self._is_closing:
            raise OverloadedError("the engine is shutting down", retry_after_s=5.0, status=503)
        if self.is_restarting:
            raise OverloadedError("the engine has failed and restarts: try again", retry_after_s=2.0, status=503)
        check(params, parts.backend.info.vocab_size)
        if pooling is not None and not parts.backend.info.hidden_size:
            raise RequestError("this backend gives no hidden states, so no embeddings", param="input")
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        stop_ids = frozenset(params.stop_token_ids)
        if params.grammar is not None:
            assert self._grammars is not None
            self._grammars.compiler.compile(params.grammar)
        if params.grammar is not None or not params.ignore_eos:
            stop_ids |= parts.tokenizer.eos_ids
        max_tokens = params.max_tokens if params.max_tokens is not None else core.max_model_len
        shown = frozenset(i for mark in shown_marks if (i := parts.tokenizer.token_to_id(mark)) is not None)
        arrival_s = time.monotonic()
        mailbox = Mailbox()
        choices, requests = [], []
        for i in range(params.n):
            core_id = f"{request_id}#{next(self._serial)}"
            pipeline = TextPipeline(
                parts.tokenizer,
                params.stop,
                include_stop=params.include_stop_str_in_output,
                shown=shown,
                is_continuation=True,
            )
            choices.append(Choice(i, core_id, params, pipeline, len(prompt_ids), mailbox))
            requests.append(
                CoreRequest(
                    request_id=core_id,
                    prompt_ids=prompt_ids,
                    params=params,
                    seed=_choice_seed(seed, i),
                    max_tokens=max_tokens,
                    stop_ids=stop_ids,
                    arrival_s=arrival_s,
                    priority=priority,
                    deadline_s=None if deadline_s is None else arrival_s + deadline_s,
                    tenant=tenant,
                    route=route,
                    cache_salt=cache_salt,
                    return_logits=return_logits,
                    forced_ids=tuple(forced_ids),
                    prompt_logprobs=prompt_logprobs,
                    pooling=pooling,
                    pins=tuple(pins),
                )
            )
        traces = [core.traces.open(request.request_id, len(prompt_ids), arrival_s) for request in requests]
        try:
            core.submit(requests)
        except BaseException:
            for trace in traces:
                core.traces.forget(trace.core_id)
            raise
        self._choices.update((choice.core_id, choice) for choice in choices)
        return Generation(request_id, choices, mailbox, self._abort, traces)

    def _abort(self, choices: Sequence[Choice]) -> None:
        """Any thread."""
        ids = [choice.core_id for choice in choices]
        for core_id in ids:
            self._choices.pop(core_id, None)
        if self._core is not None:
            self._core.abort(ids)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Hands each event to its choice, first ones first; a stop string found on the way ends it in the core too."""
        stopped = []
        for event in sorted(events, key=_is_later):
            choice = self._choices.get(event.request_id)
            if choice is None:
                continue
            if choice.deliver(event):
                stopped.append(choice)
            elif choice.has_ended:
                del self._choices[event.request_id]
        if stopped:
            self._abort(stopped)

    def _started(self) -> tuple[EngineParts, EngineCore]:
        if self._parts is None or self._core is None:
            raise BackendError("the engine is not started")
        return self._parts, self._core


def _is_later(event: TokenEvent) -> bool:
    """Not the first of its request: a first token is waited for the hardest, so it does not wait for others' text."""
    return event.first_scheduled_s is None


def _choice_seed(seed: int, index: int) -> int:
    """The seed itself for the first choice, independent ones for the others. Inside 0..2^64 - 1."""
    seed &= 2**64 - 1
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
