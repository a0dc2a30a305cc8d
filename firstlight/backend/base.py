"""The Backend protocol: what a device must do. Knows plans and results, not requests, text or scheduling."""

from __future__ import annotations

from typing import Protocol

import msgspec

from firstlight.types import StepPlan, StepResult

__all__ = ["Backend", "BackendInfo"]


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded backend offers. `fingerprint` names weights + KV layout: equal fingerprints may share KV."""

    name: str
    vocab_size: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_step_tokens: int
    max_step_rows: int
    max_step_samples: int = 0
    """Positions sampled in one step, at least `max_step_rows`; 0: as many as tokens. Drafts take several a row."""
    kv_bytes_per_block: int
    weight_bytes: int
    num_threads: int
    fingerprint: bytes
    hidden_size: int = 0
    """Width of the hidden states that rows may ask for; 0: this backend gives none."""
    layouts: dict[str, int] = {}
    """Bytes of weights per layout, for the start-up screen."""


class Backend(Protocol):
    """One loaded model on one device. One thread calls it; `run` releases the GIL while it computes."""

    @property
    def info(self) -> BackendInfo:
        """Sizes and limits, fixed after load."""

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step.

        Raises:
            BackendError: the plan breaks a limit of `info`, or the device failed.
        """

    def trace_ops(self, on: bool) -> None:
        """From the next step on, results say how long each kind of op took, or no longer do. Off at first."""

    def read_blocks(self, block_ids: list[int]) -> bytes:
        """The KV bytes of the blocks, `kv_bytes_per_block` each, in order. Another thread may ask for blocks that no
        running step writes."""

    def write_blocks(self, block_ids: list[int], data: bytes) -> None:
        """Puts bytes from `read_blocks` into blocks. Raises BackendError on a wrong size."""

    def close(self) -> None:
        """Frees the device's memory and threads. Idempotent."""
