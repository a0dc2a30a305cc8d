"""`firstlight version`."""

from __future__ import annotations

import importlib.metadata
import platform

from firstlight.cli.arguments import Invocation

__all__ = ["package_version", "run"]


def package_version() -> str:
    """The installed package's version."""
    return importlib.metadata.version("firstlight")


def run(invocation: Invocation) -> int:
    """Prints the version, Python's and the machine's."""
    print(f"firstlight {package_version()} (Python {platform.python_version()}, {platform.machine()})")
    return 0
