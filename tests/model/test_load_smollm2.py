"""The default model: it loads small and whole, and the oracle over it speaks English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from firstlight.models.weights import LoadedModel, load_model
from tests.oracle.executor import Oracle

START, END = 1, 2
MEMORY_SCRIPT = """
import sys
from pathlib import Path
from firstlight.models.weights import load_model

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
model = load_model(sys.argv[1])
print(resident() - before - model.weight_bytes)
"""


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> Tokenizer:
    table = model.tokenizer.metadata
    vocabulary = {token: index for index, token in enumerate(table["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ", 1)) for pair in table["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def oracle(model: LoadedModel) -> Oracle:
    return Oracle(model.program, model.weights, model.constants)


def test_layouts_and_sizes_are_those_of_the_file(model: LoadedModel) -> None:
    kinds = [weight.kind for weight in model.weights.values()]
    assert (kinds.count("nibble"), kinds.count("byte")) == (210, 1)
    assert not any(weight.scale_f32 for weight in model.weights.values())
    assert sum(model.types.values()) == sum(weight.data.nbytes for weight in model.weights.values()) + 140_544
    assert (model.spec.num_layers, model.spec.num_heads, model.spec.num_kv_heads) == (30, 9, 3)
    assert model.spec.tied_embeddings


def test_resident_memory_grows_by_little_more_than_the_weights(smollm2_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(smollm2_path)]
    excess = int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert excess < 60 << 20


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 2+2?", "The answer to this classic math problem is 4."),
    ],
)
def test_greedy_answer_of_the_oracle_is_english_and_ends(
    oracle: Oracle, tokenizer: Tokenizer, question: str, answer: str
) -> None:
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ids: list[int] = []
    for turn in (system, f"user\n{question}"):
        ids += [START, *tokenizer.encode(turn).ids, END, *tokenizer.encode("\n").ids]
    ids += [START, *tokenizer.encode("assistant\n").ids]
    expected = [*tokenizer.encode(answer).ids, END]
    before_each = range(len(ids) - 1, len(ids) - 1 + len(expected))
    # One pass instead of one per token: greedy decoding would pick each of these given those before it.
    picked = oracle.logits(ids + expected[:-1], before_each).argmax(axis=1)
    assert picked.tolist() == expected
