"""Whether the last block of a prompt is ever shared: where it holds a prompt's odd end, hardly one is.

Knows keys only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PromptTails"]

MAX_REMEMBERED = 65_536
MIN_SEEN = 8
"""Judged from so many second to last blocks on that a later prompt had too."""
MOST_SEEN = 64
"""Then all counts are halved, so that the latest weigh most."""
FEWER = 4
"""A last block is spare where so many times fewer of them came again than of those before them."""


class _Seen:
    """Keys to look out for, and how many of them came again."""

    def __init__(self) -> None:
        self.num_again = 0.0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def look(self, keys: Sequence[bytes]) -> None:
        """Counts the prompt if it has any of the keys."""
        for key in keys:
            if key in self._keys:
                del self._keys[key]
                self.num_again += 1
                return

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)


class PromptTails:
    """Compares prompts' last blocks with the second to last ones."""

    def __init__(self) -> None:
        self._last = _Seen()
        self._before = _Seen()

    def is_spare(self, keys: Sequence[bytes]) -> bool:
        """Learns from the next prompt; whether nobody is likely to use its last block again."""
        last, before = self._last, self._before
        last.look(keys)
        before.look(keys)
        if len(keys) > 1:
            last.add(keys[-1])
            before.add(keys[-2])
        if last.num_again + before.num_again > MOST_SEEN:
            last.num_again /= 2
            before.num_again /= 2
        return len(keys) > 1 and before.num_again >= MIN_SEEN and before.num_again > FEWER * last.num_again
