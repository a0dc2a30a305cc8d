"""Finds stop strings in streamed text. Knows characters, not tokens."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class _Node:
    """A prefix of stop strings: its length, where each next character leads, and the longest stop it ends with."""

    __slots__ = ("children", "fallback", "length", "stop")

    def __init__(self, length: int) -> None:
        self.length = length
        self.children: dict[str, _Node] = {}
        self.fallback: _Node = self
        self.stop: str | None = None


class StopMatcher:
    """Passes text through until a stop string is complete, holding back no more than could still become one.

    The stop that is completed first ends the text; of several that end at the same character the longest, which began
    first, is taken. So the answer never depends on how the text was cut into pushes. One writer: the stream that owns
    it.

    Cost: linear in the text (Aho-Corasick), whatever the number of stops; text without a stop's first character is
    skipped over by a compiled search.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._root = _build(stops)
        firsts = sorted({stop[0] for stop in stops})
        self._begins = re.compile("[" + "".join(map(re.escape, firsts)) + "]") if firsts else None
        self._node = self._root
        self._held = ""
        self._matched: str | None = None
        self._num_unread = 0

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matched

    @property
    def num_unread(self) -> int:
        """How many characters of the last push come after the stop; 0 without a match."""
        return self._num_unread

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string once one is complete.

        Mutates: holds the longest end of the text that begins a stop string. After a match nothing more is given.
        """
        if self._begins is None:
            return text, None
        if self._matched is not None:
            return "", self._matched
        end = self._scan(text)
        whole = self._held + text[:end]
        if self._matched is None:
            keep = len(whole) - self._node.length
            self._held = whole[keep:]
            return whole[:keep], None
        self._held = ""
        self._num_unread = len(text) - end
        return (whole if self._include_stop else whole[: len(whole) - len(self._matched)]), self._matched

    def finish(self) -> str:
        """The text still held back, which never became a stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _scan(self, text: str) -> int:
        """Moves through `text` to the end of the first stop or of the text, and gives the place."""
        assert self._begins is not None
        node, root, place, length = self._node, self._root, 0, len(text)
        while place < length:
            if node is root:
                begin = self._begins.search(text, place)
                if begin is None:
                    place = length
                    break
                place = begin.start()
            character = text[place]
            while character not in node.children and node is not root:
                node = node.fallback
            node = node.children.get(character, root)
            place += 1
            if node.stop is not None:
                self._matched = node.stop
                break
        self._node = node
        return place


def _build(stops: Sequence[str]) -> _Node:
    """The automaton of `stops`: a trie whose nodes know the longest proper suffix that is also in it."""
    root = _Node(0)
    for stop in stops:
        assert stop, "a stop string is not empty: check the parameters first"
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.length + 1))
        node.stop = stop
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for character, child in parent.children.items():
            queue.append(child)
            if parent is root:
                child.fallback = root
                continue
            node = parent.fallback
            while character not in node.children and node is not root:
                node = node.fallback
            child.fallback = node.children.get(character, root)
            if child.stop is None:
                child.stop = child.fallback.stop
    return root
