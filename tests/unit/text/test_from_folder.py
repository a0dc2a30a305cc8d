"""Tokenizers from a Hugging Face folder give the ids that the `tokenizers` library gives for the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from firstlight.errors import ModelError
from firstlight.text.tokenizer import Tokenizer

TEXTS = st.lists(
    st.sampled_from(["Hello", " world", "  ", "\n", "<s>", "</s>", "<|x|>", "<think>", "▁", "é", "🤦", "12", "a"]),
    max_size=10,
).map("".join)


def write_folder(folder: Path, library: LibraryTokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def byte_level(gpt2_metadata: dict[str, Any]) -> LibraryTokenizer:
    ids = {token: index for index, token in enumerate(gpt2_metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in gpt2_metadata["tokenizer.ggml.merges"]]
    library = LibraryTokenizer(models.BPE(ids, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>", AddedToken("<|x|>", lstrip=True, rstrip=True)])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


def spaced_library(metadata: dict[str, Any], style: str) -> LibraryTokenizer:
    """A sentencepiece-like tokenizer of phi-3's vocabulary, the space added as llama 2 does or later ones."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1}
    ranked = sorted(
        (-scores[ids[token]], ids[token[:cut]], token[:cut], token[cut:])
        for token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    )
    merges = [(left, right) for *_, left, right in ranked]
    library = LibraryTokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if style == "prepend":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=style, split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return library


def test_from_folder_byte_level_gives_the_library_ids(byte_level: LibraryTokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(
        write_folder(tmp_path / "m", byte_level, {"bos_token": "<s>", "eos_token": "</s>"})
    )

    @settings(max_examples=80, deadline=None)
    @given(TEXTS)
    def same_ids(text: str) -> None:
        expected = byte_level.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == expected
        assert tokenizer.decode(expected) == byte_level.decode(expected)
        as_text = tokenizer.encode(text)
        assert not any(map(tokenizer.is_special, as_text))
        assert tokenizer.decode(as_text) == text

    same_ids()
    assert tokenizer.adds_bos
    assert tokenizer.encode("a", add_special=True) == byte_level.encode("a").ids
    assert tokenizer.eos_ids == {byte_level.token_to_id("</s>")}
    assert tokenizer.vocab_size == byte_level.get_vocab_size()


@pytest.mark.parametrize("style", ["prepend", "first", "always", "never"])
def test_from_folder_spaced_gives_the_library_ids(style: str, phi3_metadata: dict[str, Any], tmp_path: Path) -> None:
    library = spaced_library(phi3_metadata, style)
    config = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}, "add_bos_token": True}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "m", library, config))

    @settings(max_examples=60, deadline=None)
    @given(TEXTS)
    def same_ids(text: str) -> None:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, parse_special=True) == expected
        assert tokenizer.decode(expected) == library.decode(expected)

    same_ids()
    assert tokenizer.encode("a", add_special=True)[0] == tokenizer.bos_id == 1


def test_from_folder_template_and_ends_are_read(byte_level: LibraryTokenizer, tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    folder = write_folder(tmp_path / "m", byte_level, config)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6, 999999999]}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template == "D"
    assert {5, 6} <= tokenizer.eos_ids
    assert 999999999 not in tokenizer.eos_ids
    assert not tokenizer.adds_bos, "without a bos_token there is nothing to add"
    (folder / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "F"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "no tokenizer.json"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"model": {"type": "WordPiece", "vocab": {}}}', "WordPiece"),
        ('{"model": {"type": "BPE", "vocab": 3}}', "not a valid tokenizer"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', "ids up to"),
        (
            '{"added_tokens": [{"id": 1}], "version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "added",
        ),
    ],
)
def test_from_folder_bad_file_raises_model_error(content: str | None, named: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=named):
        Tokenizer.from_folder(tmp_path)
