"""Checks sampling parameters before they reach the core. Knows limits, not where the parameters came from."""

from __future__ import annotations

import math
from typing import Any

from firstlight.errors import RequestError
from firstlight.types import SamplingParams

__all__ = ["MAX_CHOICES", "MAX_LOGPROBS", "MAX_STOPS", "MAX_STOP_CHARACTERS", "check"]

MAX_TEMPERATURE = 5.0
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
GRAMMAR_KINDS = ("json_schema", "regex", "grammar")
_SEED_BITS = 63

_FLOATS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}
_ABOVE_LOW = frozenset({"top_p", "repetition_penalty"})
"""Where the lower bound itself is refused: nothing could be sampled."""


def check(params: SamplingParams, vocab_size: int, *, max_model_len: int | None = None) -> None:
    """Raises RequestError for the first parameter that is out of range, and names it.

    Limits: temperature 0..5, top_p (0, 1], min_p 0..1, top_k >= 0, presence and frequency penalty -2..2, repetition
    penalty (0, 10], n 1..128, logprobs 0..20, seed a signed 64-bit integer, at most 16 stop strings of 1..512
    characters, at most 256 stop token ids and 1024 logit biases of -100..100 for ids in the vocabulary. NaN and
    infinity are refused.

    Args:
        vocab_size: ids the model has.
        max_model_len: the longest prompt and output together; None leaves `max_tokens` without an upper limit.
    """
    for name, (low, high) in _FLOATS.items():
        _check_float(name, getattr(params, name), low, high)
    _check_int("top_k", params.top_k, 0, None)
    _check_int("n", params.n, 1, MAX_CHOICES)
    if params.seed is not None:
        _check_int("seed", params.seed, -(1 << _SEED_BITS), (1 << _SEED_BITS) - 1)
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, max_model_len)
    if params.logprobs is not None:
        _check_int("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    _check_stops(params, vocab_size)
    _check_logit_bias(params.logit_bias, vocab_size)
    if params.grammar is not None and params.grammar.kind not in GRAMMAR_KINDS:
        kinds = ", ".join(GRAMMAR_KINDS)
        raise RequestError(f"`grammar.kind` is {params.grammar.kind!r}: it is one of {kinds}", param="grammar")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"`{name}` is {value!r}: it must be a finite number", param=name)
    if name in _ABOVE_LOW and value <= low:
        raise RequestError(f"`{name}` is {value:g}: it must be above {low:g} and at most {high:g}", param=name)
    if not low <= value <= high:
        raise RequestError(f"`{name}` is {value:g}: it must be from {low:g} to {high:g}", param=name)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"`{name}` is {value!r}: it must be an integer", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"`{name}` is {value}: it must be {limit}", param=name)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if isinstance(params.stop, str) or len(params.stop) > MAX_STOPS:
        raise RequestError(f"`stop` must be a list of at most {MAX_STOPS} strings", param="stop")
    for index, stop in enumerate(params.stop):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            size = f"{len(stop)} characters" if isinstance(stop, str) else repr(stop)
            raise RequestError(
                f"`stop[{index}]` is {size}: it must be a string of 1 to {MAX_STOP_CHARACTERS} characters", param="stop"
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"`stop_token_ids` has {len(params.stop_token_ids)} ids, the limit is {MAX_STOP_TOKEN_IDS}",
            param="stop_token_ids",
        )
    for token_id in params.stop_token_ids:
        _check_int("stop_token_ids", token_id, 0, vocab_size - 1)


def _check_logit_bias(logit_bias: dict[int, float], vocab_size: int) -> None:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"`logit_bias` has {len(logit_bias)} entries, the limit is {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    for token_id, bias in logit_bias.items():
        _check_int("logit_bias", token_id, 0, vocab_size - 1)
        _check_float("logit_bias", bias, -100.0, 100.0)
