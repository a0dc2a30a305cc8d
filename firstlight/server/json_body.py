"""Strict JSON at the door: bytes to one object, or a RequestError that says what is wrong and where.

Refuses what lenient parsers let through: duplicate keys, NaN and infinities, lone surrogates, invalid UTF-8, numbers
that do not fit, nesting without end. Knows JSON, not the fields of any route.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

from firstlight.errors import RequestError

__all__ = ["decode_object"]

_MAX_NAME_CHARS = 64
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class InvalidJson(RequestError):
    """The body is not the JSON object that the route needs."""

    code = "invalid_json"


class _DuplicateKey(ValueError):
    """Two members of one object have the same name (args[0])."""


def decode_object(raw: bytes) -> dict[str, Any]:
    """The members of the body's JSON object that are not null: an explicit null is the same as an absent field.

    Raises:
        RequestError: the body is empty, not JSON by RFC 8259, not an object, or has a duplicate key.
    """
    if not raw:
        raise InvalidJson("the body is empty: send a JSON object")
    try:
        tree = msgspec.json.decode(raw)
        _refuse_duplicates(raw)
    except RecursionError:
        raise InvalidJson("the body is nested too deeply: a request needs fewer than 10 levels") from None
    except _DuplicateKey as error:
        name = str(error.args[0])[:_MAX_NAME_CHARS]
        raise InvalidJson(f"`{name}` is given twice in one object: send each field once", param=name) from None
    except ValueError as error:
        _name_the_fault(raw, error)
    if not isinstance(tree, dict):
        raise InvalidJson(f"the body is a JSON {_json_type(tree)}: send a JSON object")
    return {name: value for name, value in tree.items() if value is not None}


def _refuse_duplicates(raw: bytes) -> None:
    """msgspec keeps the last of two equal keys; only the pairs tell. Cost: about 10 us per KB of small members."""
    json.loads(raw, object_pairs_hook=_unique_pairs)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _DuplicateKey(name)
        names.add(name)


def _name_the_fault(raw: bytes, error: ValueError) -> NoReturn:
    """Raises with the top-level field that does not decode; where the object is broken, with the parser's words."""
    try:
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        members = {}
    for name, member in members.items():
        try:
            msgspec.json.decode(member)
        except (ValueError, RecursionError) as fault:
            name = name[:_MAX_NAME_CHARS]
            raise InvalidJson(f"`{name}` is not valid JSON: {_words(fault)}", param=name) from None
    _refuse_lone_surrogates(raw)
    raise InvalidJson(f"the body is not valid JSON: {_words(error)}") from None


def _refuse_lone_surrogates(raw: bytes) -> None:
    """Raises for half a UTF-16 pair in an escape, which only the lenient parser reads far enough to name."""
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        return
    for name, member in tree.items() if isinstance(tree, dict) else ():
        if _LONE_SURROGATE.search(json.dumps([name, member], ensure_ascii=False)):
            name = _LONE_SURROGATE.sub("\ufffd", name)[:_MAX_NAME_CHARS]
            raise InvalidJson(f"`{name}` has half of a surrogate pair (\\ud800 to \\udfff): send both", param=name)


def _words(error: Exception) -> str:
    return str(error).split(" - at ")[0]


def _json_type(value: object) -> str:
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
