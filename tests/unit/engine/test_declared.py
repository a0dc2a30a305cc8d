from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.engine.declared import declared_prefixes, prefix_requests
from firstlight.engine.fake import fake_tokenizer
from firstlight.errors import ConfigError
from firstlight.text.template import ChatTemplate

TEXT = "Be brief, and be right."


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "system.txt"
    path.write_text(TEXT + "\n")
    return str(path)


def test_declared_prefix_is_the_system_message_up_to_where_users_differ(file: str) -> None:
    tokenizer = fake_tokenizer()
    plain, chat = declared_prefixes((file,), tokenizer, ChatTemplate.of(tokenizer))
    assert tokenizer.decode(plain.token_ids) == TEXT
    assert not plain.is_computed
    assert (
        tokenizer.decode(chat.token_ids, skip_special=False)
        == f"<|im_start|>system\n{TEXT}<|im_end|>\n<|im_start|>user\n"
    )
    assert chat.is_computed


def test_declared_prefix_without_a_template_is_computed_as_plain_text(file: str) -> None:
    (plain,) = declared_prefixes((file,), fake_tokenizer(), None)
    assert plain.is_computed


def test_prefix_requests_beyond_quota_or_context_are_refused(file: str) -> None:
    declared = declared_prefixes((file,), fake_tokenizer(), None)
    (fine,) = prefix_requests(declared, block_size=4, max_pinned=5, max_tokens=100)
    assert fine.pins[0].num_tokens == len(TEXT)
    with pytest.raises(ConfigError, match="5 KV blocks, pins may hold 4"):
        prefix_requests(declared, block_size=4, max_pinned=4, max_tokens=100)
    with pytest.raises(ConfigError, match="23 tokens"):
        prefix_requests(declared, block_size=4, max_pinned=5, max_tokens=23)


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_declared_file_that_is_missing_or_empty_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "empty.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="shared_prefix"):
        declared_prefixes((str(path),), fake_tokenizer(), None)
