"""Builds a tokenizer from GGUF metadata. Knows the keys `tokenizer.ggml.*`, not the file they came from.

Source: the GGUF specification, and llama.cpp's reading of keys that the specification leaves open (defaults per kind of
tokenizer, user-defined tokens that are really control tokens, phi-3's tokens that swallow the space after them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from firstlight.errors import ModelError
from firstlight.text import pretokenize
from firstlight.text.vocabulary import (
    EOG_NAMES,
    MarkedToken,
    SpacePrefix,
    Vocabulary,
    bytes_of_byte_level,
    bytes_of_spaced,
)

__all__ = ["build"]


class _TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ROLE_KEYS = {
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "unknown_id": "unknown_token_id",
    "padding_id": "padding_token_id",
}
_EXTRA_EOS_KEYS = ("eot_token_id", "eom_token_id")
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>")


def build(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The library tokenizer (cuts and merges, no special tokens) and the vocabulary beside it.

    Raises:
        ModelError: a key is missing or out of range, or the kind of tokenizer is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"`tokenizer.ggml.model` is {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' (sentencepiece BPE)",
            param="tokenizer.ggml.model",
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _types(metadata, len(tokens))
    roles = {name: _id(metadata, key, len(tokens)) for name, key in _ROLE_KEYS.items()}
    marked = _marked(metadata, tokens, types, {roles["bos_id"], roles["eos_id"], roles["padding_id"]})
    verbatim = frozenset(token.token_id for token in marked.values())
    extra = (_id(metadata, key, len(tokens)) for key in _EXTRA_EOS_KEYS)
    common: dict[str, Any] = {
        "marked": marked,
        "control_ids": frozenset(i for i, t in enumerate(types) if t in (_TokenType.CONTROL, _TokenType.UNKNOWN))
        | {token.token_id for token in marked.values() if token.is_control},
        "extra_eos_ids": frozenset(i for i in extra if i is not None),
        "add_eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **roles,
    }
    if kind == "gpt2":
        return _byte_level(metadata, tokens, verbatim, common)
    return _spaced(metadata, tokens, types, verbatim, common)


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], verbatim: frozenset[int], common: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """A byte-level BPE tokenizer: gpt-2 and its descendants."""
    family = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre_tokenizer = pretokenize.byte_level(family)
    merges = [_pair(merge) for merge in _strings(metadata, "tokenizer.ggml.merges", may_be_empty=True)]
    takes_words = pretokenize.ignores_merges(family)
    hidden = common["control_ids"] if takes_words else frozenset()  # else a word could be a control token as a whole
    ids = {token: token_id for token_id, token in enumerate(tokens) if token_id not in hidden}
    encoder = _bpe(ids, merges, ignore_merges=takes_words)
    encoder.pre_tokenizer = pre_tokenizer
    vocabulary = Vocabulary(
        pieces=bytes_of_byte_level(tokens, verbatim),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pretokenize.writes_bos(family))),
        space_prefix=SpacePrefix.EVERY if metadata.get("tokenizer.ggml.add_space_prefix", False) else SpacePrefix.NONE,
        **common,
    )
    return encoder, vocabulary


def _spaced(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: Sequence[int],
    verbatim: frozenset[int],
    common: dict[str, Any],
) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """A sentencepiece BPE tokenizer with byte fallback: llama 2, phi 3, gemma."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(
            f"`tokenizer.ggml.scores` has {0 if scores is None else len(scores)} entries for {len(tokens)} tokens",
            param="tokenizer.ggml.scores",
        )
    byte_ids = frozenset(i for i, t in enumerate(types) if t == _TokenType.BYTE)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    not_merged = verbatim | byte_ids | common["control_ids"]
    mergeable = {token: scores[i] for token, i in ids.items() if i not in not_merged}
    unknown_id = common["unknown_id"]
    encoder = _bpe(
        ids,
        _merges_of_scores(mergeable, ids),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown_id is None else tokens[unknown_id],
    )
    encoder.normalizer = normalizers.Replace(" ", "▁")
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    vocabulary = Vocabulary(
        pieces=bytes_of_spaced(tokens, verbatim, byte_ids),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", True)),
        space_prefix=SpacePrefix.EVERY if adds_space else SpacePrefix.NONE,
        strips_space=adds_space,
        **common,
    )
    return encoder, vocabulary


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(ids, merges, **options))
    except Exception as error:  # the library raises bare Exception for a merge outside the vocabulary
        raise ModelError(
            f"`tokenizer.ggml.merges` do not fit the vocabulary: {error}", param="tokenizer.ggml.merges"
        ) from error


def _merges_of_scores(mergeable: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges that reproduce sentencepiece's rule: of all neighbours that make a piece, join the best-scored pair.

    Each way to cut a piece in two pieces is a merge; its rank is the score of the piece it makes.
    """
    ranked: list[tuple[float, int, str, str]] = []
    for token, score in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-score, ids[left], left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _marked(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], role_ids: set[int | None]
) -> dict[str, MarkedToken]:
    """Tokens found by spelling: control tokens, and user-defined ones.

    A user-defined token that ends a sequence, or is spelled like one that steers the model, counts as control: files
    mark some of these as user-defined (phi-3's `</s>`), and a user must not be able to type them.
    """
    eats_right = metadata.get("general.architecture") == "phi3"
    marked: dict[str, MarkedToken] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if not token or kind not in (_TokenType.CONTROL, _TokenType.USER_DEFINED, _TokenType.UNKNOWN):
            continue
        if kind == _TokenType.UNKNOWN and token.startswith("[PAD"):
            continue  # rows that only round the vocabulary up
        is_control = (
            kind != _TokenType.USER_DEFINED
            or token in EOG_NAMES
            or token_id in role_ids
            or _LOOKS_LIKE_CONTROL.fullmatch(token) is not None
        )
        spelled = token if is_control else token.replace("▁", " ")
        marked[spelled] = MarkedToken(token_id, is_control, eats_right=eats_right and token not in _PHI3_PLAIN)
    return marked


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelError(f"`tokenizer.ggml.merges` has {merge!r}, which is not a pair", param="tokenizer.ggml.merges")
    return merge[:cut], merge[cut + 1 :]


def _strings(metadata: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> list[str]:
    value = metadata.get(key)
    if value is None or (not may_be_empty and len(value) == 0):
        raise ModelError(f"`{key}` is missing or empty: the file has no usable tokenizer", param=key)
    strings = list(value)
    if not all(isinstance(string, str) for string in strings):
        raise ModelError(f"`{key}` holds values that are not strings", param=key)
    return strings


def _types(metadata: Mapping[str, Any], num_tokens: int) -> Sequence[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [_TokenType.NORMAL] * num_tokens
    if len(value) != num_tokens:
        raise ModelError(
            f"`tokenizer.ggml.token_type` has {len(value)} entries for {num_tokens} tokens",
            param="tokenizer.ggml.token_type",
        )
    return [int(kind) for kind in value]


def _id(metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    full_key = f"tokenizer.ggml.{key}"
    value = metadata.get(full_key)
    if value is None or int(value) == 0xFFFF_FFFF:  # how some files write "none"
        return None
    if not 0 <= int(value) < num_tokens:
        raise ModelError(f"`{full_key}` is {value}, the vocabulary has {num_tokens} tokens", param=full_key)
    return int(value)
