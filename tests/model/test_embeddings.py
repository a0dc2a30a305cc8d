"""Embeddings of the default model: the head's own input, and the same bits alone, chunked and in company."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from firstlight.config import EngineConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.types import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
TEXTS = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Quarterly revenue grew by nine percent."]


async def _vectors(engine: AsyncEngine, pooling: str) -> list[npt.NDArray[np.float64]]:
    async def one(at: int) -> npt.NDArray[np.float64]:
        ids = await engine.encode_prompt(TEXTS[at] * 4)
        async for delta in engine.generate(f"{at}", ids, PARAMS, pooling=pooling):  # type: ignore[arg-type]
            if delta.finish is not None:
                found: npt.NDArray[np.float64] = delta.embedding
                return found
        raise AssertionError("no end")

    return list(await asyncio.gather(*(one(at) for at in range(len(TEXTS)))))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_exact_and_mean_something(smollm2_path: Path, pooling: str) -> None:
    async def run(max_step_tokens: int) -> list[npt.NDArray[np.float64]]:
        config = EngineConfig(
            model=str(smollm2_path), num_blocks=64, max_model_len=256, max_step_tokens=max_step_tokens, max_step_rows=8
        )
        async with AsyncEngine(config) as engine:
            return await _vectors(engine, pooling)

    together, chunked = asyncio.run(run(512)), asyncio.run(run(16))
    for one, other in zip(together, chunked, strict=True):
        assert one.shape == (576,)
        assert one.tobytes() == other.tobytes()
    units = [vector / np.linalg.norm(vector) for vector in together]
    if pooling == "mean":
        assert units[0] @ units[1] > units[0] @ units[2]
