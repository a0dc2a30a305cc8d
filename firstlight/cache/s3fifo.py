"""S3-FIFO: a small queue that one-off blocks pass through, a main queue for the rest, and a memory of what left.

Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023). Ours: a block joins a queue when
it is freed for the first time, last block of a prompt first, and blocks that may not be evicted yet are passed over.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from firstlight.cache.eviction import IgnoresRequests

__all__ = ["S3FifoEviction"]

SMALL_SHARE = 0.1
MAX_USES = 3


class S3FifoEviction(IgnoresRequests):
    """Evicts from the small queue what was not used again there, else from the main queue in rounds."""

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks
        self._most_small = max(1, int(SMALL_SHARE * num_blocks))
        self._keys: list[bytes] = [b""] * num_blocks
        self._uses = [0] * num_blocks
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._is_queued = [False] * num_blocks
        self._offered: set[int] = set()
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    def used(self, block: int, key: bytes) -> None:
        if self._keys[block] == key:
            self._uses[block] = min(MAX_USES, self._uses[block] + 1)
        else:
            self._keys[block], self._uses[block] = key, 0

    def freed(self, block: int) -> None:
        if not self._is_queued[block]:
            self._is_queued[block] = True
            (self._main if self._keys[block] in self._gone else self._small).append(block)

    def offered(self, block: int) -> None:
        self._offered.add(block)

    def withdrawn(self, block: int) -> None:
        self._offered.remove(block)

    def victim(self) -> int:
        while True:
            if len(self._small) >= self._most_small or not self._main:
                block = self._from_small()
                if block is not None:
                    return block
            block = self._from_main()
            if block is not None:
                return block
            if self._small and not any(block in self._offered for block in self._main):
                block = next((b for b in self._small if b in self._offered), None)
                if block is not None:
                    self._small.remove(block)
                    return self._leave(block, is_remembered=True)

    def _from_small(self) -> int | None:
        for _ in range(len(self._small)):
            block = self._small.popleft()
            if self._uses[block] > 0:
                self._uses[block] = 0
                self._main.append(block)
            elif block in self._offered:
                return self._leave(block, is_remembered=True)
            else:
                self._small.append(block)
        return None

    def _from_main(self) -> int | None:
        for _ in range(len(self._main)):
            block = self._main.popleft()
            if block in self._offered and self._uses[block] == 0:
                return self._leave(block, is_remembered=False)
            self._uses[block] = max(0, self._uses[block] - 1)
            self._main.append(block)
        return None

    def _leave(self, block: int, *, is_remembered: bool) -> int:
        if is_remembered:
            self._gone[self._keys[block]] = None
            if len(self._gone) > self._most:
                self._gone.popitem(last=False)
        self._keys[block], self._is_queued[block] = b"", False
        return block
