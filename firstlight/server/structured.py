"""The grammar a body asks for, from any of the fields that ask for one. Knows the wire forms, not how grammars work.

`response_format` is OpenAI's. `structured_outputs` and its older spelling `guided_*` are the extensions of other
servers: `json`, `regex`, `choice`, `grammar` (Lark or GBNF), `json_object`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from firstlight.errors import RequestError, UnsupportedParameter
from firstlight.server.fields import unknown_name
from firstlight.server.wire import SharedBody
from firstlight.types import GrammarSpec

__all__ = ["answer_grammar"]

_ANY_OBJECT = '{"type":"object"}'
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})
_MAX_CHOICES = 1024


def answer_grammar(body: SharedBody) -> GrammarSpec | None:
    """What the answer must look like; None when it is free.

    Raises:
        RequestError: a field has a wrong form, or several fields ask for a grammar.
    """
    specs = [spec for spec in (_response_format(body.response_format), *_extensions(body)) if spec is not None]
    if len(specs) > 1:
        raise RequestError(
            f"`{specs[0].field}` and `{specs[1].field}` both say what the answer looks like: send one of them",
            param=specs[1].field,
        )
    return specs[0] if specs else None


def _response_format(form: dict[str, Any] | None) -> GrammarSpec | None:
    if form is None:
        return None
    kind = form.get("type")
    if kind not in _FORMATS:
        raise RequestError(
            f"`response_format.type` is {kind!r:.64}: it is one of {', '.join(_FORMATS)}", param="response_format.type"
        )
    for name in form.keys() - {"type", *(("json_schema",) if kind == "json_schema" else ())}:
        raise unknown_name(name, {"type", "json_schema"}, "a field of `response_format`", f"response_format.{name:.64}")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec(kind="json_schema", text=_ANY_OBJECT, field="response_format")
    return _schema_format(form.get("json_schema"))


def _schema_format(form: Any) -> GrammarSpec:
    """`response_format.json_schema`. The schema holds whatever `strict` says: an answer is never only nearly right."""
    where = "response_format.json_schema"
    if not isinstance(form, dict):
        raise RequestError(f"`{where}` is required: an object with `name` and `schema`", param=where)
    for name in form.keys() - _SCHEMA_FIELDS:
        raise unknown_name(name, _SCHEMA_FIELDS, f"a field of `{where}`", f"{where}.{name:.64}")
    if not isinstance(form.get("name"), str) or not form["name"]:
        raise RequestError(f"`{where}.name` is required: a string", param=f"{where}.name")
    for name, types in (("strict", (bool, type(None))), ("description", (str, type(None)))):
        if not isinstance(form.get(name), types):
            raise RequestError(f"`{where}.{name}` has the wrong type", param=f"{where}.{name}")
    if not isinstance(form.get("schema"), dict):
        raise RequestError(f"`{where}.schema` is required: a JSON Schema", param=f"{where}.schema")
    return _json(form["schema"], f"{where}.schema")


def _extensions(body: SharedBody) -> list[GrammarSpec | None]:
    specs: list[GrammarSpec | None] = []
    for name, value in (body.structured_outputs or {}).items():
        field = f"structured_outputs.{name:.64}"
        if name not in _MAKERS:
            raise unknown_name(name, _MAKERS, "a field of `structured_outputs`", field)
        specs.append(None if value is None else _MAKERS[name](value, field))
    if body.structured_outputs is not None and not any(specs):
        kinds = ", ".join(_MAKERS)
        raise RequestError(f"`structured_outputs` is empty: give one of {kinds}", param="structured_outputs")
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        specs.append(None if value is None else _MAKERS[name](value, f"guided_{name}"))
    return specs


def _json(value: Any, field: str) -> GrammarSpec:
    if not isinstance(value, (dict, str, bool)):
        raise RequestError(f"`{field}` must be a JSON Schema, as an object or as text", param=field)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return GrammarSpec(kind="json_schema", text=text, field=field)


def _json_object(value: Any, field: str) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise RequestError(f"`{field}` must be true or false", param=field)
    return GrammarSpec(kind="json_schema", text=_ANY_OBJECT, field=field) if value else None


def _regex(value: Any, field: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=_filled_text(value, field), field=field)


def _grammar(value: Any, field: str) -> GrammarSpec:
    return GrammarSpec(kind="grammar", text=_filled_text(value, field), field=field)


def _choice(value: Any, field: str) -> GrammarSpec:
    is_list = isinstance(value, list) and 0 < len(value) <= _MAX_CHOICES
    if not is_list or not all(isinstance(item, str) and item for item in value):
        raise RequestError(f"`{field}` must be a list of 1 to {_MAX_CHOICES} strings that are not empty", param=field)
    lines = " | ".join(json.dumps(item, ensure_ascii=False) for item in value)
    return GrammarSpec(kind="grammar", text=f"start: {lines}", field=field)


def _filled_text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise UnsupportedParameter(f"`{field}` must be text that is not empty", param=field)
    return value


_MAKERS: dict[str, Callable[[Any, str], GrammarSpec | None]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
