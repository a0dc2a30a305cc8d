"""What a tokenizer is made of, whichever file it came from: pieces as bytes, special tokens, ids with a role.

Knows bytes and ids, not how text is cut into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "EOG_NAMES",
    "MarkedToken",
    "SpacePrefix",
    "Vocabulary",
    "bytes_of_byte_level",
    "bytes_of_spaced",
    "trie_regex",
]

EOG_NAMES = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|end▁of▁sentence|>",
        "<｜end▁of▁sentence｜>",
        "<|EOT|>",
        "<EOT>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "</s>",
    }
)
"""Tokens that end a turn by their name, whether or not the file lists them as its end-of-sequence id."""


class SpacePrefix(Enum):
    """Where a sentencepiece-like tokenizer puts a space that the text does not have."""

    NONE = "none"
    FIRST = "first"
    """Before the text, if it does not begin with a special token."""
    EVERY = "every"
    """Before each stretch of text between special tokens."""


@dataclass(frozen=True, slots=True)
class MarkedToken:
    """A token that is found in text by its spelling, before anything else is cut.

    A control token steers the model (turn markers, BOS) and must never come from a user's text; the others
    (user-defined) are ordinary text that happens to have one id. `eats_left` and `eats_right` swallow the whitespace
    beside the token.
    """

    token_id: int
    is_control: bool
    eats_left: bool = False
    eats_right: bool = False
    is_whole_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything about a tokenizer but the merges.

    `pieces[i]` is what id i adds to the output, as bytes. `strips_space`: the first space of a whole decoded text is
    the tokenizer's own. `skips_prefix_before_space`: no space is added before text that begins with one.
    """

    pieces: list[bytes]
    marked: Mapping[str, MarkedToken]
    control_ids: frozenset[int]
    bos_id: int | None = None
    eos_id: int | None = None
    unknown_id: int | None = None
    padding_id: int | None = None
    extra_eos_ids: frozenset[int] = field(default_factory=frozenset)
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: SpacePrefix = SpacePrefix.NONE
    skips_prefix_before_space: bool = False
    strips_space: bool = False
    chat_template: str | None = None


def _byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's character for each byte, inverted: character code to the Latin-1 character of the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {256 + index: chr(byte) for index, byte in enumerate(others)}


def bytes_of_byte_level(tokens: Iterable[str], verbatim_ids: frozenset[int]) -> list[bytes]:
    """The bytes of each byte-level token; `verbatim_ids`, and what is not spelled in the byte alphabet, are UTF-8."""
    table = _byte_alphabet()
    pieces: list[bytes] = []
    for token_id, token in enumerate(tokens):
        if token_id not in verbatim_ids:
            try:
                spelled = token.translate(table)
                if " " not in token:  # a real space is not in the alphabet: the token is written as plain text
                    pieces.append(spelled.encode("latin-1"))
                    continue
            except UnicodeEncodeError:
                pass
        pieces.append(token.encode("utf-8", "replace"))
    return pieces


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_spaced(
    tokens: Iterable[str], verbatim_ids: frozenset[int], byte_ids: frozenset[int] | None
) -> list[bytes]:
    """The bytes of each sentencepiece token: U+2581 is a space, `<0x0A>` is one byte.

    Args:
        byte_ids: the ids that are bytes; None takes every token spelled like one.
    """
    pieces: list[bytes] = []
    for token_id, token in enumerate(tokens):
        if token_id in verbatim_ids:
            pieces.append(token.encode("utf-8", "replace"))
            continue
        if (byte_ids is None or token_id in byte_ids) and (match := _BYTE_TOKEN.fullmatch(token)):
            pieces.append(bytes.fromhex(match[1]))
            continue
        pieces.append(token.replace("▁", " ").encode("utf-8", "replace"))
    return pieces


def trie_regex(words: Iterable[str]) -> re.Pattern[str] | None:
    """An expression that finds the longest of `words` at each place; None when there are none.

    Cost: one step per character of the longest word at a place, however many words there are (a plain alternation would
    try each word, which lets a hostile text of `<<<<` cost thousands of attempts per character).
    """
    root: dict[str, dict[str, object]] = {}
    for word in words:
        node: dict[str, object] = root  # type: ignore[assignment]
        for character in word:
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node[""] = {}
    return re.compile(_node_regex(root)) if root else None  # type: ignore[arg-type]


def _node_regex(node: dict[str, object]) -> str:
    """The expression for what may follow a trie node; a chain of single children is written out flat."""
    chain = ""
    while len(node) == 1 and "" not in node:
        ((character, child),) = node.items()
        chain += re.escape(character)
        node = child  # type: ignore[assignment]
    branches = [re.escape(c) + _node_regex(child) for c, child in node.items() if c]  # type: ignore[arg-type]
    if not branches:
        return chain
    group = f"(?:{'|'.join(branches)})"
    return chain + (f"{group}?" if "" in node else group)
