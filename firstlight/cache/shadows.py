"""What a classic policy would keep, worked out on keys alone: no blocks, no locks, one request at a time.

A prefix outlives what was built on it here too. Knows keys; not whether the real cache holds them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from firstlight.cache.ranked import UseCounts, num_remembered
from firstlight.cache.s3fifo import MAX_USES, SMALL_SHARE

__all__ = ["GdsfShadow", "LfuShadow", "LruShadow", "S3FifoShadow", "Shadow", "serve"]


class Shadow(Protocol):
    """The keys that a policy keeps. A request holds what it finds, room is made, and then all its keys are taken."""

    @property
    def kept(self) -> Mapping[bytes, object]:
        """By key; to read only."""

    def hold(self, keys: Sequence[bytes]) -> None:
        """These kept keys may not be given up before they are taken."""

    def evict(self, num: int) -> list[bytes]:
        """Gives up so many keys that are not held, and says which."""

    def take(self, keys: Sequence[bytes], first_used: int) -> None:
        """Keeps all keys of a prompt, first to last. Those before `first_used` were counted as used already."""


def serve(shadow: Shadow, num_blocks: int, keys: Sequence[bytes], first_used: int = 0) -> tuple[int, list[bytes]]:
    """One request's keys pass through a cache of `num_blocks`: how long a run of them was kept, and what had to go."""
    if len(keys) > num_blocks:
        return 0, []
    kept = shadow.kept
    found = [key for key in keys if key in kept]
    hits = len(found)
    if found and found[-1] != keys[hits - 1]:
        hits = next(i for i, key in enumerate(keys) if key not in kept)
    shadow.hold(found)
    evicted = shadow.evict(max(0, len(kept) + len(keys) - len(found) - num_blocks))
    shadow.take(keys, first_used)
    return hits, evicted


