"""The OpenAPI document of the routes that take part in the API, made from the types that check the bodies.

Knows the types and the routes' names, not what they do.
"""

from __future__ import annotations

from typing import Any

import msgspec

from firstlight.server.embeddings import EmbeddingBody
from firstlight.server.wire import CancelBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

__all__ = ["openapi_document"]

_REF = "#/components/schemas/{name}"
_BODIES: dict[str, tuple[type[msgspec.Struct], str, bool]] = {
    "/v1/chat/completions": (ChatBody, "The model's next message of a conversation.", True),
    "/v1/completions": (CompletionBody, "Text that goes on with a prompt.", True),
    "/v1/embeddings": (EmbeddingBody, "One vector per input.", False),
    "/v1/cancel": (CancelBody, "Ends an open request by its answer's id or its X-Request-Id.", False),
    "/tokenize": (TokenizeBody, "Token ids of a text.", False),
    "/detokenize": (DetokenizeBody, "The text of token ids.", False),
}
_PLAIN = {
    "/v1/models": "The models that are served.",
    "/health": "The process is alive.",
    "/ready": "Requests are taken and make progress.",
    "/version": "The package's version.",
}
_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "continues a stream after this event, where the server keeps streams (`--resume-s`)",
    "schema": {"type": "string", "pattern": "^[!-~]+/[0-9]{1,15}$"},
}
_STATUSES = {
    "400": "a field is wrong; the error names it",
    "401": "the API key is missing or wrong",
    "404": "no such model, open request or stream",
    "408": "the body came too slowly, or the request's own `timeout` has passed",
    "409": "the request was cancelled, or its stream is read by another connection",
    "413": "the body is too large",
    "429": "try again after `Retry-After` seconds",
    "500": "the server failed",
    "503": "the model loads, the server restarts its engine or shuts down",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(version: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    types = [body for body, _, _ in _BODIES.values()]
    references, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, Any] = {}
    for (path, (_, summary, streams)), reference in zip(_BODIES.items(), references, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": path.strip("/").replace("/", "_"),
                "parameters": [_LAST_EVENT_ID] if streams else [],
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": _responses(content),
            }
        }
    for path, summary in _PLAIN.items():
        content = {"application/json": {"schema": {"type": "object"}}}
        name = path.strip("/").replace("/", "_")
        paths[path] = {"get": {"summary": summary, "operationId": name, "responses": _responses(content)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "firstlight", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    failed = {status: {"description": text, "content": error} for status, text in _STATUSES.items()}
    return {"200": {"description": "the answer", "content": content}, **failed}
