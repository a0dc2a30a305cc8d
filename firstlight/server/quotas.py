"""What one API key may take: requests and tokens per minute, requests at a time, a share of the queue.

Rates are token buckets of one minute. Tokens are charged when a request ends, as they were counted, so a bucket may go
below zero and the key waits until it is refilled. Knows numbers and a clock, not keys or routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from firstlight.errors import ConfigError, OverloadedError

__all__ = ["KeyLimits", "Quota", "RateLimited", "Ticket", "parsed_limits"]

_MINUTE_S = 60.0


class RateLimited(OverloadedError):
    """The key has used up what it may take for now."""

    code = "rate_limit_exceeded"
    kind = "rate_limit_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of one key; 0 is no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrency: int = 0
    """Requests that are being answered at a time."""
    queued: int = 0
    """Sequences (prompts times `n`) that are open at a time."""


def parsed_limits(words: list[str], default: KeyLimits, where: str) -> KeyLimits:
    """`default` with what `name=number` words say. Raises ConfigError that names the word."""
    known = [field.name for field in fields(KeyLimits)]
    for word in words:
        name, _, number = word.partition("=")
        if name not in known or not (number.isascii() and number.isdigit() and len(number) < 16):
            raise ConfigError(
                f"{where}: {word[:64]!r} is no limit: write {' or '.join(f'{name}=N' for name in known)}",
                param="api_key_file",
            )
        default = replace(default, **{name: int(number)})
    return default


class _Bucket:
    """`per_min` units that refill evenly; 0 never runs out."""

    def __init__(self, per_min: int, now_s: float) -> None:
        self._per_min = per_min
        self._left = float(per_min)
        self._seen_s = now_s

    def wait_s(self, num: float, now_s: float) -> float:
        """Seconds until `num` units are there; 0 now."""
        if not self._per_min:
            return 0.0
        self._left = min(self._per_min, self._left + (now_s - self._seen_s) * self._per_min / _MINUTE_S)
        self._seen_s = now_s
        return max(0.0, (num - self._left) * _MINUTE_S / self._per_min)

    def take(self, num: float) -> None:
        self._left -= num


class Quota:
    """What one key has taken. Used on the server's loop alone."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._requests = _Bucket(limits.requests_per_min, clock())
        self._tokens = _Bucket(limits.tokens_per_min, clock())
        self.num_open = 0
        self.num_sequences = 0

    def enter(self) -> Ticket:
        """Counts one request. Raises RateLimited (429) with the seconds to wait."""
        limits, now_s = self.limits, self._clock()
        if limits.concurrency and self.num_open >= limits.concurrency:
            raise RateLimited(
                f"{self.num_open} requests of this API key are being answered, its `concurrency` is "
                f"{limits.concurrency}: wait for one to end",
                retry_after_s=1.0,
            )
        for bucket, num, name, per_min in (
            (self._requests, 1.0, "requests_per_min", limits.requests_per_min),
            (self._tokens, 1.0, "tokens_per_min", limits.tokens_per_min),
        ):
            wait_s = bucket.wait_s(num, now_s)
            if wait_s > 0:
                raise RateLimited(
                    f"this API key has used its {per_min} `{name}`: try again in {wait_s:.1f} s", retry_after_s=wait_s
                )
        self._requests.take(1)
        self.num_open += 1
        return Ticket(self)

    def charge(self, num_tokens: int) -> None:
        """Takes tokens that a request has used."""
        self._tokens.wait_s(0, self._clock())
        self._tokens.take(num_tokens)


class Ticket:
    """One request's place in its key's quota."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._num_sequences = 0
        self._is_open = True

    def hold(self, num_sequences: int) -> None:
        """Counts the request's sequences. Raises RateLimited where the key has too many open."""
        quota, most = self._quota, self._quota.limits.queued
        if most and quota.num_sequences + num_sequences > most:
            raise RateLimited(
                f"this request has {num_sequences} sequences and its API key {quota.num_sequences} open ones, "
                f"the key's `queued` is {most}: wait for some to end, or ask for fewer",
                retry_after_s=1.0,
            )
        self._num_sequences = num_sequences
        quota.num_sequences += num_sequences

    def close(self, num_tokens: int) -> None:
        """Gives the place back and pays for the tokens. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._quota.num_open -= 1
            self._quota.num_sequences -= self._num_sequences
            self._quota.charge(num_tokens)
