"""Every option of engine and server: frozen dataclasses, checked once. Flags and docs are generated from the field metadata.

Knows values and their limits, not where they came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EngineConfig", "option"]


def option(default: Any, text: str, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries its one help sentence, its unit and its allowed values."""
    return field(default=default, metadata={"help": text, "unit": unit, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. 0 means: choose for this machine."""

    model: str = option("smollm2-135m", "GGUF file, Hugging Face folder, hf:org/name[:file], or a short name")
    backend: str = option("cpu", "where the model runs", choices=("cpu", "fake"))
    threads: int = option(0, "compute threads; 0 = one per physical core this process may use")
    block_size: int = option(16, "tokens per KV block", "tokens", )
    kv_memory_mb: int = option(0, "memory for KV blocks; 0 = enough for 4 full contexts, at most a quarter of free memory", "MB")
    num_blocks: int = option(0, "KV blocks; overrides kv_memory_mb when above 0", "blocks")
    max_model_len: int = option(0, "longest prompt + output; 0 = what the model was trained for", "tokens")
    max_step_rows: int = option(64, "requests that may run in one step", "rows")
    max_step_tokens: int = option(512, "tokens computed in one step", "tokens")
    prefix_cache: bool = option(True, "reuse the KV of full blocks that an earlier request computed")
    itl_slo_ms: float = option(0.0, "longest gap between tokens a step may cause; 0 = a multiple of this machine's decode step", "ms")
    max_queue: int = option(1024, "requests that may wait", "requests")
    seed: int = option(0, "base of the seeds drawn for requests that bring none")
