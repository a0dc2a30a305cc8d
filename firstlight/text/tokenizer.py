"""Text to token ids and back, for a GGUF file's metadata or a Hugging Face folder, over the Rust `tokenizers` library.

Knows text and ids, not messages: chat templates are `firstlight.text.template`. The library only cuts and merges;
special tokens and decoding are done here, so that who may write a special token is decided in one place and bytes are
never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from firstlight.text.rendered import RenderedPrompt
from firstlight.text.vocabulary import EOG_NAMES, MarkedToken, SpacePrefix, Vocabulary, trie_regex

__all__ = ["Tokenizer"]

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Turns text into ids and ids into text. Immutable after construction, so threads may share one.

    Special tokens written by a user stay text: `encode` cuts control tokens only with `parse_special`, and
    `encode_rendered` only where the chat template itself wrote them. User-defined tokens are text with an id of their
    own and are always cut, as the model saw them in training.
    """

    def __init__(self, encoder: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._control = {text: token for text, token in vocabulary.marked.items() if token.is_control}
        self._control_regex = trie_regex(self._control)
        self._user_regex = trie_regex(t for t, token in vocabulary.marked.items() if not token.is_control)
        self._eos_ids = _end_ids(vocabulary)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata (keys `tokenizer.ggml.*`).

        Raises:
            ModelError: a key is missing, out of range, or names a kind of tokenizer that is not supported.
        """
        from firstlight.text.from_gguf import build

        return cls(*build(metadata))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: tokenizer.json, and tokenizer_config.json where present.

        Raises:
            ModelError: tokenizer.json is missing, is not valid, or is of a kind that is not supported.
        """
        from firstlight.text.from_folder import build

        return cls(*build(Path(folder)))

    @property
    def vocab_size(self) -> int:
        """How many ids have a piece. The model's logits may be wider (padding rows)."""
        return len(self._vocabulary.pieces)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence, or None."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The id the file names as its end of sequence, or None."""
        return self._vocabulary.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer: end of sequence, end of turn, and tokens known by name to mean the same."""
        return self._eos_ids

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` begins a text with BOS."""
        return self._vocabulary.add_bos

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that came with the model, or None."""
        return self._vocabulary.chat_template

    @property
    def special_tokens(self) -> dict[str, int]:
        """Spelling to id of every control token, by id."""
        return {
            text: token.token_id for text, token in sorted(self._control.items(), key=lambda item: item[1].token_id)
        }

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out when it skips special tokens."""
        return token_id in self._vocabulary.control_ids

    def id_to_bytes(self, token_id: int) -> bytes:
        """What the id adds to the output; empty for an id without a piece (padding rows of the model's head)."""
        pieces = self._vocabulary.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def id_to_piece(self, token_id: int) -> str:
        """`id_to_bytes` as text; bytes that are no whole code point become U+FFFD."""
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, text: str) -> int | None:
        """The id of a special token by its spelling, or None."""
        token = self._vocabulary.marked.get(text)
        return token.token_id if token else None

    @property
    def strips_first_space(self) -> bool:
        """Whether the first space of a whole decoded text is the tokenizer's own and not the text's."""
        return self._vocabulary.strips_space

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: write BOS (and EOS) where the model wants them, BOS never twice.
            parse_special: turn control tokens spelled in the text into their ids; for trusted text alone.

        Cost: linear. Merging runs without the GIL, so a worker thread may tokenise a long prompt while others run.
        """
        return self._encode(text, text if parse_special else None, add_special)

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered chat prompt; only control tokens that the template wrote become their ids.

        Text is cut nowhere else, so merges across the border between template and message are the same as in
        `encode(prompt.text, parse_special=True)` whenever no message spells a control token. BOS is written if the
        model wants one and the template has not.
        """
        return self._encode(prompt.text, prompt.guarded, add_special=True)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, is_continuation: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: leave control tokens out.
            is_continuation: the text follows a prompt's, so a leading space is part of it (sentencepiece vocabularies
                otherwise drop the space they put before the first word).
        """
        text = self.bytes_of(ids, skip_special=skip_special).decode("utf-8", "replace")
        if self._vocabulary.strips_space and not is_continuation:
            return text.removeprefix(" ")
        return text

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> bytes:
        """The bytes of `ids`, joined; `shown` are special ids that `skip_special` does not skip."""
        pieces, num_pieces = self._vocabulary.pieces, len(self._vocabulary.pieces)
        hidden = self._vocabulary.control_ids if skip_special else frozenset()
        if shown:
            hidden = hidden - shown
        return b"".join([pieces[i] for i in ids if 0 <= i < num_pieces and i not in hidden])

    def _encode(self, text: str, control_view: str | None, add_special: bool) -> list[int]:
        """Ids of `text`; control tokens are looked for in `control_view`, which has the same length, or not at all."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON lets through
            text = _SURROGATE.sub("\ufffd", text)
        parts = list(self._cut(text, control_view))
        encoded = iter(
            self._encoder.encode_batch_fast([p for p in parts if isinstance(p, str)], add_special_tokens=False)
        )
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids.extend(next(encoded).ids)
            else:
                ids.append(part)
        return self._with_ends(ids) if add_special else ids

    def _with_ends(self, ids: list[int]) -> list[int]:
        """`ids` with BOS and EOS where the model wants them and they are not there yet."""
        vocabulary = self._vocabulary
        if vocabulary.add_bos and vocabulary.bos_id is not None and ids[:1] != [vocabulary.bos_id]:
            ids = [vocabulary.bos_id, *ids]
        if vocabulary.add_eos and vocabulary.eos_id is not None and ids[-1:] != [vocabulary.eos_id]:
            ids = [*ids, vocabulary.eos_id]
        return ids

    def _cut(self, text: str, control_view: str | None) -> Iterator[str | int]:
        """Ids of marked tokens and the stretches of text between them, with the spaces the vocabulary adds."""
        vocabulary = self._vocabulary
        prefix, is_first = vocabulary.space_prefix, True
        for part in self._cut_marked(text, control_view):
            if isinstance(part, str):
                wants_space = prefix is SpacePrefix.EVERY or (prefix is SpacePrefix.FIRST and is_first)
                if wants_space and not (vocabulary.skips_prefix_before_space and part[0] in " ▁"):
                    part = " " + part
            is_first = False
            yield part

    def _cut_marked(self, text: str, control_view: str | None) -> Iterator[str | int]:
        """`text` cut at control tokens first and at user-defined tokens in what is left; no part is empty."""
        for part in _cut_at(text, control_view, self._control_regex, self._control):
            if isinstance(part, str) and self._user_regex is not None:
                yield from _cut_at(part, part, self._user_regex, self._vocabulary.marked)
            else:
                yield part