class LruShadow:
    """Gives up what was taken longest ago."""

    def __init__(self) -> None:
        self.kept: OrderedDict[bytes, object] = OrderedDict()

    def hold(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.move_to_end(key)

    def evict(self, num: int) -> list[bytes]:
        return [self.kept.popitem(last=False)[0] for _ in range(num)]

    def take(self, keys: Sequence[bytes], first_used: int) -> None:
        for key in reversed(keys):
            self.kept[key] = None
            self.kept.move_to_end(key)


class _Levels:
    """Keys by a whole-numbered rank, the longest taken of each rank first. Cost: O(1) a change."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[bytes, None]] = {}
        self._lowest = 0

    def add(self, key: bytes, rank: int) -> None:
        level = self._levels.get(rank)
        if level is None:
            level = self._levels[rank] = OrderedDict()
            self._lowest = min(self._lowest, rank)
        level[key] = None

    def remove(self, key: bytes, rank: int) -> None:
        level = self._levels[rank]
        del level[key]
        if not level:
            del self._levels[rank]

    def pop(self) -> tuple[bytes, int]:
        """Takes away the first of the lowest rank; the key and the rank."""
        if self._lowest not in self._levels:
            self._lowest = min(self._levels)
        rank = self._lowest
        level = self._levels[rank]
        key, _ = level.popitem(last=False)
        if not level:
            del self._levels[rank]
        return key, rank


class LfuShadow:
    """Gives up what was used least often, uses before it was given up included."""

    def __init__(self, num_blocks: int) -> None:
        self.kept: dict[bytes, int] = {}
        self._levels = _Levels()
        self._uses = UseCounts(num_remembered(num_blocks))

    def hold(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._levels.remove(key, self.kept[key])

    def evict(self, num: int) -> list[bytes]:
        keys = [self._levels.pop()[0] for _ in range(num)]
        for key in keys:
            del self.kept[key]
        return keys

    def take(self, keys: Sequence[bytes], first_used: int) -> None:
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            rank = self._uses.add(key) if i >= first_used else max(1, self.kept.get(key, 1))
            self.kept[key] = rank
            self._levels.add(key, rank)


class GdsfShadow:
    """Gives up the smallest of uses since it came + the rank of what was given up last when it was taken."""

    def __init__(self) -> None:
        self.kept: dict[bytes, tuple[int, int]] = {}
        """By key: its rank and its uses since it came."""
        self._levels = _Levels()
        self._level = 0

    def hold(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._levels.remove(key, self.kept[key][0])

    def evict(self, num: int) -> list[bytes]:
        keys = []
        for _ in range(num):
            key, rank = self._levels.pop()
            self._level = max(self._level, rank)
            del self.kept[key]
            keys.append(key)
        return keys

    def take(self, keys: Sequence[bytes], first_used: int) -> None:
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            uses = self.kept.get(key, (0, 0))[1] + (i >= first_used)
            rank = self._level + uses
            self.kept[key] = (rank, uses)
            self._levels.add(key, rank)


class S3FifoShadow:
    """Gives up what passed through a small queue unused, else from a main queue in rounds; leaves only.

    A key that comes up while it may not go is set aside, and heads its queue again as soon as it may. Cost: O(1) a key.
    """

    def __init__(self, num_blocks: int) -> None:
        self.kept: dict[bytes, int] = {}
        """By key: its uses, as the rounds count them."""
        self._most = num_blocks
        self._most_small = max(1, int(SMALL_SHARE * num_blocks))
        self._small: deque[bytes] = deque()
        self._main: deque[bytes] = deque()
        self._aside: dict[bytes, deque[bytes]] = {}
        """Keys set aside, and the queue each belongs to."""
        self._num_small = 0
        """Keys in the small queue, those set aside included."""
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._parents: dict[bytes, bytes] = {}
        self._num_children: dict[bytes, int] = {}
        self._held: frozenset[bytes] = frozenset()

    def hold(self, keys: Sequence[bytes]) -> None:
        self._held = frozenset(keys)
        for key in keys:
            self.kept[key] = min(MAX_USES, self.kept[key] + 1)

    def take(self, keys: Sequence[bytes], first_used: int) -> None:
        kept = self.kept
        for i in range(len(keys) - 1, -1, -1):
            key = keys[i]
            if key in kept:
                continue
            kept[key] = 0
            if i:
                parent = self._parents[key] = keys[i - 1]
                self._num_children[parent] = self._num_children.get(parent, 0) + 1
            if key in self._gone:
                self._main.append(key)
                continue
            self._num_small += 1
            self._small.append(key)
        held, self._held = self._held, frozenset()
        for key in held:
            if key in self._aside and self._is_free(key):
                self._aside.pop(key).append(key)

    def evict(self, num: int) -> list[bytes]:
        return [self._evict() for _ in range(num)]

    def _evict(self) -> bytes:
        key = self._from_small() if self._num_small >= self._most_small or not self._main else None
        if key is None:
            key = self._from_main() or self._from_small() or self._from_main()
        assert key is not None, "a leaf is in one of the queues"
        del self.kept[key]
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                if parent in self._aside and self._is_free(parent):
                    self._aside.pop(parent).appendleft(parent)
        return key

    def _is_free(self, key: bytes) -> bool:
        return key not in self._num_children and key not in self._held

    def _from_small(self) -> bytes | None:
        while self._small:
            key = self._small.popleft()
            if self.kept[key] > 0:
                self.kept[key] = 0
                self._num_small -= 1
                self._main.append(key)
            elif self._is_free(key):
                self._num_small -= 1
                self._gone[key] = None
                if len(self._gone) > self._most:
                    self._gone.popitem(last=False)
                return key
            else:
                self._aside[key] = self._small
        return None

    def _from_main(self) -> bytes | None:
        while self._main:
            key = self._main.popleft()
            if self.kept[key] > 0:
                self.kept[key] -= 1
                self._main.append(key)
            elif self._is_free(key):
                return key
            else:
                self._aside[key] = self._main
        return None
