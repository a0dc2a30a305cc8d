"""What every result file says of itself, and where it goes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["conditions", "cpu_name", "version_of", "write"]


def version_of(command: Sequence[str]) -> str | None:
    """The first line that the command prints; None where it cannot be run or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines else None


def cpu_name() -> str:
    """Its name, and the widest vectors that int8 products can use: virtual machines hide which generation it is."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name, flags = (
            next(line.split(":", 1)[1].strip() for line in lines if line.startswith(key))
            for key in ("model name", "flags")
        )
        known = (("amx_int8", "AMX"), ("avx512_vnni", "AVX-512 VNNI"), ("avx_vnni", "AVX VNNI"), ("avx2", "AVX2"))
        return f"{name} ({next((title for flag, title in known if flag in flags.split()), 'no AVX2')})"
    return platform.machine()


def conditions(module: str, threads: int) -> dict[str, Any]:
    """When, how, on what and of which commit. Words of the command lose their folders."""
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": ["python", "-m", module, *(Path(word).name for word in sys.argv[1:])],
        "commit": version_of(["git", "describe", "--always", "--dirty=+", "--abbrev=40"]),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": threads},
    }


def write(document: dict[str, Any], out: Path | None) -> None:
    """As indented JSON, to a file or to standard output."""
    text = json.dumps(document, indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text)
