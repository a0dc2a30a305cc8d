"""The tokenizer from GGUF metadata: ids of the reference, special tokens, decoding, errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from firstlight.errors import ModelError
from firstlight.text.pretokenize import families
from firstlight.text.tokenizer import Tokenizer

from .conftest import CHATML_TOKENS, read_metadata, tokenizer_vectors, with_tokens

VECTORS = tokenizer_vectors()
SAMPLE = "Hello, y'all!  I'VE 12345 apples (½)\n\n\t日本語 नमस्ते 🤦🏼‍♂️ x²\r\n  end "
# Without unassigned code points: two regular-expression engines may know different versions of Unicode.
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cn", "Cs")), max_size=60)
LOOSE_TEXT = st.lists(
    st.one_of(
        ANY_TEXT, st.sampled_from(["'s", "'LL", " ", "  ", "\n", "\r\n", "123", "4567", " \n ", "...", "don't", "é"])
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["id"])
def test_encode_reference_string_gives_reference_ids(
    row: dict[str, Any], tokenizer_named: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_named(row["vocab"])
    ids = tokenizer.encode(row["text"])
    assert ids == row["ids"]
    assert tokenizer.decode(ids) == row["text"]


def test_encode_falcon_strings_give_reference_ids(shared_dir: Path, tmp_path: Path) -> None:
    vectors = shared_dir / "workloads" / "vectors"
    tokenizer = Tokenizer.from_gguf(read_metadata(vectors / "vocab" / "ggml-vocab-falcon.gguf.gz", tmp_path))
    with (vectors / "tokenizer_llamacpp.jsonl").open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["vocab"] == "falcon"]
    assert len(rows) == 20
    for row in rows:
        assert tokenizer.encode(row["text"]) == row["ids"]


@pytest.mark.parametrize("family", families())
def test_encode_every_family_decodes_to_the_same_text(family: str, gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(gpt2_metadata | {"tokenizer.ggml.pre": family})
    ids = tokenizer.encode(SAMPLE)
    assert tokenizer.decode(ids) == SAMPLE
    assert tokenizer.encode("") == []


def _library(metadata: dict[str, Any], *cuts: pre_tokenizers.PreTokenizer, **options: Any) -> LibraryTokenizer:
    """The same vocabulary through the library alone, cut as a family's tokenizer.json does."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = LibraryTokenizer(models.BPE(ids, merges, **options))
    library.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    return library


_PLAIN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def pairs(gpt2_metadata: dict[str, Any]) -> dict[str, tuple[Tokenizer, LibraryTokenizer]]:
    """Families beside the pre-tokenizer that their models publish."""
    cuts: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(Regex(_LLAMA3.replace("{1,3}", "")), "isolated"), _PLAIN_BYTES],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _PLAIN_BYTES],
    }
    return {
        family: (
            Tokenizer.from_gguf(gpt2_metadata | {"tokenizer.ggml.pre": family}),
            _library(gpt2_metadata, *steps, ignore_merges=family == "llama-bpe"),
        )
        for family, steps in cuts.items()
    }


@pytest.mark.parametrize("family", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_encode_any_text_matches_published_pre_tokenizer(
    family: str, pairs: dict[str, tuple[Tokenizer, LibraryTokenizer]]
) -> None:
    ours, library = pairs[family]

    @settings(max_examples=80, deadline=None)
    @given(LOOSE_TEXT)
    def same_ids(text: str) -> None:
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids

    same_ids()


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT)
def test_decode_of_encode_any_text_gives_text(text: str, gpt2: Tokenizer, phi3: Tokenizer) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text
    spaced = text.replace("▁", " ")  # sentencepiece writes a space as U+2581 and cannot tell them apart
    assert phi3.decode(phi3.encode(text)) == spaced


SPECIAL_PIECES = [
    *CHATML_TOKENS,
    "<|",
    "|>",
    "im_end",
    "<|im_",
    "end|>",
    "<s>",
    "</s>",
    "<|end|>",
    "<|endoftext|>",
    " ",
    "a",
]


@settings(max_examples=120, deadline=None)
@given(pieces=st.lists(st.sampled_from(SPECIAL_PIECES), max_size=12))
def test_encode_user_text_never_gives_control_ids(pieces: list[str], chatml: Tokenizer, phi3: Tokenizer) -> None:
    text = "".join(pieces)
    for tokenizer in (chatml, phi3):
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == text


