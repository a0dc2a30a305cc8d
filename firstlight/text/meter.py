"""What one rendering of an untrusted template may spend, and the checks that pay for it.

Knows values and sizes, not Jinja's syntax. Each check runs before the operation it is for, so that a small template
cannot make a huge value: by repeating, padding, replacing, joining, formatting, or printing a list that holds itself
many times over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError
from jinja2.utils import Namespace

__all__ = ["Meter", "Paid", "TemplateLimitError", "active_meter", "check_arguments", "check_binop", "joined", "metered"]

_T = TypeVar("_T")

_MAX_INT_BITS = 256
_MAX_WIDTH = 10_000
_MAX_TOTAL_RATIO = 32
"""All values of a rendering together may be this many times larger than one."""
_ITEM_WEIGHT = 16
"""An item of a list counts as so many characters: printing, comparing and storing it costs about as much."""
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(?:\d{5,}|\*)|\{[^}]*(?:\d{5,}|\{)")


class TemplateLimitError(TemplateError):
    """A template went over one of the limits of a rendering."""


class Meter:
    """What one rendering may still spend. One writer: the rendering it belongs to."""

    def __init__(self, max_steps: int, max_characters: int, max_seconds: float) -> None:
        self._max_steps = self._steps_left = max_steps
        self.max_characters = max_characters
        self._total_left = max_characters * _MAX_TOTAL_RATIO
        self._max_seconds = max_seconds
        self._deadline = time.monotonic() + max_seconds

    def step(self, count: int = 1) -> None:
        """Pays for `count` steps.

        Raises:
            TemplateLimitError: steps or time are spent.
        """
        self._steps_left -= count
        if self._steps_left < 0:
            raise TemplateLimitError(f"the chat template took more than {self._max_steps} steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the chat template took more than {self._max_seconds:g} s")

    def size(self, count: int) -> None:
        """Pays for a value of `count` characters or items.

        Raises:
            TemplateLimitError: it is more than one value may have, or all values together.
        """
        self._total_left -= count
        if count > self.max_characters or self._total_left < 0:
            raise TemplateLimitError(
                f"the chat template made a value of {count} characters or items; the limit is "
                f"{self.max_characters} for one, "
                f"{self.max_characters * _MAX_TOTAL_RATIO} for all"
            )

    def weigh(self, value: Any) -> int:
        """Characters and items of `value` written out, shared parts counted each time they appear.

        Raises:
            TemplateLimitError: it weighs more than one value may.
        """
        if isinstance(value, str):
            return len(value)
        weight, stack = 1, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
                weight += 2 * _ITEM_WEIGHT * len(item)
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
                weight += _ITEM_WEIGHT * len(item)
            elif isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
                weight += 1
            if weight > self.max_characters:
                raise TemplateLimitError(
                    f"the chat template made a value of more than {self.max_characters} characters or items"
                )
        self.step(weight // 1024)
        return weight


class Paid:
    """An iterable of a loop that pays a step for each round."""

    __slots__ = ("_values",)

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)  # raises TypeError for an iterator, as the loop expects

    def __iter__(self) -> Iterator[Any]:
        meter = active_meter()
        for value in self._values:
            meter.step()
            yield value


_meter: ContextVar[Meter] = ContextVar("firstlight_template_meter")


def metered(meter: Meter, run: Callable[[], _T]) -> _T:
    """The result of `run` with `meter` in force for the templates it renders."""
    token = _meter.set(meter)
    try:
        return run()
    finally:
        _meter.reset(token)


def active_meter() -> Meter:
    """The meter in force. While a template is compiled and its constants are folded there is none: then a small one."""
    return _meter.get(None) or Meter(100_000, 1_000_000, 1.0)


def joined(separator: str, values: Iterable[Any]) -> str:
    """The values as one string, after a look at its length."""
    meter = active_meter()
    items = list(islice(values, 1_000_000))
    meter.size(sum(map(meter.weigh, items)) + len(separator) * len(items))
    return separator.join(map(str, items))


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Pays for `left operator right`, one of `+ * ** %`."""
    meter = active_meter()
    meter.step()
    if operator == "%" and isinstance(left, str):
        _check_format(meter, left, left.count("%"), right)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        meter.size(len(left) + len(right))
        if isinstance(left, tuple):
            meter.size(meter.weigh(left) + meter.weigh(right))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if hasattr(many, "__len__") and isinstance(times, int):
                meter.size(meter.weigh(many) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if bits > _MAX_INT_BITS or (operator == "**" and left.bit_length() * abs(right) > _MAX_INT_BITS):
            raise TemplateLimitError(f"the chat template computes with numbers of more than {_MAX_INT_BITS} bits")


_PADS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "batch", "slice", "truncate", "wordwrap"})
_REFUSED_METHODS = frozenset({"translate", "format_map", "to_bytes"})
_PASSED_BY_REFERENCE = frozenset(
    {"attr", "count", "d", "default", "first", "items", "last", "length", "list", "map"}
    | {"reject", "rejectattr", "reverse", "select", "selectattr"}
)
"""Filters that neither print nor compare what they are given."""


def check_arguments(name: str, owner: Any, arguments: list[Any]) -> None:
    """Pays for calling a filter or a method.

    Args:
        name: of the filter or method.
        owner: the object a method belongs to; a filter's first argument is in `arguments`.
    """
    meter = active_meter()
    if len(arguments) == 1 and type(arguments[0]) is str and owner is None:  # `trim`, `upper` and the like
        meter.step(1 + len(arguments[0]) // 1024)
        return
    meter.step()
    if name in _REFUSED_METHODS or isinstance(owner, (bytes, bytearray, int, float)):
        raise TemplateLimitError(f"the chat template calls {name}, which is not available")
    subject = owner if isinstance(owner, str) else next((a for a in arguments if isinstance(a, str)), "")
    numbers = [abs(value) for value in arguments if isinstance(value, int)]
    strings = [value for value in arguments if isinstance(value, str)]
    if name in _PADS and max(numbers, default=0) > _MAX_WIDTH:
        raise TemplateLimitError(f"the chat template calls {name} with a number over {_MAX_WIDTH}")
    if name == "indent":
        width = max([*numbers, *(len(value) for value in strings[1:]), 4])
        meter.size(len(subject) + (subject.count("\n") + 1) * width)
    elif name == "wordwrap":
        meter.size(len(subject) * (1 + max(map(len, strings[1:]), default=1)))
    elif name == "replace":
        old, new = ([*strings, "", ""])[:2] if owner is not None else ([*strings[1:], "", ""])[:2]
        meter.size(len(subject) + (subject.count(old) if old else len(subject) + 1) * len(new))
    elif name == "format":
        _check_format(meter, subject, subject.count("%") + subject.count("{"), arguments)
    elif name == "sum" and any(isinstance(value, (list, tuple)) for value in arguments[1:]):
        raise TemplateLimitError("the chat template adds lists with the sum filter, which is not available")
    if owner is None and name not in _PASSED_BY_REFERENCE:
        for value in arguments:
            if not isinstance(value, str):
                meter.weigh(value)
    meter.step(sum(map(len, strings)) // 1024 + len(owner if isinstance(owner, str) else "") // 1024)


def _check_format(meter: Meter, text: str, num_fields: int, values: Any) -> None:
    """Refuses a format that pads very wide or takes its width from an argument; pays for its result."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("the chat template formats with a very large or a computed width")
    meter.size(len(text) + num_fields * (meter.weigh(values) + (_MAX_WIDTH if num_fields > 64 else 0)))
