"""Limits of sampling parameters: the edge passes, one step beyond is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from firstlight.errors import RequestError
from firstlight.text.params import check
from firstlight.types import SamplingParams

VOCAB_SIZE = 100


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": 5.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 0},
        {"top_k": 10**6},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 0.01},
        {"n": 1},
        {"n": 128},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"max_tokens": 50},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop": ("x",) * 16},
        {"stop": ("x" * 512,)},
        {"stop_token_ids": (0, 99)},
        {"logit_bias": {0: -100.0, 99: 100}},
    ],
)
def test_check_value_at_the_limit_passes(fields: dict[str, Any]) -> None:
    check(SamplingParams(**fields), VOCAB_SIZE, max_model_len=50)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 5.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("n", 0),
        ("n", 129),
        ("seed", 2**63),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", 51),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 513,)),
        ("stop", "word"),
        ("stop", (3,)),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * 257),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {0: 100.5}),
        ("logit_bias", {0: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ],
)
def test_check_value_beyond_the_limit_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        check(SamplingParams(**{name: value}), VOCAB_SIZE, max_model_len=50)
    assert caught.value.param == name
