"""Prompts' beginnings that the operator declares: shared by all tenants, computed at start, pinned.

Knows files, the chat template and token ids; not how blocks are shared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import ConfigError, RequestError
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer
from firstlight.types import CoreRequest, Pin, SamplingParams

__all__ = ["DeclaredPrefix", "declared_prefixes", "prefix_requests"]

PROBES = ("a", "Why?")
"""Two first messages that begin differently: what their prompts have in common is the system message's part."""


@dataclass(frozen=True, slots=True)
class DeclaredPrefix:
    """One beginning as token ids. `is_computed`: at start already."""

    path: str
    token_ids: list[int]
    is_computed: bool


def declared_prefixes(
    paths: tuple[str, ...], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[DeclaredPrefix]:
    """Each file's text as the system message of a chat, and as the beginning of a plain prompt.

    The chat's is computed at start; the plain one only where the model has no chat template.

    Raises:
        ConfigError: a file cannot be read or is empty, or the template refuses it.
    """
    declared = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"`shared_prefix` {path} cannot be read: {error}", param="shared_prefix") from None
        if not text.strip():
            raise ConfigError(f"`shared_prefix` {path} is empty: give it the prompt's text", param="shared_prefix")
        plain = tokenizer.encode(text, add_special=True)
        declared.append(DeclaredPrefix(path, plain, is_computed=template is None))
        if template is not None:
            declared.append(DeclaredPrefix(path, _of_chat(path, text, tokenizer, template), is_computed=True))
    return declared


def _of_chat(path: str, text: str, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    system = {"role": "system", "content": text}
    try:
        first, second = (
            tokenizer.encode_rendered(template.render([system, {"role": "user", "content": probe}])) for probe in PROBES
        )
    except RequestError as error:
        message = f"`shared_prefix` {path} is no system message for this model: {error.message}"
        raise ConfigError(message, param="shared_prefix") from None
    num = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    return first[:num]


def prefix_requests(
    declared: list[DeclaredPrefix], *, block_size: int, max_pinned: int, max_tokens: int
) -> list[CoreRequest]:
    """Requests that compute and pin what is declared.

    Raises:
        ConfigError: together they do not fit the pins' quota, or one does not fit the context.
    """
    computed = [one for one in declared if one.is_computed]
    num_blocks = sum(len(one.token_ids) // block_size for one in computed)
    if num_blocks > max_pinned:
        raise ConfigError(
            f"`shared_prefix` needs {num_blocks} KV blocks, pins may hold {max_pinned}",
            param="shared_prefix",
            hint="raise --pin-memory-mb (and --kv-memory-mb)",
        )
    for one in computed:
        if len(one.token_ids) >= max_tokens:
            message = f"`shared_prefix` {one.path} is {len(one.token_ids)} tokens, the context holds {max_tokens}"
            raise ConfigError(message, param="shared_prefix")
    return [
        CoreRequest(
            request_id=f"shared-prefix-{at}",
            prompt_ids=one.token_ids,
            params=SamplingParams(temperature=0.0),
            seed=0,
            max_tokens=1,
            stop_ids=frozenset(),
            arrival_s=time.monotonic(),
            route="shared-prefix",
            pins=(Pin(num_tokens=len(one.token_ids)),),
        )
        for at, one in enumerate(computed)
    ]
