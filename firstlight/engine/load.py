"""From a configuration to the parts an engine runs on. Knows which rooms build them, nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.backend.base import Backend
from firstlight.config import EngineConfig
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer

__all__ = ["EngineParts", "load_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A loaded backend, and the text side that goes with its weights."""

    backend: Backend
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_name: str
    num_parameters: int = 0
    """For the start-up screen, as the next two; 0 and "" where there is no such thing."""
    file_bytes: int = 0
    kernels: str = ""
    """The instruction set that the backend's kernels use."""


def load_parts(config: EngineConfig) -> EngineParts:
    """Loads what `config` names. Blocks for as long as it takes.

    Raises:
        ConfigError: an option or the model cannot be used.
    """
    from firstlight.engine.fake import fake_parts

    return fake_parts(config)
