"""The engine as the rest of the process sees it: text in, decoded deltas out, on one asyncio loop.

Knows text, streams and aborts; knows no blocks and no steps. One wake-up of the loop per step carries every event of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.backend.base import Backend, BackendInfo
from firstlight.config import EngineConfig
from firstlight.types import OutputDelta, SamplingParams

__all__ = ["AsyncEngine", "EngineInfo", "Generation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is being served."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    backend: BackendInfo


class Generation(AsyncIterator[OutputDelta]):
    """One running `generate` call: iterate it for deltas; `aclose` (or dropping it) aborts what is still open.

    Deltas that nobody takes are merged, so a slow reader holds at most one pending delta per choice.
    The last delta of each of the `n` choices has `finish` and `usage` set; iteration ends after the last of them.
    A cancelled `__anext__` aborts too.
    """

    request_id: str

    async def __anext__(self) -> OutputDelta:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Aborts every choice that has not ended. Idempotent."""
        raise NotImplementedError


class AsyncEngine:
    """Loads a model, owns the core's thread, and turns requests into streams of `OutputDelta`.

    Every method is called on the loop that ran `start`, except `stats`, `ready`, `failed` and `info` (any thread).
    """

    def __init__(self, config: EngineConfig) -> None:
        raise NotImplementedError

    @classmethod
    def from_parts(
        cls, backend: Backend, tokenizer: Any, chat_template: Any, config: EngineConfig, model_name: str
    ) -> AsyncEngine:
        """An engine over parts that are already loaded (tests, the command line). `chat_template` may be None."""
        raise NotImplementedError

    async def start(self) -> None:
        """Loads in a worker thread, starts the core and runs the warm-up. Raises ConfigError or ModelError."""
        raise NotImplementedError

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets open ones run `drain_s` seconds, aborts the rest, frees the backend. Idempotent."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Warm-up has passed, nothing has failed, and it is not closing."""
        raise NotImplementedError

    @property
    def failed(self) -> str | None:
        """Why the core cannot serve any more; None while it can."""
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """What is served; valid after `start`."""
        raise NotImplementedError

    def stats(self) -> Any:
        """Counters and gauges as of now (a `CoreStats`)."""
        raise NotImplementedError

    async def check(self) -> None:
        """Audits every block, table and queue between two steps. Raises AssertionError saying what is broken."""
        raise NotImplementedError

    async def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a plain prompt; special tokens of the model (BOS) are added, text that looks like one stays text.

        A list of ids is checked against the vocabulary. Raises RequestError.
        """
        raise NotImplementedError

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **template_args: Any
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template. Raises RequestError."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        raise NotImplementedError

    def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: bytes = b"",
        return_logits: bool = False,
        forced_ids: Sequence[int] = (),
    ) -> Generation:
        """Submits at once and returns the stream of deltas.

        Args:
            priority: smaller goes first.
            cache_salt: requests share cached prefixes only under an equal salt.
            forced_ids: output ids to take in place of sampled ones.

        Raises:
            RequestError: at the call: the prompt is empty or too long, an id or a parameter is out of range.
            OverloadedError: at the call: `max_queue` requests wait already, or the engine is closing (status 503).
            BackendError: at the call: the core has failed. (A failure later is a delta with finish "error".)
        """
        raise NotImplementedError
