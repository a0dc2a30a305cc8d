"""firstlight: an LLM server built around the first token and the gap before the next one.

Public names load on first use, so that `import firstlight` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.config import EngineConfig
    from firstlight.engine.engine import Engine
    from firstlight.engine.frontend import AsyncEngine
    from firstlight.engine.generation import Completion
    from firstlight.errors import (
        BackendError,
        ConfigError,
        FirstlightError,
        ModelError,
        OverloadedError,
        RequestError,
    )
    from firstlight.types import FinishReason, GrammarSpec, SamplingParams

__all__ = [
    "AsyncEngine",
    "BackendError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "FirstlightError",
    "GrammarSpec",
    "ModelError",
    "OverloadedError",
    "RequestError",
    "SamplingParams",
]

_MODULES = {
    "AsyncEngine": "engine.frontend",
    "BackendError": "errors",
    "Completion": "engine.generation",
    "ConfigError": "errors",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "FinishReason": "types",
    "FirstlightError": "errors",
    "GrammarSpec": "types",
    "ModelError": "errors",
    "OverloadedError": "errors",
    "RequestError": "errors",
    "SamplingParams": "types",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
