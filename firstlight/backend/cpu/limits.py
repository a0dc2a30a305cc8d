"""What this machine can do at most, measured in seconds: DRAM bandwidth and int8 multiply-adds.

Both bound a model: decode reads every weight once a step, prefill multiplies with each of them. Knows no model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import BackendError, ConfigError

__all__ = ["MachineLimits", "measure_limits"]

_MIB = 1 << 20
_MAX_SPAN_BYTES = 512 * _MIB


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The best that `threads` threads reached together. `instructions` is the set the loops used, as our kernels do."""

    threads: int
    dram_gb_s: float
    """GB/s (10^9 bytes) of reading spans that no cache holds."""
    int8_gmac_s: float
    """10^9 multiply-adds per second of unsigned 4-bit codes with int8 values, operands in registers and L1 cache."""
    instructions: str


def measure_limits(threads: int, seconds: float = 1.0) -> MachineLimits:
    """The limits of `threads` threads, `seconds` spent on each of the two. The best pass counts, not the mean.

    Raises:
        ConfigError: `threads` below 1.
        BackendError: the native module is not built, or there is no memory to read.
    """
    if threads < 1:
        raise ConfigError(f"`threads` is {threads}: at least 1 is needed to measure")
    try:
        from firstlight.backend.cpu import _limits
    except ImportError as error:
        raise BackendError(f"the native module of machine limits cannot be loaded: {error}") from None
    span = span_bytes(threads)
    try:
        read = _limits.read_bytes_per_s(threads, span, seconds)
    except RuntimeError as error:
        raise BackendError(f"{error}: {threads} x {span // _MIB} MiB were asked for") from None
    macs = _limits.macs_per_s(threads, seconds)
    return MachineLimits(threads, read / 1e9, macs / 1e9, _limits.instructions())


def span_bytes(threads: int) -> int:
    """What each thread reads: together at least four times the last-level cache, so that it comes from DRAM."""
    wanted = max(64 * _MIB, 4 * _last_cache_bytes() // threads)
    return min(_MAX_SPAN_BYTES, wanted) // 4096 * 4096


def _last_cache_bytes() -> int:
    sizes = [_size_of(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 * _MIB)


def _size_of(path: Path) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0