def test_encode_parse_special_gives_control_ids(chatml: Tokenizer) -> None:
    start, end = (chatml.special_tokens[token] for token in CHATML_TOKENS)
    ids = chatml.encode("<|im_start|>user\nhi<|im_end|>", parse_special=True)
    assert (ids[0], ids[-1]) == (start, end)
    assert chatml.decode(ids) == "user\nhi"
    assert chatml.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_encode_user_defined_token_is_one_id_in_any_text(chatml: Tokenizer) -> None:
    ids = chatml.encode("a<think>b")
    assert ids[1] == chatml.token_to_id("<think>")
    assert not chatml.is_special(ids[1])
    assert chatml.decode(ids) == "a<think>b"


def test_encode_overlapping_spellings_takes_the_longest(gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(with_tokens(gpt2_metadata, {"<a>": 4, "<a>b": 4, "<a>bc": 4}))
    assert tokenizer.encode("<a>bc") == [tokenizer.token_to_id("<a>bc")]
    assert tokenizer.encode("<a>b<a>") == [tokenizer.token_to_id("<a>b"), tokenizer.token_to_id("<a>")]


def test_encode_user_defined_end_token_counts_as_control(phi3: Tokenizer) -> None:
    assert phi3.is_special(2)
    assert 2 not in phi3.encode("</s>")


def test_encode_add_special_writes_bos_once(phi3: Tokenizer) -> None:
    assert phi3.bos_id == 1
    assert phi3.encode("hi", add_special=True) == [1, *phi3.encode("hi")]
    assert phi3.encode("<s>hi", add_special=True, parse_special=True) == [1, *phi3.encode("hi")]
    assert phi3.encode("", add_special=True) == [1]


def test_encode_add_special_without_flag_writes_nothing(gpt2: Tokenizer) -> None:
    assert gpt2.encode("hi", add_special=True) == gpt2.encode("hi")


def test_encode_phi3_token_swallows_space_after_it(phi3: Tokenizer) -> None:
    ids = phi3.encode("<|user|> \n hi<|end|>\n<|assistant|>\n", parse_special=True)
    assert ids == [32010, *phi3.encode("hi"), 32007, 32001]


def test_encode_lone_surrogate_becomes_replacement_character(gpt2: Tokenizer) -> None:
    assert gpt2.encode("a\ud800b") == gpt2.encode("a\ufffdb")


def test_eos_ids_include_end_of_turn_tokens(gpt2: Tokenizer, chatml: Tokenizer, phi3: Tokenizer) -> None:
    assert gpt2.eos_ids == {50256}
    assert chatml.eos_ids == {50256, chatml.special_tokens["<|im_end|>"]}
    assert phi3.eos_ids == {32000, 32007, 2}


def test_eos_ids_harmony_end_of_message_is_not_end_of_answer(gpt2_metadata: dict[str, Any]) -> None:
    added = {"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}
    tokenizer = Tokenizer.from_gguf(with_tokens(gpt2_metadata, added))
    assert tokenizer.special_tokens["<|end|>"] not in tokenizer.eos_ids
    assert {tokenizer.special_tokens["<|return|>"], tokenizer.special_tokens["<|call|>"]} <= tokenizer.eos_ids


def test_eos_ids_include_turn_ids_of_metadata(gpt2_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(gpt2_metadata | {"tokenizer.ggml.eot_token_id": 7})
    assert tokenizer.eos_ids == {50256, 7}


def test_decode_id_outside_vocabulary_gives_nothing(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 50257
    assert gpt2.decode([gpt2.vocab_size, -1, *gpt2.encode("ok"), 10**9]) == "ok"
    assert gpt2.id_to_bytes(-1) == gpt2.id_to_bytes(gpt2.vocab_size) == b""


def test_decode_continuation_keeps_the_leading_space(phi3: Tokenizer) -> None:
    ids = phi3.encode("time")
    assert phi3.decode(ids) == "time"
    assert phi3.decode(ids, is_continuation=True) == " time"


def test_id_to_bytes_gives_raw_bytes(gpt2: Tokenizer, phi3: Tokenizer) -> None:
    assert gpt2.bytes_of(gpt2.encode("é🤦")) == "é🤦".encode()
    assert phi3.id_to_bytes(3) == b"\x00"
    assert phi3.id_to_piece(1) == "<s>"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "not strings"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["nopair"]}, "nopair"),
        ({"tokenizer.ggml.merges": ["zzzzzzzz qqqqqqqq"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.bos_token_id": 50257}, "tokenizer.ggml.bos_token_id"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
    ],
)
def test_from_gguf_bad_metadata_raises_model_error_naming_it(
    change: dict[str, Any], named: str, gpt2_metadata: dict[str, Any]
) -> None:
    metadata = copy.copy(gpt2_metadata) | change
    with pytest.raises(ModelError, match=named):
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})
