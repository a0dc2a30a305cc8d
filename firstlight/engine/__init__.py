"""Plan, run, absorb in one thread; text, streams and aborts around it. Public names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.engine.core import CoreStats, EngineCore
    from firstlight.engine.engine import Engine
    from firstlight.engine.frontend import AsyncEngine, EngineInfo
    from firstlight.engine.generation import Completion, Generation, collect
    from firstlight.engine.load import EngineParts, load_parts

__all__ = [
    "AsyncEngine",
    "Completion",
    "CoreStats",
    "Engine",
    "EngineCore",
    "EngineInfo",
    "EngineParts",
    "Generation",
    "collect",
    "load_parts",
]

_MODULES = {
    "AsyncEngine": "frontend",
    "Completion": "generation",
    "CoreStats": "core",
    "Engine": "engine",
    "EngineCore": "core",
    "EngineInfo": "frontend",
    "EngineParts": "load",
    "Generation": "generation",
    "collect": "generation",
    "load_parts": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
