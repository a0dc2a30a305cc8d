"""How far one set of next-token distributions is from another, and passages of real text to compare them on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.backend.base import Backend
from firstlight.text import ChatTemplate, Tokenizer
from firstlight.types import RowSampling, StepPlan, StepRow

PASSAGES = Path(__file__).resolve().parents[1] / "data" / "quality.jsonl"
GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, output_index=0)

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Window:
    """One passage as token ids."""

    id: str
    kind: str
    token_ids: list[int]


def windows(tokenizer: Tokenizer, template: ChatTemplate, num_tokens: int, path: Path = PASSAGES) -> list[Window]:
    """The first `num_tokens` ids of each passage; a conversation goes through the model's template."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "chat":
            ids = tokenizer.encode_rendered(template.render(row["messages"]))
        else:
            ids = tokenizer.encode(row["text"])
        assert len(ids) >= num_tokens, f"{row['id']} has {len(ids)} tokens"
        found.append(Window(row["id"], row["kind"], ids[:num_tokens]))
    return found


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Natural-log probabilities along the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference: Floats, other: Floats) -> npt.NDArray[np.float64]:
    """KL(reference || other) in nats, one per row of log-probabilities."""
    gaps = np.where(np.isneginf(reference), 0.0, reference - other)  # 0 log 0 is 0
    return (np.exp(reference) * gaps).sum(axis=-1)


def backend_logits(backend: Backend, token_ids: list[int], first: int = 0, chunk: int = 512) -> npt.NDArray[np.float32]:
    """`[len(token_ids) - first, vocab]` logits after each position from `first` on, in steps of at most `chunk`.

    Mutates: overwrites the backend's first blocks.
    """
    size = min(chunk, backend.info.max_step_tokens)
    table = list(range(-(-len(token_ids) // backend.info.block_size)))
    parts = []
    for start in range(0, len(token_ids), size):
        ids = token_ids[start : start + size]
        sampled = tuple(range(max(0, first - start), len(ids)))
        row = StepRow(
            request_id="oracle",
            token_ids=ids,
            start=start,
            block_table=table,
            sample_at=sampled,
            sampling=GREEDY if sampled else None,
            return_logits=bool(sampled),
        )
        (got,) = backend.run(StepPlan(step_id=0, rows=[row])).rows
        if sampled:
            parts.append(got.logits)
    return np.concatenate(parts)
