"""A whole engine without weights, for tests and trying things out: the fake backend and a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

import tokenizers

from firstlight.backend.fake import FakeBackend
from firstlight.config import EngineConfig
from firstlight.engine.load import EngineParts
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer
from firstlight.text.vocabulary import MarkedToken, Vocabulary

__all__ = ["FAKE_CHAT_TEMPLATE", "fake_parts", "fake_tokenizer"]

FAKE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
"""Ids 256, 257 (both end an answer) and 258."""


def fake_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of UTF-8 text, 256.. are SPECIAL_TOKENS."""
    pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in SPECIAL_TOKENS]
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    marked = {text: MarkedToken(256 + i, is_control=True) for i, text in enumerate(SPECIAL_TOKENS)}
    vocabulary = Vocabulary(
        pieces=pieces,
        marked=marked,
        control_ids=frozenset(range(256, 256 + len(SPECIAL_TOKENS))),
        eos_id=256,
        chat_template=FAKE_CHAT_TEMPLATE,
    )
    return Tokenizer(tokenizers.Tokenizer(model), vocabulary)


def fake_parts(config: EngineConfig, **backend_options: Any) -> EngineParts:
    """Parts for `config`; `backend_options` go to FakeBackend and win over what the configuration says."""
    options: dict[str, Any] = {"block_size": config.block_size, "max_step_tokens": config.max_step_tokens}
    options["max_step_rows"] = config.max_step_rows
    if config.num_blocks:
        options["num_blocks"] = config.num_blocks
    if config.max_model_len:
        options["max_model_len"] = config.max_model_len
    tokenizer = fake_tokenizer()
    return EngineParts(
        backend=FakeBackend(**options | backend_options),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.of(tokenizer),
        model_name="fake",
    )
