"""What can be seen of this machine and of what else it does: plain readings of /proc, /sys and the environment."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

__all__ = ["build_finding", "cpu_features", "findings", "shares_taken"]

_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
_BUSY_SHARE = 0.1
_STEAL_SHARE = 0.02


def cpu_features() -> tuple[str, ...]:
    """The instruction sets that matter here and this CPU has, in a fixed order."""
    flags: set[str] = set()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            break
    return tuple(feature for feature in _FEATURES if feature in flags)


def shares_taken(seconds: float) -> tuple[float, float]:
    """Shares of all cores' time that other programs and the hypervisor took while this one slept `seconds`."""
    before = _cpu_times()
    time.sleep(seconds)
    after = _cpu_times()
    spent = [b - a for a, b in zip(before, after, strict=True)]
    total = sum(spent[:8]) or 1.0
    idle, steal = spent[3] + spent[4], spent[7] if len(spent) > 7 else 0.0
    return (total - idle - steal) / total, steal / total


def findings(threads: int, weight_bytes: int) -> list[str]:
    """What is in the way, one sentence each, with what to do; none found gives none."""
    found = []
    busy, stolen = shares_taken(0.5)
    if busy > _BUSY_SHARE:
        found.append(f"other programs use {100 * busy:.0f} % of the cores: steps wait for them; stop them")
    if stolen > _STEAL_SHARE:
        found.append(f"the hypervisor takes {100 * stolen:.0f} % of the cores' time: a neighbour on the host is busy")
    allowed = len(os.sched_getaffinity(0))
    if threads > allowed:
        found.append(f"{threads} threads on {allowed} usable cores: they wait for each other; use --threads {allowed}")
    limit = _cgroup_cores()
    if limit and limit < threads:
        found.append(f"{threads} threads in a container of {limit:.1f} cores: use --threads {int(limit) or 1}")
    memory = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo")}
    if memory.get("SwapTotal", 0) - memory.get("SwapFree", 0) > 64 << 20:
        found.append("memory has been swapped out: a step that touches it waits for the disk; free memory")
    if memory.get("MemAvailable", 1 << 60) < 2 * weight_bytes:
        free = memory["MemAvailable"] / 1e6
        found.append(f"{free:.0f} MB of memory are free, the weights take {weight_bytes / 1e6:.0f} MB: it may swap")
    if throttled := _throttled():
        found.append(throttled)
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    if proxies and "127.0.0.1" not in os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")):
        found.append(f"`{proxies[0]}` is set and `no_proxy` lacks 127.0.0.1: clients may go by way of the proxy")
    return [*found, *build_finding(cpu_features())]


def build_finding(features: tuple[str, ...]) -> list[str]:
    """What is wrong with the native build, or could be used of this CPU and is not."""
    if importlib.util.find_spec("firstlight.backend.cpu._native") is None:
        return ["the native kernels are not built: reinstall the package with a C++ compiler at hand"]
    if not {"avx2", "fma", "f16c"} <= set(features):
        return ["this CPU lacks AVX2, FMA or F16C: the scalar kernels run, several times slower"]
    if "avx_vnni" in features and "avx512_vnni" not in features:
        return ["this CPU has avx_vnni, which the AVX2 kernels do not use"]
    return []


def _throttled() -> str:
    """A sentence where the clock is held well below the CPU's own maximum."""
    folder = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    now, most = _lines(str(folder / "scaling_max_freq")), _lines(str(folder / "cpuinfo_max_freq"))
    if now and most and int(now[0]) < 0.9 * int(most[0]):
        return f"the clock is held at {int(now[0]) / 1e6:.1f} GHz of {int(most[0]) / 1e6:.1f}: heat or power settings"
    return ""


def _cgroup_cores() -> float | None:
    lines = _lines("/sys/fs/cgroup/cpu.max")
    if not lines or lines[0].startswith("max"):
        return None
    quota, period = lines[0].split()
    return int(quota) / int(period)


def _cpu_times() -> list[float]:
    lines = _lines("/proc/stat")
    return [float(part) for part in lines[0].split()[1:]] if lines else [0.0] * 10


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
