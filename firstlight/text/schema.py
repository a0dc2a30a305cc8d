"""JSON schemas before they are compiled: size and depth, annotations that say nothing, the place of an error.

Knows the keywords that hold other schemas, not what the others mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from firstlight.errors import RequestError
from firstlight.types import GrammarSpec

__all__ = ["checked_schema", "place_of"]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
_STANDARD_FORMAT_NAMES = (
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex"
)
_STANDARD_FORMATS = frozenset(_STANDARD_FORMAT_NAMES.split())
"""Formats that JSON Schema defines. By its rules any other is an annotation that constrains nothing."""
_MAX_TRIES = 300
_MAX_SEARCH_S = 1.0


def checked_schema(spec: GrammarSpec, max_depth: int) -> Any:
    """The schema of a spec, without formats that nobody defines and keywords that constrain nothing.

    Raises:
        RequestError: not JSON, neither an object nor a boolean, or nested deeper than `max_depth`.
    """
    try:
        schema = msgspec.json.decode(spec.text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"`{spec.field}` is not JSON: {error}", param=spec.field) from None
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"`{spec.field}` must be a JSON Schema: an object, or a boolean", param=spec.field)
    depth = _depth(schema, max_depth)
    if depth > max_depth:
        raise RequestError(
            f"`{spec.field}` is nested more than {max_depth} levels deep, the limit of `max_grammar_depth`: flatten it",
            param=spec.field,
        )
    for _, part in _walk(schema):
        _drop_annotations(part)
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)  # options of the compiler are the server's
    return schema


def place_of(schema: Any, message: str, error_of: Callable[[Any], str | None]) -> tuple[str, str]:
    """(JSON pointer of the deepest subschema that gives the error by itself, what to say about it).

    Args:
        error_of: compiles a schema and gives its error; asked a few hundred times at most, for a second at most.
    """
    path, here, tries = "", schema, 0
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    give_up_s = time.monotonic() + _MAX_SEARCH_S
    is_deeper = True
    while is_deeper:
        is_deeper = False
        for step, part in _children(here):
            tries += 1
            if tries > _MAX_TRIES or time.monotonic() > give_up_s:
                break
            if isinstance(part, dict) and error_of({**shared, **part}) == message:
                path, here, is_deeper = path + step, part, True
                break
    return path, message


def _walk(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with its JSON pointer, outermost first."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        path, part = pending.pop()
        if isinstance(part, dict):
            yield path, part
            pending += [(path + step, child) for step, child in _children(part)]


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with their steps of a JSON pointer."""
    if not isinstance(schema, dict):
        return
    for name in _MAPS:
        if isinstance(members := schema.get(name), dict):
            yield from ((f"/{name}/{_escaped(key)}", child) for key, child in members.items())
    for name in _LISTS:
        if isinstance(items := schema.get(name), list):
            yield from ((f"/{name}/{at}", child) for at, child in enumerate(items))
    for name in _SINGLE:
        if isinstance(child := schema.get(name), dict):
            yield f"/{name}", child


def _drop_annotations(schema: dict[str, Any]) -> None:
    """Removes what constrains nothing but stops the compiler. Mutates: `schema`."""
    if isinstance(name := schema.get("format"), str) and name not in _STANDARD_FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        if schema.get(name) == {}:
            del schema[name]


def _depth(value: Any, limit: int) -> int:
    """Levels of objects and lists, counted to one above the limit."""
    level, depth = [value], 0
    while depth <= limit and (level := [part for part in level if isinstance(part, (dict, list))]):
        depth += 1
        level = [child for part in level for child in (part.values() if isinstance(part, dict) else part)]
    return depth


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