def _cut_at(
    text: str, view: str | None, regex: re.Pattern[str] | None, tokens: Mapping[str, MarkedToken]
) -> Iterator[str | int]:
    """Ids of the tokens that `regex` finds in `view`, and the text between them; no part is empty."""
    start = 0
    for match in regex.finditer(view) if regex is not None and view is not None else ():
        token = tokens[match.group()]
        left, right = match.span()
        if left < start or (token.is_whole_word and not _is_whole_word(text, left, right)):
            continue
        while token.eats_left and left > start and text[left - 1].isspace():
            left -= 1
        while token.eats_right and right < len(text) and text[right].isspace():
            right += 1
        if left > start:
            yield text[start:left]
        yield token.token_id
        start = right
    if start < len(text):
        yield text[start:]


def _is_whole_word(text: str, left: int, right: int) -> bool:
    before, after = text[left - 1 : left], text[right : right + 1]
    return not (before.isalnum() or before == "_" or after.isalnum() or after == "_")


def _end_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Ids that end an answer. In the harmony format `<|end|>` ends a message, not the answer, beside `<|return|>`."""
    named = {
        text: token.token_id for text, token in vocabulary.marked.items() if text in EOG_NAMES and token.is_control
    }
    if "<|return|>" in named and "<|call|>" in named:
        named.pop("<|end|>", None)
    own = {vocabulary.eos_id} if vocabulary.eos_id is not None else set()
    return frozenset(own | set(named.values()) | vocabulary.extra_eos_ids)
