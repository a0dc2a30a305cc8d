"""The default model against the float32 oracle over the same weights: distributions and greedy answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firstlight.backend.cpu import CpuBackend, native_pack
from firstlight.config import EngineConfig
from firstlight.models.weights import LoadedModel, load_model
from firstlight.text import ChatTemplate, Tokenizer
from tests.oracle.compare import backend_logits, kl_divergence, log_softmax, windows
from tests.oracle.executor import Oracle

NUM_TOKENS = 192
MAX_MEAN_KL = 4e-3
"""Nats. The full run (benchmarks/quality.py) is the measure; this bound catches a kernel that has gone wrong."""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path, native=native_pack)


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_distributions_stay_near_the_float32_oracle(model: LoadedModel, kind: str) -> None:
    tokenizer = Tokenizer.from_gguf(model.tokenizer.metadata)
    template = ChatTemplate.of(tokenizer, model.chat_template)
    window = next(w for w in windows(tokenizer, template, NUM_TOKENS) if w.kind == kind)
    oracle = Oracle(model.program, model.weights, model.constants, kv_f16=False)
    reference = log_softmax(oracle.logits(window.token_ids))
    backend = CpuBackend(model, EngineConfig(threads=2, max_step_rows=512, max_model_len=512))
    mine = log_softmax(backend_logits(backend, window.token_ids))
    backend.close()
    kl = kl_divergence(reference, mine)
    assert kl.mean() < MAX_MEAN_KL
    assert (reference.argmax(axis=1) == mine.argmax(axis=1)).mean() > 0.93
    following = np.array(window.token_ids[1:])[:, None]
    gap = np.take_along_axis(mine[:-1] - reference[:-1], following, axis=1).mean()
    assert abs(gap) < 0.03
