"""`cache_control` of messages: which part of a conversation's KV the client asks to keep, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firstlight.errors import RequestError
from firstlight.server.wire import MessagePin

__all__ = ["checked_pin", "common_tokens"]


def checked_pin(kind: str, ttl_s: float, at: int, max_pin_s: float) -> MessagePin:
    """The pin of message `at`. Raises RequestError for a kind or a time that is not served."""
    where = f"messages[{at}].cache_control"
    if kind != "pin":
        raise RequestError(f'`{where}.type` is {kind[:64]!r}: only "pin" is supported', param=f"{where}.type")
    if max_pin_s <= 0:
        raise RequestError(f"`{where}`: this server pins nothing (`--max-pin-s 0`): leave it out", param=where)
    if not 0 < ttl_s <= max_pin_s:
        raise RequestError(
            f"`{where}.ttl` is {ttl_s:g} s, it must be above 0 and at most {max_pin_s:g} (`--max-pin-s`)",
            param=f"{where}.ttl",
        )
    return MessagePin(message=at, ttl_s=ttl_s)


def common_tokens(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items are equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
