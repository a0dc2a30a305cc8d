"""Builds a tokenizer from a Hugging Face folder: tokenizer.json, tokenizer_config.json, generation_config.json.

Knows the files' fields, not the models they belong to. The library reads the model, normalizer and pre-tokenizer; added
tokens and the post-processor are taken out and done by `firstlight.text.tokenizer`, so that both kinds of file behave
alike.

Source: the serialisation of the `tokenizers` library, read from its documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from firstlight.errors import ModelError
from firstlight.text.vocabulary import (
    EOG_NAMES,
    MarkedToken,
    SpacePrefix,
    Vocabulary,
    bytes_of_byte_level,
    bytes_of_spaced,
)

__all__ = ["build"]

_MAX_FILE_BYTES = 256 << 20


def build(folder: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The library tokenizer without added tokens, and the vocabulary beside it.

    Raises:
        ModelError: tokenizer.json is missing, not valid, or of a kind that is not supported.
    """
    spec = _read(folder / "tokenizer.json")
    if spec is None:
        raise ModelError(
            f"{folder} has no tokenizer.json",
            param="model",
            hint="convert the tokenizer with `tokenizers`, or use a GGUF file",
        )
    config = _read(folder / "tokenizer_config.json") or {}
    added = spec.get("added_tokens") or []
    post_processor = spec.get("post_processor")
    prefix = _take_space_prefix(spec)
    encoder = _encoder(spec)
    tokens = _tokens(encoder, added)
    marked = {entry["content"]: _marked_token(entry) for entry in added}
    roles = {f"{role}_id": _role_id(config, role, marked, tokens) for role in ("bos", "eos", "unk", "pad")}
    is_byte_level = _has_kind(spec.get("decoder"), "ByteLevel") or _has_kind(spec.get("pre_tokenizer"), "ByteLevel")
    verbatim = frozenset(token.token_id for token in marked.values())
    first, last = _template_ends(post_processor)
    control_ids = frozenset(token.token_id for token in marked.values() if token.is_control)
    vocabulary = Vocabulary(
        pieces=bytes_of_byte_level(tokens, verbatim) if is_byte_level else bytes_of_spaced(tokens, verbatim, None),
        marked=marked,
        control_ids=control_ids,
        bos_id=roles["bos_id"],
        eos_id=roles["eos_id"],
        unknown_id=roles["unk_id"],
        padding_id=roles["pad_id"],
        extra_eos_ids=_generation_ends(folder, len(tokens)),
        add_bos=_flag(config, "add_bos_token", roles["bos_id"] is not None and first == roles["bos_id"]),
        add_eos=_flag(config, "add_eos_token", roles["eos_id"] is not None and last == roles["eos_id"]),
        space_prefix=prefix,
        skips_prefix_before_space=_has_kind(spec.get("pre_tokenizer"), "Metaspace"),
        strips_space=not is_byte_level and _drops_first_space(spec.get("decoder")),
        chat_template=_chat_template(folder, config),
    )
    return encoder, vocabulary


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None when there is no such file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(f"{path} is {path.stat().st_size} bytes, the limit is {_MAX_FILE_BYTES}", param="model")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", param="model") from error


def _encoder(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = (spec.get("model") or {}).get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        raise ModelError(f"tokenizer.json has a model of type {kind!r}; supported are BPE and Unigram", param="model")
    bare = {**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(bare).decode())
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json is not a valid tokenizer: {error}", param="model") from error


def _tokens(encoder: tokenizers.Tokenizer, added: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens by id; ids that no token has are empty."""
    by_id = {token_id: token for token, token_id in encoder.get_vocab(with_added_tokens=False).items()}
    try:
        by_id |= {int(entry["id"]): str(entry["content"]) for entry in added}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError("tokenizer.json has an added token without `id` or `content`", param="model") from error
    num_tokens = max(by_id, default=-1) + 1
    if num_tokens == 0 or num_tokens > 4 * len(by_id) + 1024:
        raise ModelError(f"tokenizer.json has {len(by_id)} tokens with ids up to {num_tokens - 1}", param="model")
    return [by_id.get(token_id, "") for token_id in range(num_tokens)]


def _marked_token(entry: Mapping[str, Any]) -> MarkedToken:
    return MarkedToken(
        int(entry["id"]),
        is_control=bool(entry.get("special")) or entry["content"] in EOG_NAMES,
        eats_left=bool(entry.get("lstrip")),
        eats_right=bool(entry.get("rstrip")),
        is_whole_word=bool(entry.get("single_word")),
    )


def _role_id(
    config: Mapping[str, Any], role: str, marked: Mapping[str, MarkedToken], tokens: Sequence[str]
) -> int | None:
    """The id of `bos_token` and the like, which the file gives as text or as an object with `content`."""
    value = config.get(f"{role}_token")
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        return None
    if text in marked:
        return marked[text].token_id
    return tokens.index(text) if text in tokens else None


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    return default if value is None else bool(value)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """`value` and all that it is a sequence of: normalizers, pre-tokenizers, decoders, processors."""
    if not isinstance(value, Mapping):
        return
    yield value
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        for part in value.get(key) or []:
            yield from _parts(part)


def _has_kind(value: Any, kind: str) -> bool:
    return any(part.get("type") == kind for part in _parts(value))


def _take_space_prefix(spec: dict[str, Any]) -> SpacePrefix:
    """Where the file adds a space. Mutates: `spec` adds none any more: only the whole text shows where it belongs."""
    prefix = SpacePrefix.NONE
    for part in _parts(spec.get("pre_tokenizer")):
        if isinstance(part, dict) and part.get("type") == "Metaspace":
            scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
            prefix = {"always": SpacePrefix.EVERY, "first": SpacePrefix.FIRST}.get(scheme, prefix)
            part.pop("add_prefix_space", None)
            part["prepend_scheme"] = "never"
    normalizer = spec.get("normalizer") or {}
    if _has_kind(normalizer, "Prepend"):
        prefix = SpacePrefix.EVERY
        kept = [part for part in normalizer.get("normalizers", []) if part.get("type") != "Prepend"]
        spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return prefix


def _drops_first_space(decoder: Any) -> bool:
    for part in _parts(decoder):
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start", 0) > 0:
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return bool(part.get("add_prefix_space", True))
    return False


def _template_ends(post_processor: Any) -> tuple[int | None, int | None]:
    """The special ids that the post-processor writes before and after a single text."""
    for part in _parts(post_processor):
        if part.get("type") != "TemplateProcessing":
            continue
        specials = part.get("special_tokens") or {}
        written = [
            (specials.get(item["SpecialToken"]["id"], {}).get("ids") or [None])[0] if "SpecialToken" in item else None
            for item in part.get("single") or []
        ]
        if written:
            return written[0], written[-1]
    return None, None


def _generation_ends(folder: Path, num_tokens: int) -> frozenset[int]:
    value = (_read(folder / "generation_config.json") or {}).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int) and 0 <= i < num_tokens)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja where present, else the field of tokenizer_config.json; of several the `default` one."""
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
        return path.read_text(encoding="utf-8", errors="replace")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
