"""A checked request answered: ids, generations, pieces, and one of two renderings of them.

The same pieces feed a stream and a whole answer. Knows the engine's deltas and the answer forms, not how they are made.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from firstlight.config import ServerConfig
from firstlight.engine.generation import Generation
from firstlight.errors import BackendError, DeadlineError, FirstlightError, OverloadedError, RequestError
from firstlight.server.asgi import Exchange
from firstlight.server.echo import Echo
from firstlight.server.merge import merged_batches
from firstlight.server.pace import Pacing, paced
from firstlight.server.pieces import Piece
from firstlight.server.pins import common_tokens
from firstlight.server.record import RequestRecord, cache_facts
from firstlight.server.render import AnswerForm, ChatForm, ChoiceTotal, CompletionForm, total_usage
from firstlight.server.service import Service
from firstlight.server.sse import EventSink
from firstlight.server.wire import GenerationRequest
from firstlight.text.params import check
from firstlight.text.tool_parsers import AnswerParser
from firstlight.types import FinishReason, OutputDelta, Pin, TokenLogprob, Usage

__all__ = ["Answer"]

_SHUTDOWN_RETRY_S = 5.0


class Answer:
    """One answer being made. Written by the task that serves its exchange.

    Args:
        cache_salt: keeps this client's prefix-cache entries apart from other tenants'.
    """

    def __init__(
        self, service: Service, request: GenerationRequest, record: RequestRecord, answer_id: str, cache_salt: bytes
    ) -> None:
        self._engine = service.engine
        self._dialect = service.dialect
        self._params = request.params
        self._parsers: list[AnswerParser] = []
        self._max_prompt_bytes = service.max_prompt_bytes
        self._pacing = _pacing(service.config, request)
        self._request = request
        self._record = record
        self._answer_id = answer_id
        self._cache_salt = cache_salt
        self._usages: dict[int, Usage] = {}
        self._pins: list[Pin] = []

    @property
    def timeout_s(self) -> float | None:
        """How long the request may take in all, as its client said."""
        return self._request.timeout_s

    async def respond(self, exchange: Exchange, stream: EventSink | None) -> None:
        """Answers the exchange, through `stream` where there is one.

        Raises:
            RequestError, OverloadedError: before anything was sent.
            BackendError, OverloadedError: the engine failed or is closing; a stream may have started.
        """
        check(self._request.params, self._engine.info.vocab_size)
        prompts = await self._encode()
        self._record.stage("tokenise")
        if self._request.is_chat:
            self._params = await self._dialect.constrained(self._request.params, self._request.tools, prompts[0])
        await self._engine.prepare(self._params)
        self._record.stage("grammar")
        self._record.num_prompt = sum(len(ids) for ids in prompts)
        generations = await self._submit(prompts)
        form = self._form(prompts)
        if stream is not None:
            await self._send_stream(generations, form, stream)
        else:
            await self._send_whole(generations, form, exchange)

    async def _encode(self) -> list[list[int]]:
        request = self._request
        self._refuse_hopeless("messages", sum(len(message["content"].encode()) for message in request.messages))
        self._refuse_hopeless("tools", request.tools.num_bytes if request.tools is not None else 0)
        for prompt in request.prompts:
            self._refuse_hopeless("prompt", len(prompt.encode()) if isinstance(prompt, str) else 0)
        if request.is_chat:
            messages, tools = self._dialect.prompt(request.messages, request.tools)
            ids = await self._engine.encode_chat(
                messages, tools, stage=self._record.stage, continue_final_message=request.is_continuation
            )
            self._pins = await self._pinned(ids, tools)
            parsers = [self._dialect.parser(request.tools, ids) for _ in range(request.params.n)]
            self._parsers = [parser for parser in parsers if parser is not None]
            return [ids]
        return [await self._engine.encode_prompt(prompt) for prompt in request.prompts]

    async def _pinned(self, ids: list[int], tools: list[dict[str, Any]] | None) -> list[Pin]:
        """The request's pins in tokens of the prompt `ids`. Raises RequestError where nothing is cached at all."""
        pins = self._request.pins
        if pins and not self._engine.config.prefix_cache:
            where = f"messages[{pins[0].message}].cache_control"
            raise RequestError(f"`{where}`: the prefix cache is off here: leave it out", param=where)
        found = []
        for pin in pins:
            kept = self._request.messages[: pin.message + 1]
            if kept[-1]["role"] == "system":  # some templates refuse a conversation without a user
                kept = [*kept, {"role": "user", "content": ""}]
            messages, _ = self._dialect.prompt(kept, self._request.tools)
            until = await self._engine.encode_chat(messages, tools, add_generation_prompt=False)
            found.append(Pin(num_tokens=common_tokens(ids, until), ttl_s=pin.ttl_s))
        return found

    def _refuse_hopeless(self, name: str, num_bytes: int) -> None:
        """Raises RequestError for text that could not fit the context if every token were the longest there is."""
        if num_bytes > self._max_prompt_bytes:
            limit = self._engine.info.max_model_len
            raise RequestError(
                f"`{name}` is {num_bytes} bytes of text, more than {limit} tokens can hold: send a shorter prompt",
                param=name,
            )

    async def _submit(self, prompts: Sequence[list[int]]) -> list[Generation]:
        """One generation per prompt; none goes on if one is refused."""
        generations: list[Generation] = []
        params, options = self._params, self._urgency()
        options["prompt_logprobs"] = params.logprobs if self._request.echo else None
        marks = self._dialect.marks(self._request.tools) if self._parsers else ()
        try:
            for at, ids in enumerate(prompts):
                name = f"{self._answer_id}-{at}" if len(prompts) > 1 else self._answer_id
                generations.append(
                    self._engine.generate(name, ids, params, shown_marks=marks, pins=self._pins, **options)
                )
                self._record.submitted(generations[-1])
        except BaseException as error:
            for generation in generations:
                await generation.aclose()
            if isinstance(error, RequestError) and error.param == "prompt" and self._request.is_chat:
                raise RequestError(error.message, param="messages") from None
            raise
        return generations

    def _urgency(self) -> dict[str, Any]:
        """Whose request it is, of what kind, and how soon it is wanted, as `generate` takes it."""
        deadline_ms = self._request.deadline_ms
        return {
            "priority": self._request.priority,
            "deadline_s": None if deadline_ms is None else deadline_ms / 1e3,
            "tenant": self._cache_salt,
            "route": "chat" if self._request.is_chat else "completions",
            "cache_salt": self._cache_salt,
        }

    def _form(self, prompts: Sequence[list[int]]) -> AnswerForm:
        request, info, tokenizer = self._request, self._engine.info, self._engine.tokenizer
        fingerprint = "fp_" + info.backend.fingerprint.hex()[:12]
        args = (self._answer_id, int(time.time()), request.model, fingerprint, tokenizer.id_to_bytes)
        has_logprobs = request.params.logprobs is not None
        form: ChatForm | CompletionForm
        if request.is_chat:
            form = ChatForm(*args, has_logprobs=has_logprobs)
        else:
            form = CompletionForm(*args, has_logprobs=has_logprobs, echoes=self._echoes(prompts))
        form.includes_usage = request.include_usage
        return form

    def _echoes(self, prompts: Sequence[list[int]]) -> list[Echo]:
        """The prompt per choice, as the client wrote it or, for ids, decoded."""
        if not self._request.echo:
            return []
        is_special = self._engine.tokenizer.is_special
        echoes = [
            Echo(
                prompt if isinstance(prompt, str) else self._engine.decode(ids),
                [(token_id, is_special(token_id)) for token_id in ids]
                if self._request.params.logprobs is not None
                else [],
            )
            for prompt, ids in zip(self._request.prompts, prompts, strict=True)
        ]
        return [echo for echo in echoes for _ in range(self._request.params.n)]

    async def _pieces(self, generations: Sequence[Generation]) -> AsyncGenerator[list[Piece]]:
        """All that is waiting at a time, until every choice has ended. Raises where a choice does not end by itself."""
        if len(generations) == 1 and self._request.params.n == 1:
            async with aclosing(generations[0]) as only:
                async for delta in only:
                    yield [self._piece(0, delta)]
            return
        async with aclosing(merged_batches(generations, self._request.params.n)) as batches:
            async for batch in batches:
                yield [self._piece(choice, delta) for choice, delta in batch]

    def _piece(self, choice: int, delta: OutputDelta) -> Piece:
        if delta.first_scheduled_s is not None:
            self._record.scheduled(delta.first_scheduled_s)
        if delta.finish in (FinishReason.ABORT, FinishReason.ERROR):
            raise self._failure(delta)
        if self._request.is_prompt_only:
            return self._prompt_piece(choice, delta)
        if delta.finish is not None:
            self._record.finished(choice, delta.finish)
        if delta.usage is not None:
            self._usages[choice] = delta.usage
        logprobs, num_tokens = self._shown_logprobs(delta), len(delta.token_ids)
        if not self._parsers:
            prompt_logprobs = delta.prompt_logprobs
            return Piece(choice, delta.text, logprobs, num_tokens, delta.finish, prompt_logprobs=prompt_logprobs)
        parser = self._parsers[choice]
        parts = parser.push(delta.text)
        if delta.finish is not None:
            parts += parser.finish()
        return Piece(choice, delta.text, logprobs, num_tokens, delta.finish, parts, parser.num_calls > 0)

    def _prompt_piece(self, choice: int, delta: OutputDelta) -> Piece:
        """What is shown of a choice that says nothing: its one token is left out."""
        self._record.finished(choice, FinishReason.LENGTH)
        if delta.usage is not None:
            self._usages[choice] = msgspec.structs.replace(delta.usage, completion_tokens=0)
        return Piece(choice, "", None, 0, FinishReason.LENGTH, prompt_logprobs=delta.prompt_logprobs)

    def _failure(self, delta: OutputDelta) -> FirstlightError:
        """Why a choice did not end by itself. Only a closing engine aborts what its client still waits for."""
        if delta.finish is FinishReason.ABORT:
            return OverloadedError(
                "the server is shutting down: send the request again", retry_after_s=_SHUTDOWN_RETRY_S, status=503
            )
        if delta.error_code == DeadlineError.code:
            return DeadlineError(delta.error or "the deadline has passed", param="deadline_ms")
        message, grammar = delta.error or "the engine failed", self._params.grammar
        if delta.error_code == RequestError.code and grammar is not None:
            return RequestError(f"`{grammar.field}` cannot be used: {message}", param=grammar.field)
        return BackendError(message)

    def _shown_logprobs(self, delta: OutputDelta) -> list[TokenLogprob] | None:
        """Logprobs of the tokens that are text: the token that ended the answer is counted, but not shown."""
        ended_by_id = delta.finish is FinishReason.STOP and not isinstance(delta.stop_reason, str)
        if delta.logprobs and ended_by_id and not self._request.params.include_stop_str_in_output:
            return delta.logprobs[:-1]
        return delta.logprobs

    async def _send_stream(self, generations: Sequence[Generation], form: AnswerForm, stream: EventSink) -> None:
        opened: set[int] = set()
        async with aclosing(paced(self._pieces(generations), self._pacing)) as batches:
            async for pieces in batches:
                frames = []
                for piece in pieces:
                    if piece.choice not in opened:
                        opened.add(piece.choice)
                        frames.append(form.opening(piece.choice, piece.prompt_logprobs))
                    frames.append(self._frames(form, piece))
                self._record.ready()
                if any(frames):
                    await stream.write(b"".join(frames))
                for piece in pieces:
                    self._record.tokens(piece.choice, piece.num_tokens)
        usage = self._total_usage()
        await stream.write(form.last(usage if self._request.include_usage else None, self._timings()), is_last=True)

    @staticmethod
    def _frames(form: AnswerForm, piece: Piece) -> bytes:
        if piece.parts is None or not isinstance(form, ChatForm):
            return form.piece(piece.choice, piece.text, piece.logprobs, piece.finish)
        return form.parts(piece.choice, piece.parts, piece.logprobs, piece.finish, has_calls=piece.has_calls)

    async def _send_whole(self, generations: Sequence[Generation], form: AnswerForm, exchange: Exchange) -> None:
        totals = [ChoiceTotal() for _ in range(self._request.num_choices)]
        async with aclosing(self._pieces(generations)) as batches:
            async for pieces in batches:
                for piece in pieces:
                    self._record.ready()
                    totals[piece.choice].add(piece.text, piece.logprobs, piece.finish, piece.parts)
                    totals[piece.choice].prompt_logprobs += piece.prompt_logprobs or ()
                    self._record.tokens(piece.choice, piece.num_tokens)
        await exchange.respond(200, form.whole(totals, self._total_usage(), self._timings()))

    def _total_usage(self) -> Usage:
        self._record.usage = total_usage(self._usages, self._request.num_choices, self._request.params.n)
        return self._record.usage

    def _timings(self) -> dict[str, float | str] | None:
        """The `timings` extension, after `_total_usage`."""
        if not self._request.timings:
            return None
        return {**self._record.timings(), **cache_facts(self._record.usage)}


def _pacing(config: ServerConfig, request: GenerationRequest) -> Pacing:
    pace_ms = config.pace_ms if request.pace_ms is None else request.pace_ms
    return Pacing(config.stream_interval, config.coalesce_ms / 1e3, pace_ms / 1e3)
