"""Keeps what the policy keeps that would have had the most hits lately: learned reuse, or one of the classic rivals.

Each rival runs on keys alone, as large as the real cache, over the same requests. No rival wins everywhere: learned
reuse does where conversations return, recency where sessions hurry. What a waiting request will use is spared, whoever
leads. Knows keys, no tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

from firstlight.cache.leader import Leader
from firstlight.cache.reuse import ReuseShadow
from firstlight.cache.shadows import GdsfShadow, LfuShadow, LruShadow, S3FifoShadow, Shadow, serve
from firstlight.cache.tails import PromptTails

__all__ = ["ConversationEviction"]

DEVIATIONS, LEARNED_DEVIATIONS = 2.5, 4.0
"""What a rival has to be ahead by to be followed. Learned reuse more: its early luck is with rates that are not settled
yet, and following it and then another loses what both had kept."""
MAX_PASSED = 64
"""Blocks that the leader keeps which are passed over for one that no waiting request will use."""


class ConversationEviction:
    """Evicts what the leading rival does not keep and no request in the queue will use.

    Cost: the rivals' own, about 25 microseconds a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rivals: tuple[Shadow, ...] = (
            LfuShadow(num_blocks),
            ReuseShadow(num_blocks),
            LruShadow(),
            S3FifoShadow(num_blocks),
            GdsfShadow(),
        )
        self._leader = Leader([LEARNED_DEVIATIONS if isinstance(r, ReuseShadow) else DEVIATIONS for r in self._rivals])
        self._tails = PromptTails()
        self._latest: tuple[str, int] = ("", 0)
        """The request that arrived last and how many keys it had."""
        self._num_prompt: dict[str, int] = {}
        """How many keys each open request arrived with."""
        self._keys: list[bytes] = [b""] * num_blocks
        self._offered: OrderedDict[bytes, int] = OrderedDict()
        """Blocks on offer by key, the longest offered first."""
        self._unkept: deque[bytes] = deque()
        """Keys on offer that the leader does not keep; some may have changed since, or be named twice."""
        self._awaited: dict[str, Sequence[bytes]] = {}
        """Keys of each waiting request."""
        self._num_awaiting: dict[bytes, int] = {}
        """How many requests wait for a key."""
        self._spared: set[bytes] = set()
        """Keys that would have been evicted by now."""

    def awaited(self, owner: str, keys: Sequence[bytes]) -> None:
        self._awaited[owner] = keys = tuple(keys)
        for key in keys:
            self._num_awaiting[key] = self._num_awaiting.get(key, 0) + 1

    def _forget_awaited(self, owner: str) -> None:
        for key in self._awaited.pop(owner, ()):
            self._num_awaiting[key] -= 1
            if not self._num_awaiting[key]:
                del self._num_awaiting[key]
                if key in self._spared:
                    self._spared.remove(key)
                    self._unkept.append(key)

    def arrived(self, owner: str, keys: Sequence[bytes]) -> None:
        self._forget_awaited(owner)
        self._num_prompt[owner] = len(keys)
        self._latest = (owner, len(keys))
        hits = self._serve(keys[:-1] if self._tails.is_spare(keys) else keys, 0)
        if self._leader.score(hits) or len(self._unkept) > 2 * self._num_blocks:
            kept = self._rivals[self._leader.index].kept
            self._unkept = deque(key for key in self._offered if key not in kept)

    def _serve(self, keys: Sequence[bytes], first_used: int) -> list[int]:
        """Passes the keys through every rival; how many each one found."""
        hits = []
        for i, rival in enumerate(self._rivals):
            found, evicted = serve(rival, self._num_blocks, keys, first_used)
            hits.append(found)
            if i == self._leader.index:
                self._unkept.extend(key for key in evicted if key in self._offered)
        return hits

    def finished(self, owner: str, keys: Sequence[bytes]) -> None:
        """Takes in what the request has published beyond its prompt; where others came meanwhile, the prompt anew."""
        self._forget_awaited(owner)
        num_prompt = self._num_prompt.pop(owner, 0)
        if self._latest != (owner, len(keys)) and num_prompt <= len(keys):
            self._serve(keys, num_prompt)

    def used(self, block: int, key: bytes) -> None:
        self._keys[block] = key

    def freed(self, block: int) -> None:
        """The rivals know when each request ended."""

    def offered(self, block: int) -> None:
        key = self._keys[block]
        self._offered[key] = block
        if key not in self._rivals[self._leader.index].kept:
            self._unkept.append(key)

    def withdrawn(self, block: int) -> None:
        del self._offered[self._keys[block]]

    def victim(self) -> int:
        kept = self._rivals[self._leader.index].kept
        while self._unkept:
            key = self._unkept.popleft()
            if key not in self._offered or key in kept:
                continue
            if key not in self._num_awaiting:
                return self._offered[key]
            self._spared.add(key)
        for key, block in islice(self._offered.items(), MAX_PASSED):
            if key not in self._num_awaiting:
                return block
        return next(iter(self._offered.values()))
