"""Several running generations as one stream of batches: everything that is waiting comes together.

Knows deltas, not what becomes of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from firstlight.engine.generation import Generation
from firstlight.types import OutputDelta

__all__ = ["merged_batches"]

Batch = list[tuple[int, OutputDelta]]


async def merged_batches(generations: Sequence[Generation], n: int) -> AsyncGenerator[Batch]:
    """Batches of (choice over all prompts, delta), until every choice has ended.

    A generation is asked for more only when its last deltas were taken, so what a slow reader leaves lying is merged by
    the engine. Leaving the iteration closes every generation.
    """
    box = _Box()
    pumps = [asyncio.create_task(box.pump(generation, at * n)) for at, generation in enumerate(generations)]
    try:
        while any(not pump.done() for pump in pumps) or box.waiting:
            batch = await box.take(pumps)
            if batch:
                yield batch
        for pump in pumps:
            pump.result()
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for generation in generations:
            await generation.aclose()


class _Box:
    """Holds at most one delta per choice. Written by the pumps, emptied by the reader."""

    def __init__(self) -> None:
        self.waiting: dict[int, OutputDelta] = {}
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()

    async def pump(self, generation: Generation, first_choice: int) -> None:
        """Moves a generation's deltas into the box, waiting where a choice's last one has not been taken."""
        try:
            async for delta in generation:
                choice = first_choice + delta.choice
                while choice in self.waiting:
                    self._emptied.clear()
                    await self._emptied.wait()
                self.waiting[choice] = delta
                self._filled.set()
        finally:
            self._filled.set()

    async def take(self, pumps: Sequence[asyncio.Task[None]]) -> Batch:
        """Everything in the box, waiting for something; empty when a pump has ended."""
        await self._filled.wait()
        self._filled.clear()
        for pump in pumps:
            if pump.done():
                pump.result()
        batch = sorted(self.waiting.items())
        self.waiting.clear()
        self._emptied.set()
        return batch
