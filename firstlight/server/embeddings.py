"""POST /v1/embeddings: one vector per input, pooled from the hidden states of the loaded language model.

A decoder that was trained to continue text, not to embed it: good enough to group and to rank roughly, no match for a
model made for search. Knows the wire form and the engine's stream, not how states are pooled.
"""

from __future__ import annotations

import base64
import uuid
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from firstlight.engine.generation import Generation
from firstlight.errors import BackendError, FirstlightError, OverloadedError, RequestError, UnsupportedParameter
from firstlight.server.asgi import ClientGone, Exchange
from firstlight.server.fields import refuse_unknown
from firstlight.server.intake import Intake, as_prompts, convert
from firstlight.server.json_body import decode_object
from firstlight.server.quotas import Ticket
from firstlight.server.record import RequestRecord
from firstlight.server.service import Service
from firstlight.server.sse import ClientWatch
from firstlight.server.wire import Prompt
from firstlight.types import FinishReason, SamplingParams, Usage

__all__ = ["EMBEDDING_FIELDS", "EmbeddingRoutes"]

EMBEDDING_FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "pooling", "normalize"})
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
"""A prompt is computed by asking for its next token, which nobody sees."""


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body. `pooling` and `normalize` are extensions."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The checked request."""

    model: str
    prompts: list[Prompt]
    pooling: Literal["mean", "last"]
    normalize: bool
    is_base64: bool


class EmbeddingRoutes:
    """POST /v1/embeddings."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, exchange: Exchange) -> None:
        """POST /v1/embeddings: answers and records."""
        service = self._service
        salt = service.access.tenant_salt(exchange)
        service.require_ready()
        record = service.record(exchange, salt)
        record.answer_id = answer_id = f"embd-{uuid.uuid4().hex}"
        service.open_since_s[answer_id] = exchange.arrival_s
        outcome: str | None = "internal_error"
        config = service.config
        ticket: Ticket | None = None
        try:
            ticket = service.access.quota(salt).enter()
            raw = await exchange.read_body(service.max_body_bytes, config.read_timeout_s)
            record.stage("receive")
            request = await service.parsed(self._checked, raw)
            ticket.hold(len(request.prompts))
            watch = ClientWatch(exchange, None, config)
            async with watch:
                await self._answer(exchange, request, record, salt)
            outcome = None
        except ClientGone:
            exchange.status = 499
            outcome = "client_gone"
        except FirstlightError as error:
            outcome = error.code
            await exchange.respond_error(error)
        finally:
            del service.open_since_s[answer_id]
            record.close(exchange.status or 500, outcome)
            if ticket is not None:
                ticket.close(record.num_tokens)

    def _checked(self, raw: bytes) -> EmbeddingRequest:
        intake: Intake = self._service.intake
        members = decode_object(raw)
        refuse_unknown(members, EMBEDDING_FIELDS, "/v1/embeddings")
        body = convert(members, EmbeddingBody)
        model = intake.require_model(body.model)
        width = self._service.engine.info.backend.hidden_size
        if body.dimensions not in (None, width):
            raise UnsupportedParameter(
                f"`dimensions` is {body.dimensions}, this model's vectors have {width}: leave it out",
                param="dimensions",
            )
        return EmbeddingRequest(
            model=model,
            prompts=as_prompts(body.input, intake.max_prompts, "input"),
            pooling=body.pooling,
            normalize=body.normalize,
            is_base64=body.encoding_format == "base64",
        )

    async def _answer(self, exchange: Exchange, request: EmbeddingRequest, record: RequestRecord, salt: bytes) -> None:
        engine = self._service.engine
        prompts = []
        for at, prompt in enumerate(request.prompts):
            where = "input" if len(request.prompts) == 1 else f"input[{at}]"
            if isinstance(prompt, str) and len(prompt.encode()) > self._service.max_prompt_bytes:
                raise RequestError(
                    f"`{where}` is too long for the {engine.info.max_model_len} tokens that one request may have: "
                    "send shorter text",
                    param=where,
                )
            prompts.append(await engine.encode_prompt(prompt))
            if not prompts[-1]:
                raise RequestError(f"`{where}` has no tokens: send at least one", param=where)
        record.stage("tokenise")
        record.num_prompt = sum(len(ids) for ids in prompts)
        generations: list[Generation] = []
        try:
            for ids in prompts:
                generations.append(
                    engine.generate(record.answer_id, ids, _PARAMS, cache_salt=salt, pooling=request.pooling)
                )
                record.submitted(generations[-1])
            pooled = [await self._vector(generation, record) for generation in generations]
        except RequestError as error:
            raise RequestError(error.message.replace("`prompt`", "`input`"), param="input") from None
        finally:
            for generation in generations:
                await generation.aclose()
        vectors, cached = [vector for vector, _ in pooled], sum(num for _, num in pooled)
        record.usage = Usage(prompt_tokens=record.num_prompt, completion_tokens=0, cached_tokens=cached)
        await exchange.respond_json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": at, "embedding": _shown(vector, request)}
                    for at, vector in enumerate(vectors)
                ],
                "model": request.model,
                "usage": {"prompt_tokens": record.num_prompt, "total_tokens": record.num_prompt},
            }
        )

    async def _vector(self, generation: Generation, record: RequestRecord) -> tuple[npt.NDArray[np.float64], int]:
        """The pooled vector, and how many of its tokens came from the cache."""
        async for delta in generation:
            if delta.first_scheduled_s is not None:
                record.scheduled(delta.first_scheduled_s)
            if delta.finish is FinishReason.ABORT:
                raise OverloadedError("the server is shutting down: send it again", retry_after_s=5.0, status=503)
            if delta.finish is FinishReason.ERROR:
                raise BackendError(delta.error or "the engine failed")
            if delta.finish is not None:
                record.finished(0, delta.finish)
                return delta.embedding, delta.usage.cached_tokens if delta.usage else 0
        raise BackendError("the engine ended a request without its end")


def _shown(vector: npt.NDArray[np.float64], request: EmbeddingRequest) -> Any:
    """The vector as JSON has it: numbers, or base64 of little-endian float32."""
    norm = float(np.sqrt(np.sum(vector * vector)))
    if request.normalize and norm > 0:
        vector = vector / norm
    single = vector.astype("<f4")
    return base64.b64encode(single.tobytes()).decode() if request.is_base64 else single.tolist()
