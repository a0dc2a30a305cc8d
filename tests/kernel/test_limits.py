"""The machine's limits: real work is done, and what cannot be measured is refused."""

from __future__ import annotations

import pytest

from firstlight.backend.cpu import limits
from firstlight.backend.cpu.limits import measure_limits
from firstlight.errors import ConfigError

native = pytest.importorskip("firstlight.backend.cpu._limits", reason="the module of machine limits is not built")


def test_limits_are_what_a_machine_can_do() -> None:
    """Loops that were optimised away would read petabytes; loops that did denormals or page faults, nothing."""
    measured = measure_limits(1, seconds=0.1)
    assert 0.1 < measured.dram_gb_s < 2000
    assert 0.1 < measured.int8_gmac_s < 5000
    assert measured.instructions in ("avx2", "scalar")


def test_spans_outgrow_the_last_cache_and_stay_bounded() -> None:
    for threads in (1, 2, 7, 64, 1024):
        span = limits.span_bytes(threads)
        assert span % 256 == 0
        assert 64 << 20 <= span <= 512 << 20


def test_no_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        measure_limits(0)


@pytest.mark.parametrize(("threads", "size", "seconds"), [(0, 256, 1.0), (1, 100, 1.0), (1, 0, 1.0), (1, 256, 0.0)])
def test_native_refuses_what_it_cannot_measure(threads: int, size: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        native.read_bytes_per_s(threads, size, seconds)
