"""Tokenizers and vectors for the tests of firstlight.text."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstlight.models.gguf import GGUFFile
from firstlight.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"


def read_metadata(packed: Path, folder: Path) -> dict[str, Any]:
    """Metadata of a gzipped GGUF file."""
    path = folder / packed.stem
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    with GGUFFile(path) as file:
        return file.metadata


@pytest.fixture(scope="session")
def gpt2_metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read_metadata(DATA / "ggml-vocab-gpt-2.gguf.gz", tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="session")
def phi3_metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return read_metadata(DATA / "ggml-vocab-phi-3.gguf.gz", tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="session")
def gpt2(gpt2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(gpt2_metadata)


@pytest.fixture(scope="session")
def phi3(phi3_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(phi3_metadata)


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def chatml(gpt2_metadata: dict[str, Any]) -> Tokenizer:
    """gpt-2's vocabulary with ChatML's two control tokens and a user-defined `<think>`."""
    return Tokenizer.from_gguf(with_tokens(gpt2_metadata, {**dict.fromkeys(CHATML_TOKENS, 3), "<think>": 4}))


def with_tokens(metadata: dict[str, Any], added: dict[str, int]) -> dict[str, Any]:
    """A copy of gpt-2's metadata with more tokens, given as spelling to token type."""
    changed = copy.copy(metadata)
    changed["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *added]
    changed["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *added.values()]
    return changed


@pytest.fixture(scope="session")
def tokenizer_named(gpt2: Tokenizer, phi3: Tokenizer, chatml: Tokenizer) -> Callable[[str], Tokenizer]:
    return {"gpt-2": gpt2, "phi-3": phi3, "chatml": chatml}.__getitem__


def tokenizer_vectors() -> list[dict[str, Any]]:
    with (DATA / "tokenizer_vectors.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def chat_vectors() -> dict[str, Any]:
    vectors: dict[str, Any] = json.loads(gzip.decompress((DATA / "chat_templates.json.gz").read_bytes()))
    return vectors
