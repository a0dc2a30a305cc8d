"""Answers, chunks and errors validate against OpenAI's published schemas (tests/data/openai_schemas.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.server.raw import events

SCHEMAS = Path(__file__).resolve().parents[1] / "data" / "openai_schemas.json"
Validators = dict[str, jsonschema.Draft202012Validator]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "seed": 1}
VARIANTS: list[dict[str, Any]] = [{}, {"n": 3}, {"ignore_eos": True}, {"stop": "e"}, {"timings": True}]


def _plain(schema: Any) -> Any:
    """OpenAPI's `nullable` as JSON Schema says it."""
    if isinstance(schema, list):
        return [_plain(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        name: _plain(member) for name, member in schema.items() if name not in ("nullable", "format", "discriminator")
    }
    if schema.get("nullable"):
        return {"anyOf": [plain, {"type": "null"}]}
    return plain


@pytest.fixture(scope="module")
def validators() -> Validators:
    """A validator per schema name."""
    raw = json.loads(SCHEMAS.read_text())
    components = {"components": {"schemas": _plain(raw["schemas"])}}
    return {
        name: jsonschema.Draft202012Validator({**components, "$ref": f"#/components/schemas/{name}"})
        for name in raw["schemas"]
    }


ECHO = {"echo": True, "logprobs": 2}
CALLS = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "null"}}}}}],
    "tool_choice": "required",
    "max_tokens": 200,
}
COMPLETION_VARIANTS = [*VARIANTS, {"logprobs": 0}, {"logprobs": 3, "n": 2}, {"echo": True}, ECHO]
COMPLETION_VARIANTS += [{**ECHO, "max_tokens": 0}]
CHAT_VARIANTS = [*VARIANTS, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4, "n": 2}, CALLS]
CHAT_VARIANTS += [{**CALLS, "logprobs": True, "n": 2}, {"response_format": {"type": "json_object"}}]


@pytest.mark.parametrize("variant", CHAT_VARIANTS)
def test_chat_answers_and_chunks_fit_the_schema(
    http: httpx.Client, validators: Validators, variant: dict[str, Any]
) -> None:
    whole = http.post("/v1/chat/completions", json={**CHAT, **variant}).json()
    validators["CreateChatCompletionResponse"].validate(whole)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(http.post("/v1/chat/completions", json={**CHAT, **variant, **options}).content)
    assert done == "[DONE]"
    for chunk in chunks:
        validators["CreateChatCompletionStreamResponse"].validate(chunk)


@pytest.mark.parametrize("variant", COMPLETION_VARIANTS)
def test_completion_answers_fit_the_schema(http: httpx.Client, validators: Validators, variant: dict[str, Any]) -> None:
    whole = http.post("/v1/completions", json={"prompt": "x", **variant}).json()
    validators["CreateCompletionResponse"].validate(whole)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(http.post("/v1/completions", json={"prompt": "x", **variant, **options}).content)
    assert done == "[DONE]"
    for chunk in chunks:
        assert chunk["usage"] is None or chunk["choices"] == []
        validators["CreateCompletionResponse"].validate({**chunk, "usage": whole["usage"]} | _finished(chunk))


def _finished(chunk: dict[str, Any]) -> dict[str, Any]:
    """The choices of a completions chunk with their end: the schema is that of whole answers."""
    return {"choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]}


@pytest.mark.parametrize("body", [{"input": "x"}, {"input": ["x", "y"]}, {"input": [[1, 2], [3]], "pooling": "last"}])
def test_embeddings_fit_the_schema(http: httpx.Client, validators: Validators, body: dict[str, Any]) -> None:
    validators["CreateEmbeddingResponse"].validate(http.post("/v1/embeddings", json=body).json())


def test_models_and_errors_fit_the_schema(http: httpx.Client, validators: Validators) -> None:
    validators["ListModelsResponse"].validate(http.get("/v1/models").json())
    validators["Model"].validate(http.get("/v1/models/fake").json())
    for body in ({}, {"prompt": 5}, {"prompt": "x", "model": "other"}, {"prompt": "x", "tools": [1]}):
        validators["ErrorResponse"].validate(http.post("/v1/completions", json=body).json())
