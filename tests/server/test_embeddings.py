"""Embeddings over HTTP with the stock client: forms, pooling, and the same bits by every road."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import StartServer

ROUTE = "/v1/embeddings"
LONG = "the quick brown fox " * 60


def vector(http: httpx.Client, text: Any, **options: Any) -> list[float]:
    answer = http.post(ROUTE, json={"input": text, **options})
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["data"][0]["embedding"]
    return found


def test_stock_client_gets_one_unit_vector_per_input(client: openai.OpenAI) -> None:
    """The client asks for base64 by itself and decodes it."""
    answer = client.embeddings.create(model="fake", input=["one", "two", "one"])
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.data[0].embedding == answer.data[2].embedding != answer.data[1].embedding
    assert math.isclose(sum(x * x for x in answer.data[0].embedding), 1, rel_tol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9


def test_ids_and_text_give_the_same_vector(http: httpx.Client) -> None:
    assert vector(http, "one") == vector(http, list(b"one")) == vector(http, ["one"])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vector_is_the_same_by_every_road(start_server: StartServer, http: httpx.Client, pooling: str) -> None:
    """Whole, in chunks of 7 tokens, and with the prefix cached by an earlier answer."""
    options = {"pooling": pooling, "normalize": False}
    whole = vector(http, LONG, **options)
    with httpx.Client(base_url=start_server(engine={"max_step_tokens": 7, "max_step_rows": 4}).url) as chunked:
        assert vector(chunked, LONG, **options) == whole
    http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1})
    assert vector(http, LONG, **options) == whole


def test_last_pooling_differs_from_mean(http: httpx.Client) -> None:
    assert vector(http, "one", pooling="last") != vector(http, "one")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", 3]}, "input[1]"),
        ({"input": [999]}, "input"),
        ({"input": "x", "dimensions": 3}, "dimensions"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "inputs": "x"}, "inputs"),
        ({"input": "x" * 5000}, "input"),
        ({}, "input"),
    ],
)
def test_wrong_body_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "`prompt`" not in answer.json()["error"]["message"]


def test_nothing_is_left_behind(http: httpx.Client) -> None:
    vector(http, "one")
    check = http.get("/debug/check").json()
    assert (check["running"], check["used_blocks"]) == (0, 0)
