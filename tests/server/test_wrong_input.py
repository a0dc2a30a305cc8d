"""Whatever a client sends is answered with a 4xx that names the field, in OpenAI's form. Never a 5xx."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import assert_idle_and_whole, connected, read_all

USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 2}

WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 99}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "a"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "messages[0].contents"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"store": True}, "store"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"prompt": "x"}, "prompt"),
    ({"echo": True}, "echo"),
    ({"": 1}, ""),
    ({"x" * 1000: 1}, "x" * 64),
    ({"model": 5}, "model"),
]

WRONG_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[0]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"messages": [USER]}, "messages"),
]

BAD_BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"x"', None),
    (b"null", None),
    (b"\xef\xbb\xbf{}", None),
    (b"{" * 100_000, None),
    (b"[" * 5_000_000, None),
    (b'{"messages":' + b"[" * 100_000, None),
    (b'{"a":{"b":' * 5_000 + b"1" + b"}}" * 5_000, None),
    (b'{"messages":[{"role":"user","content":"\xff"}]}', "messages"),
    (b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}', "messages"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "messages"),
    (b'{"messages":[{"role":"user","content":"\\udc00x"}]}', "messages"),
    (b'{"messages":[{"role":"user","content":"a\x00b"}]}', None),
    (b'{"temperature":NaN}', None),
    (b'{"temperature":Infinity}', None),
    (b'{"temperature":1e999}', "temperature"),
    (b'{"seed":' + b"9" * 5000 + b"}", "seed"),
    (b'{"seed":01}', None),
    (b'{"model":"fake","model":"fake"}', "model"),
    (b'{"messages":[{"role":"user","role":"user","content":"x"}]}', "role"),
    (b'{"stream":true,"\\u0073tream":false}', "stream"),
    (b'{"messages":[]} trailing', None),
    (b"prompt=x&model=fake", None),
]


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer that must be one."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 500
    return error


@pytest.mark.parametrize(("wrong", "param"), WRONG_CHAT)
def test_chat_wrong_field_is_refused_by_name(http: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/chat/completions", json={**CHAT, **wrong}))["param"] == param


@pytest.mark.parametrize(("wrong", "param"), WRONG_TEXT)
def test_completion_wrong_field_is_refused_by_name(http: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/completions", json={**TEXT, **wrong}))["param"] == param


@pytest.mark.parametrize(("body", "param"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_body_that_is_not_strict_json_is_refused(http: httpx.Client, body: bytes, param: str | None) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert refused(http.post(path, content=body))["param"] == param


@pytest.mark.parametrize(("wrong", "known"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("N", "n")])
def test_unknown_field_names_the_nearest_known_one(http: httpx.Client, wrong: str, known: str) -> None:
    error = refused(http.post("/v1/chat/completions", json={**CHAT, wrong: 1}))
    assert error["code"] == "unsupported_parameter"
    assert (f"did you mean `{known}`" in error["message"]) == (wrong != "N")


def test_unknown_model_is_404_with_the_names(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="use `fake`"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])


def test_prompt_over_the_context_is_refused_with_both_numbers(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x" * 3000}]
    error = refused(http.post("/v1/chat/completions", json={"messages": messages}))
    assert error["param"] == "messages"
    assert "2048" in error["message"]


def test_prompt_that_cannot_fit_is_refused_without_tokenising(http: httpx.Client) -> None:
    # the longest token, <|endoftext|>, has 13 bytes
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "é" * 14_000}]}),
        ("completions", {"prompt": "é" * 14_000}),
    ):
        error = refused(http.post(f"/v1/{path}", json=body))
        assert "28000 bytes of text, more than 2048 tokens" in error["message"]


def test_prompt_that_fills_the_context_leaves_one_token(http: httpx.Client) -> None:
    limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
    fits = http.post("/v1/completions", json={"prompt": "x" * (limit - 1), "max_tokens": 50, "ignore_eos": True})
    assert fits.json()["usage"]["completion_tokens"] == 1
    refused(http.post("/v1/completions", json={"prompt": "x" * limit, "max_tokens": 1}))


def test_several_prompts_are_refused_together(http: httpx.Client, server: ServerThread) -> None:
    refused(http.post("/v1/completions", json={"prompt": ["fine", "", "fine"], "max_tokens": 500}))
    assert_idle_and_whole(server)


def test_wrong_method_and_path_are_refused(http: httpx.Client) -> None:
    answer = http.get("/v1/chat/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    refused(http.post("/v1/models", json={}), 405)
    refused(http.post("/v1/audio/speech", json={}), 404)
    refused(http.get("/v1/models/none"), 404)
    refused(http.get("/..%2f..%2fetc/passwd"), 404)


def test_body_over_the_limit_is_413_before_it_is_read(start_server: StartServer) -> None:
    server = start_server(max_body_mb=0.01)
    body = json.dumps({"prompt": "x" * 20_000}).encode()
    refused(httpx.post(server.url + "/v1/completions", content=body), 413)
    refused(httpx.post(server.url + "/v1/completions", content=iter([body])), 413)  # chunked: no length is claimed
    claimed = connected(server)
    claimed.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999\r\n\r\n")
    assert read_all(claimed).startswith(b"HTTP/1.1 413")
    claimed.close()


def test_compressed_body_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert refused(answer)["param"] == "Content-Encoding"


def test_headers_over_the_limit_close_the_connection(server: ServerThread) -> None:
    for head in (
        b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000,
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 40_000,
    ):
        sock = connected(server)
        try:
            sock.sendall(head)
            received = sock.recv(1000)
            assert received.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        except (ConnectionResetError, BrokenPipeError):
            pass  # closed while we were still sending
        sock.close()
    assert httpx.get(server.url + "/health").status_code == 200


def test_header_bound_does_not_count_bodies_or_pipelined_requests(http: httpx.Client) -> None:
    for _ in range(3):
        answer = http.post("/tokenize", json={"content": "x" * 300_000})
        assert answer.json()["count"] == 300_000


def test_garbage_instead_of_http_is_refused(server: ServerThread) -> None:
    rng = random.Random(5)
    for size in (1, 10, 1000):
        sock = connected(server)
        sock.sendall(rng.randbytes(size) + b"\r\n\r\n")
        sock.shutdown(1)
        assert b" 500 " not in read_all(sock)
        sock.close()
    assert httpx.get(server.url + "/health").status_code == 200


NAMES = st.sampled_from(
    [*CHAT, "prompt", "n", "stop", "logprobs", "stream", "stream_options", "logit_bias", "model", "seed"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES | st.text(max_size=8), VALUES, max_size=4), st.booleans())
def test_any_members_never_cause_a_server_error(http: httpx.Client, members: dict[str, Any], chat: bool) -> None:
    path, base = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", TEXT)
    answer = http.post(path, content=json.dumps({**base, **members}).encode("utf-8", "surrogatepass"))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        refused(answer, answer.status_code)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_never_cause_a_server_error(http: httpx.Client, data: st.DataObject) -> None:
    whole = json.dumps({**CHAT, "stop": ["é"], "logit_bias": {"5": 1.5}}).encode()
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(0, 5))
    body = whole[:at] + data.draw(st.binary(max_size=6)) + whole[at + cut :]
    answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code in (200, 400, 404), answer.text


def test_nothing_is_left_after_all_of_it(server: ServerThread) -> None:
    assert_idle_and_whole(server)
