"""From a configuration to the parts an engine runs on. Knows which rooms build them, nothing of requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstlight.backend.base import Backend
from firstlight.config import EngineConfig
from firstlight.errors import ConfigError, ModelError
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from firstlight.models.weights import TokenizerSource

__all__ = ["EngineParts", "load_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A loaded backend, and the text side that goes with its weights."""

    backend: Backend
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_name: str
    num_parameters: int = 0
    """For the start-up screen, as the next; 0 where there are no weights."""
    file_bytes: int = 0


def load_parts(config: EngineConfig) -> EngineParts:
    """Loads what `config` names. Blocks for as long as it takes.

    Raises:
        ConfigError: an option or the model cannot be used.
    """
    if config.backend == "fake":
        from firstlight.engine.fake import fake_parts

        return fake_parts(config)
    if config.backend == "cpu":
        return _cpu_parts(config)
    raise ConfigError(f"`backend` is {config.backend!r}: use cpu or fake", param="backend")


def _cpu_parts(config: EngineConfig) -> EngineParts:
    from firstlight.backend.cpu import CpuBackend, native_pack
    from firstlight.models.store import MODELS, resolve_model
    from firstlight.models.weights import load_model

    model = load_model(resolve_model(config.model), native=native_pack)
    num_parameters = sum(weight.rows * weight.cols for weight in model.weights.values())
    with ThreadPoolExecutor(1, "firstlight-load") as pool:  # copying weights leaves the interpreter free
        reading = pool.submit(_tokenizer, model.tokenizer)
        backend = CpuBackend(model, config, release=True)
        try:
            tokenizer = reading.result()
            chat_template = _chat_template(tokenizer, model.chat_template)
        except BaseException:
            backend.close()
            raise
    return EngineParts(
        backend=backend,
        tokenizer=tokenizer,
        chat_template=chat_template,
        model_name=config.model if config.model in MODELS else model.name,
        num_parameters=num_parameters,
        file_bytes=model.file_bytes,
    )


def _tokenizer(source: TokenizerSource) -> Tokenizer:
    return Tokenizer.from_gguf(source.metadata) if source.kind == "gguf" else Tokenizer.from_folder(source.path)


def _chat_template(tokenizer: Tokenizer, source: str | None) -> ChatTemplate | None:
    """The model's template; None for a model that has none. Raises ModelError for one that is broken."""
    try:
        return ChatTemplate.of(tokenizer, source)
    except ModelError:
        if source is None and tokenizer.chat_template is None:
            return None
        raise
