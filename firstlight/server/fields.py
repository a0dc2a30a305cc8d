"""The names a request may have: known, accepted as metadata, or refused by name for now. All others are unknown.

Knows names and the values that mean "off", not what the fields do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from firstlight.errors import UnsupportedParameter

__all__ = [
    "CANCEL_FIELDS",
    "CHAT_FIELDS",
    "COMPLETION_FIELDS",
    "DETOKENIZE_FIELDS",
    "TOKENIZE_FIELDS",
    "refuse_unknown",
]

_MAX_NAME_CHARS = 64

_SHARED_NAMES = (
    "model stream stream_options n stop max_tokens temperature top_p top_k min_p seed logit_bias presence_penalty "
    "frequency_penalty repetition_penalty ignore_eos stop_token_ids include_stop_str_in_output logprobs timings "
    "timeout priority deadline_ms pace_ms response_format structured_outputs guided_json guided_regex guided_choice "
    "guided_grammar"
)
_SHARED = frozenset(_SHARED_NAMES.split())
_TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
CHAT_FIELDS = (
    _SHARED
    | _TOOL_FIELDS
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "continue_final_message",
        "add_generation_prompt",
    }
)
CANCEL_FIELDS = frozenset({"id"})
COMPLETION_FIELDS = _SHARED | {"prompt", "echo", "best_of"}
TOKENIZE_FIELDS = frozenset({"content", "prompt", "text", "add_special", "parse_special", "model"})
DETOKENIZE_FIELDS = frozenset({"tokens", "model"})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(member, str) for member in value.values())


_Claim = Callable[[Any], bool]

METADATA: dict[str, tuple[_Claim, str]] = {
    "user": (_is_text, "a string"),
    "safety_identifier": (_is_text, "a string"),
    "prompt_cache_key": (_is_text, "a string"),
    "metadata": (_is_text_map, "an object of strings"),
}
"""Fields that describe the caller and never change an answer: checked, then dropped."""

OFF_VALUES: dict[str, tuple[_Claim, str]] = {
    "functions": (lambda v: v == [], "[]"),
    "function_call": (lambda v: v == "none", '"none"'),
    "modalities": (lambda v: v == ["text"], '["text"]'),
    "store": (lambda v: v is False, "false"),
    "service_tier": (lambda v: v in ("auto", "default"), '"auto" or "default"'),
    "suffix": (lambda v: v == "", '""'),
}
"""Known fields of features that are not here yet: only the value that leaves them off is taken."""

_NOT_YET_NAMES = (
    "reasoning_effort verbosity prediction audio web_search_options moderation prompt_cache_options "
    "prompt_cache_retention grammar "
    "json_schema use_beam_search length_penalty early_stopping best_of echo min_tokens bad_words allowed_token_ids "
    "prompt_logprobs truncate_prompt_tokens skip_special_tokens spaces_between_special_tokens chat_template "
    "chat_template_kwargs documents request_id logits_processors "
    "cache_prompt n_predict mirostat typical_p tfs_z dry_multiplier xtc_probability top_n_sigma repeat_penalty "
    "repeat_last_n samplers id_slot n_probs return_tokens_as_token_ids cache_salt lora session_id"
)
NOT_YET = frozenset(_NOT_YET_NAMES.split())
"""Fields that OpenAI or other servers take and this one does not: the answer says "not supported", not "unknown"."""


def refuse_unknown(members: Mapping[str, Any], known: frozenset[str], route: str) -> None:
    """Passes when every member is known, harmless metadata, or a feature left off.

    Raises:
        UnsupportedParameter: names the first member that is none of these, and the nearest known name.
    """
    for name, value in members.items():
        if name in known:
            continue
        if name in METADATA:
            _require(name, value, *METADATA[name])
        elif name in OFF_VALUES:
            is_off, off = OFF_VALUES[name]
            if not is_off(value):
                raise UnsupportedParameter(
                    f"`{name}` is not supported yet by {route}: leave it out, or send {off}", param=name
                )
        elif name in NOT_YET:
            raise UnsupportedParameter(f"`{name}` is not supported by {route}: leave it out", param=name)
        else:
            raise unknown_name(name, known, f"a field of {route}")


def unknown_name(name: str, known: Iterable[str], what: str, path: str | None = None) -> UnsupportedParameter:
    """The error for a name that nobody knows, with the nearest known one."""
    shown = name[:_MAX_NAME_CHARS]
    close = difflib.get_close_matches(shown, sorted(known), n=1)
    hint = f": did you mean `{close[0]}`?" if close else ": leave it out"
    return UnsupportedParameter(f"`{shown}` is not {what}{hint}", param=path or shown)


def _require(name: str, value: Any, is_fine: _Claim, wanted: str) -> None:
    if not is_fine(value):
        raise UnsupportedParameter(f"`{name}` must be {wanted}", param=name)
