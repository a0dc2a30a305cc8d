"""KV memory is there before it is written: no step waits while the kernel clears a page for every layer."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest

from firstlight.backend.cpu.backend import CpuBackend
from firstlight.config import EngineConfig
from firstlight.types import StepPlan, StepRow
from tests.kernel.models import RECIPES, build

MB = 1 << 20
BLOCKS_PER_2MB = 1024
"""Of the tiny model: 16 tokens of 2 KV heads of 16 dimensions, keys and values in 16 bits, in each of 2 layers."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.mark.skipif(kernel_version() < (5, 14), reason="the kernel cannot supply pages ahead of use before Linux 5.14")
@pytest.mark.parametrize(("block", "grows_mb"), [(8, 0), (BLOCKS_PER_2MB * 3 // 4, 4)])
def test_kv_pages_come_before_they_are_written_and_not_long_before(tmp_path: Path, block: int, grows_mb: int) -> None:
    config = EngineConfig(num_blocks=8 * BLOCKS_PER_2MB, threads=1, max_step_tokens=64)
    backend = CpuBackend(build(RECIPES["llama"], tmp_path), config)
    assert backend.info.kv_bytes_per_block == 2 * 2 * MB // BLOCKS_PER_2MB

    def run(at: int) -> None:
        row = StepRow(request_id="r", token_ids=[1], start=0, block_table=[at])
        backend.run(StepPlan(step_id=1, rows=[row]))

    run(0)
    before = resident_bytes()
    run(block)
    deadline = time.monotonic() + 20
    while resident_bytes() - before < (grows_mb - 0.7) * MB and time.monotonic() < deadline:
        time.sleep(0.01)
    grown = resident_bytes() - before
    backend.close()
    assert grows_mb - 0.7 <= grown / MB <= grows_mb + 1
