"""When pieces leave: at once, gathered into fewer frames, or played out at a steady rate. Never what they say.

Knows pieces and times, not frames and not sockets.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from firstlight.server.pieces import Piece

__all__ = ["Pacing", "Playout", "paced"]

_MAX_HELD_TOKENS = 256
"""Held for one answer, all choices together: beyond that nothing more is taken from the engine, which merges it."""
_GAPS_SEEN = 48
_CATCH_UP = 0.8
"""Tokens leave at so much of their usual gap while more are held than the last bursts need, else as much slower."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """How one answer's pieces are timed. The first text of a choice leaves at once whatever this says.

    A frame leaves when it has `min_tokens`, when its first token has waited `coalesce_s`, or with the end.
    """

    min_tokens: int = 1
    coalesce_s: float = 0.0
    playout_s: float = 0.0
    """Longest time a token may be held to even out the gaps; 0 = none is."""

    @property
    def is_off(self) -> bool:
        """Every piece leaves at once."""
        return self.min_tokens <= 1 and self.coalesce_s <= 0 and self.playout_s <= 0

    def is_full(self, num_tokens: int) -> bool:
        """A frame of so many tokens need not wait for more."""
        if self.min_tokens > 1:
            return num_tokens >= self.min_tokens
        return self.coalesce_s <= 0


class Playout:
    """When the tokens of one choice are due, so that they leave evenly: a buffer as long as recent gaps were uneven.

    Nothing is due later than `max_s` after it came, so neither the end nor any token is delayed by more.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._gaps: deque[float] = deque(maxlen=_GAPS_SEEN)
        self._came_s: float | None = None
        self._due_s = 0.0

    def due_s(self, came_s: float, num_tokens: int) -> float:
        """When tokens that came together at `came_s` leave. Called once for each arrival, in order."""
        if self._came_s is None:
            self._came_s = self._due_s = came_s
            return came_s
        self._gaps.append(came_s - self._came_s)
        self._came_s = came_s
        usual_s = sum(self._gaps) / len(self._gaps)
        wanted_lag_s = min(self._max_s, max(self._gaps) - statistics.median(self._gaps))
        is_behind = self._due_s + usual_s - came_s > wanted_lag_s
        gap_s = usual_s * (_CATCH_UP if is_behind else 1 / _CATCH_UP)
        self._due_s = min(max(came_s, self._due_s + gap_s), came_s + self._max_s)
        return self._due_s


def paced(batches: AsyncGenerator[list[Piece]], pacing: Pacing) -> AsyncGenerator[list[Piece]]:
    """The same pieces at their times: those of a choice that leave together are one. Raises what `batches` raises,
    after everything before it has left. Closing it closes `batches`.
    """
    return batches if pacing.is_off else _paced(batches, pacing)


async def _paced(batches: AsyncGenerator[list[Piece]], pacing: Pacing) -> AsyncGenerator[list[Piece]]:
    held = _Held(pacing)
    pump = asyncio.create_task(held.fill(batches))
    try:
        while pieces := await held.take():
            yield pieces
        await pump
    finally:
        pump.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await pump


@dataclass(slots=True)
class _Lane:
    """What is held for one choice: a frame that may gain more, and closed ones with the time they are due."""

    playout: Playout | None
    open: Piece | None = None
    open_until_s: float = 0.0
    closed: deque[tuple[float, Piece]] = field(default_factory=deque)
    has_begun: bool = False
    """Some of its text has left or is due at once."""

    @property
    def due_s(self) -> float | None:
        """When there is something to do."""
        if self.closed:
            return self.closed[0][0]
        return self.open_until_s if self.open is not None else None

    def close(self, now_s: float) -> None:
        """The open frame gains no more."""
        assert self.open is not None
        due_s = now_s if self.playout is None else self.playout.due_s(now_s, self.open.num_tokens)
        self.closed.append((due_s, self.open))
        self.open = None


class _Held:
    """All lanes of one answer. Filled by one task, emptied by another, on one loop."""

    def __init__(self, pacing: Pacing) -> None:
        self._pacing = pacing
        self._lanes: dict[int, _Lane] = {}
        self._num_tokens = 0
        self._has_ended = False
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    async def fill(self, batches: AsyncGenerator[list[Piece]]) -> None:
        """Takes everything in as it comes, unless too much is held."""
        try:
            async with aclosing(batches):
                async for batch in batches:
                    for piece in batch:
                        self._add(piece, time.monotonic())
                    self._filled.set()
                    while self._num_tokens > _MAX_HELD_TOKENS:
                        self._emptied.clear()
                        await self._emptied.wait()
        finally:
            self._has_ended = True
            self._filled.set()

    async def take(self) -> list[Piece]:
        """What is due, one piece per choice, waiting for something; nothing once all has ended."""
        while True:
            self._filled.clear()
            now_s = time.monotonic()
            pieces = [piece for lane in self._lanes.values() if (piece := self._due(lane, now_s)) is not None]
            if pieces:
                self._num_tokens -= sum(piece.num_tokens for piece in pieces)
                self._emptied.set()
                return pieces
            times_s = [lane.due_s for lane in self._lanes.values() if lane.due_s is not None]
            if not times_s and self._has_ended:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(times_s) - now_s) if times_s else None):
                    await self._filled.wait()

    def _add(self, piece: Piece, now_s: float) -> None:
        lane = self._lanes.get(piece.choice)
        if lane is None:
            playout = Playout(self._pacing.playout_s) if self._pacing.playout_s > 0 else None
            lane = self._lanes[piece.choice] = _Lane(playout)
        self._num_tokens += piece.num_tokens
        if lane.open is None:
            wait_s = self._pacing.coalesce_s if self._pacing.coalesce_s > 0 else float("inf")
            lane.open, lane.open_until_s = piece, now_s + wait_s
        else:
            lane.open = lane.open.then(piece)
        if piece.finish is not None or not lane.has_begun or self._pacing.is_full(lane.open.num_tokens):
            lane.close(now_s)
        lane.has_begun = lane.has_begun or bool(piece.text)

    def _due(self, lane: _Lane, now_s: float) -> Piece | None:
        """What of a lane leaves now. Everything, where nothing more comes."""
        if lane.open is not None and (now_s >= lane.open_until_s or self._has_ended):
            lane.close(now_s)
        due: Piece | None = None
        while lane.closed and lane.closed[0][0] <= now_s:
            piece = lane.closed.popleft()[1]
            due = piece if due is None else due.then(piece)
        return due
