"""Typed, checked look-ups in a model's metadata, with one wording for every mistake.

Knows a table of keys and where it came from, not what the keys mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from firstlight.errors import ModelError

__all__ = ["Keys"]

REQUIRED: Any = object()
HINT = "the file is damaged or was converted wrongly: download or convert it again"


class Keys:
    """A table of metadata with a prefix put before every key.

    Every getter returns `default` when the key is absent or null, and raises ModelError when it is absent and no
    default is given, when its type is wrong, or when the value lies outside [low, high].
    """

    def __init__(self, table: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.table, self.source, self.prefix = table, source, prefix

    def error(self, key: str, what: str) -> ModelError:
        return ModelError(f"`{self.prefix}{key}` in {self.source} {what}", hint=HINT)

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.table.get(self.prefix + key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.error(key, "is missing")
        return default

    def integer(self, key: str, low: int, high: int, default: Any = REQUIRED) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_short(value)}, it must be a whole number")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, allowed are {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: Any = REQUIRED) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"is {_short(value)}, it must be a finite number")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, allowed are {low} to {high}")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_short(value)}, it must be true or false")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_short(value)}, it must be text")
        return value

    def section(self, key: str) -> Keys:
        """The table under `key`; empty when absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {_short(value)}, it must be a table")
        return Keys(value, f"`{key}` in {self.source}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
