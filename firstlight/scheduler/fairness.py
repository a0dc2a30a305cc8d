"""Who has been served how much: a virtual token counter per tenant. Knows opaque tenant keys and counts.

Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Ours: it
adds to a request's rank in tokens instead of replacing the order, and only computed tokens count: a hit is free.
"""

from __future__ import annotations

__all__ = ["MAX_EXCESS_TOKENS", "ServedTokens"]

OUTPUT_WEIGHT = 2.0
"""An output token counts as so many prompt tokens: it takes a row of a step for itself."""
MAX_EXCESS_TOKENS = 15_000.0
"""No tenant's requests are set back by more than this, so the bound on waiting stays finite."""
MAX_TENANTS = 4096


class ServedTokens:
    """Tokens computed per tenant. A tenant that comes back starts level with the least served that is active."""

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        self._open: dict[bytes, int] = {}

    @property
    def num_active(self) -> int:
        """Tenants with an open request."""
        return len(self._open)

    def opened(self, tenant: bytes) -> None:
        """A request of this tenant came in. Idle time is no credit: it does not start below those who waited."""
        if tenant not in self._open:
            floor = self._least()
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._open[tenant] = self._open.get(tenant, 0) + 1

    def closed(self, tenant: bytes) -> None:
        """A request of this tenant ended."""
        self._open[tenant] -= 1
        if self._open[tenant] == 0:
            del self._open[tenant]
            if len(self._served) > MAX_TENANTS:
                idle = [known for known in self._served if known not in self._open]
                del self._served[min(idle, key=self._served.__getitem__)]

    def add(self, tenant: bytes, num_prompt: int, num_output: int) -> None:
        """Counts what a step computed for this tenant."""
        self._served[tenant] += num_prompt + OUTPUT_WEIGHT * num_output

    def excess(self, tenant: bytes) -> float:
        """How many tokens more than the least served active tenant this one got; 0..MAX_EXCESS_TOKENS."""
        return min(MAX_EXCESS_TOKENS, self._served[tenant] - self._least())

    def _least(self) -> float:
        return min((self._served[tenant] for tenant in self._open), default=0.0)
