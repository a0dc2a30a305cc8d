"""Which free block is reused next: the seam between the pool and its policies. Knows ids and keys only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["POLICIES", "EvictionPolicy", "IgnoresRequests"]

POLICIES = ("lru", "lfu", "s3fifo", "gdsf", "conversation")
"""Every policy that `make_policy` makes."""


class EvictionPolicy(Protocol):
    """Orders blocks with a key that nobody holds; those without one are reused before it is asked.

    A block is offered only while no cached block continues it, so that a prefix outlives what was built on it.
    """

    def awaited(self, owner: str, keys: Sequence[bytes]) -> None:
        """The request `owner`, whose full prompt blocks have these keys, first to last, is in the queue.

        It is until it has arrived, or has finished without.
        """

    def arrived(self, owner: str, keys: Sequence[bytes]) -> None:
        """The request `owner`, whose full prompt blocks have these keys, first to last, is admitted."""

    def finished(self, owner: str, keys: Sequence[bytes]) -> None:
        """It ended or gave way, and had published blocks with these keys, first to last."""

    def used(self, block: int, key: bytes) -> None:
        """A request has computed the block, or takes it from the cache."""

    def freed(self, block: int) -> None:
        """The last request that held the block has given it back."""

    def offered(self, block: int) -> None:
        """The block may be chosen from now on."""

    def withdrawn(self, block: int) -> None:
        """It may not be chosen any more: it is held again, continued, or has lost its key."""

    def victim(self) -> int:
        """Chooses one of the blocks on offer, of which there is at least one. The pool withdraws it then."""


class IgnoresRequests:
    """For policies that look at blocks alone."""

    def awaited(self, owner: str, keys: Sequence[bytes]) -> None:
        """Nothing to learn."""

    def arrived(self, owner: str, keys: Sequence[bytes]) -> None:
        """Nothing to learn."""

    def finished(self, owner: str, keys: Sequence[bytes]) -> None:
        """Nothing to learn."""
