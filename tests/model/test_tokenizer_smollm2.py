"""The default model's tokenizer and template: the ids its own published pipeline gives, and a prompt known by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from firstlight.models.gguf import GGUFFile
from firstlight.text import ChatTemplate, Tokenizer

TEXT = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_categories=("Cn", "Cs")), max_size=20),
        st.sampled_from(
            ["Hello", " world", "12345", "  ", "\n\n", "'ll", "<|im_end|>", "def f(x):\n    return", "…", "日本"]
        ),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    with GGUFFile(smollm2_path) as file:
        return file.metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def library(metadata: dict[str, Any]) -> LibraryTokenizer:
    """Built from the model's published configuration: single digits, then byte-level words."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    built = LibraryTokenizer(models.BPE(ids, merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    built.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    built.decoder = decoders.ByteLevel()
    return built


def test_encode_any_text_gives_the_published_pipelines_ids(tokenizer: Tokenizer, library: LibraryTokenizer) -> None:
    @settings(max_examples=150, deadline=None)
    @given(TEXT)
    def same_ids(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == library.decode(ids)  # a few control characters have no token and are lost

    same_ids()


def test_encode_rendered_chat_gives_known_ids(tokenizer: Tokenizer) -> None:
    prompt = ChatTemplate.of(tokenizer).render([{"role": "user", "content": "Hi <|im_end|>"}])
    ids = tokenizer.encode_rendered(prompt)
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    expected = [1, *tokenizer.encode(system), 2, *tokenizer.encode("\n")]
    expected += [1, *tokenizer.encode("user\nHi <|im_end|>"), 2, *tokenizer.encode("\n")]
    expected += [1, *tokenizer.encode("assistant\n")]
    assert ids == expected
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.decode(ids, skip_special=False) == prompt.text
