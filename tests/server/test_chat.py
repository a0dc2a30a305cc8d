"""Chat completions through the stock client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from firstlight.server.run import ServerThread
from tests.server.raw import events

MESSAGES = [{"role": "user", "content": "Say something"}]
NO_END = {"256": -100, "257": -100}  # every token is a character of the answer
OPTIONS: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 24, "seed": 7, "logit_bias": NO_END}


def test_chat_streamed_and_whole_give_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**OPTIONS)
    chunks = list(client.chat.completions.create(**OPTIONS, stream=True))
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24


def test_chat_seed_repeats_and_another_seed_differs(client: openai.OpenAI) -> None:
    first, again = (client.chat.completions.create(**OPTIONS).choices[0].message.content for _ in range(2))
    other = client.chat.completions.create(**{**OPTIONS, "seed": 8}).choices[0].message.content
    assert first == again
    assert first != other


def test_chat_async_client_streams(server: ServerThread) -> None:
    async def collect() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused") as client:
            stream = await client.chat.completions.create(**OPTIONS, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert len(asyncio.run(collect())) >= 24


def test_chat_include_usage_adds_a_last_chunk_and_null_elsewhere(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "logit_bias": NO_END}
    answer = http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events(answer.content)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)
    plain = events(http.post("/v1/chat/completions", json=body).content)
    assert not any("usage" in chunk for chunk in plain[:-1])


def test_chat_n_gives_independent_choices(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**OPTIONS, n=3)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**OPTIONS, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == texts
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 72


@pytest.mark.parametrize("stream", [False, True])
def test_chat_stop_string_across_tokens_ends_before_it(client: openai.OpenAI, stream: bool) -> None:
    text = client.chat.completions.create(**OPTIONS).choices[0].message.content or ""
    stop = text[5:8]  # the fake tokenizer's tokens are bytes, so three characters are three tokens
    options = {**OPTIONS, "stop": [stop, "never appears"]}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True))
        got, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**options).choices[0]
        got, reason = choice.message.content or "", choice.finish_reason
    assert got == text[: text.index(stop)]
    assert reason == "stop"


def test_chat_logprobs_tokens_join_to_the_content(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**OPTIONS, logprobs=True, top_logprobs=3).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert "".join(token.token for token in whole.logprobs.content) == whole.message.content
    for token in whole.logprobs.content:
        assert bytes(token.bytes or ()) == token.token.encode()
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
    streamed = []
    for chunk in client.chat.completions.create(**OPTIONS, logprobs=True, top_logprobs=3, stream=True):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert streamed == whole.logprobs.content


def test_chat_logprobs_leave_out_the_token_that_ended_the_answer(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "max_tokens": 1000, "logit_bias": {}, "logprobs": True}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert "".join(token.token for token in choice.logprobs.content or ()) == choice.message.content


def test_chat_timings_are_sent_where_asked_for(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "timings": True, "logit_bias": NO_END}
    whole = http.post("/v1/chat/completions", json=body).json()["timings"]
    streamed = events(http.post("/v1/chat/completions", json={**body, "stream": True}).content)[-2]["timings"]
    for timings in (whole, streamed):
        assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["e2e_ms"]
    assert "timings" not in http.post("/v1/chat/completions", json={**body, "timings": False}).json()


def test_chat_content_parts_are_joined_as_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    options = {"max_tokens": 8, "seed": 1}
    joined = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "one\ntwo"}], **options})
    split = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], **options})
    assert split.json()["choices"] == joined.json()["choices"]


def test_chat_accepts_harmless_fields_and_features_left_off(http: httpx.Client) -> None:
    body = {
        "messages": [
            {"role": "user", "content": "a", "name": None},
            {"role": "assistant", "content": "b", "refusal": None, "tool_calls": [], "annotations": []},
            {"role": "developer", "content": "c"},
        ],
        "max_completion_tokens": 2,
        "user": "someone",
        "metadata": {"trace": "1"},
        "store": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "temperature": None,
        "stop": None,
        "logit_bias": None,
        "stream_options": None,
        "reasoning_effort": None,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_chat_request_id_comes_back(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    given = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc-1"})
    drawn = http.post("/v1/chat/completions", json=body)
    refused = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "a b"})
    assert given.headers["x-request-id"] == "abc-1"
    assert len(drawn.headers["x-request-id"]) == 32
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Request-Id"


def test_chat_stream_headers_forbid_caching_and_buffering(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
