"""`echo` with `logprobs`: how likely the prompt was, to the bit, and nothing generated where nothing is asked for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import events

NO_END = {"256": -100, "257": -100}
ECHO: dict[str, Any] = {"echo": True, "logprobs": 3, "max_tokens": 0}
PROMPT = "what the prompt says, é included, long enough for several blocks and chunks"


def post(server: ServerThread, **body: Any) -> Any:
    """The answer to a completions request."""
    answer = httpx.post(server.url + "/v1/completions", json={"seed": 1, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: ServerThread, **body: Any) -> list[dict[str, Any]]:
    """Per choice of a streamed answer: text and logprobs, joined, and the end."""
    answer = httpx.post(server.url + "/v1/completions", json={"seed": 1, "stream": True, **body}, timeout=60)
    joined: dict[int, dict[str, Any]] = {}
    for event in events(answer.content)[:-1]:
        for choice in event["choices"]:
            whole = joined.setdefault(choice["index"], {"text": "", "logprobs": {}, "finish_reason": None})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
    return [joined[at] for at in sorted(joined)]


def test_echo_gives_the_prompt_the_logprobs_that_generating_it_gave(server: ServerThread) -> None:
    made = post(server, prompt="x", max_tokens=30, logprobs=3, temperature=0, logit_bias=NO_END)["choices"][0]
    echoed = post(server, prompt="x" + made["text"], **ECHO)["choices"][0]
    assert echoed["text"] == "x" + made["text"]
    assert echoed["logprobs"]["tokens"] == ["x", *made["logprobs"]["tokens"]]
    assert echoed["logprobs"]["token_logprobs"][1:] == made["logprobs"]["token_logprobs"]
    assert echoed["logprobs"]["top_logprobs"][1:] == made["logprobs"]["top_logprobs"]
    assert echoed["logprobs"]["text_offset"] == list(range(31))
    assert echoed["logprobs"]["token_logprobs"][0] == 0
    assert echoed["logprobs"]["top_logprobs"][0] == {}


def test_echo_without_tokens_generates_and_bills_none(server: ServerThread) -> None:
    answer = post(server, prompt=[[97, 98], [99, 100, 101]], n=2, **{**ECHO, "logprobs": None})
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cde", "cde"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 5


def test_echo_is_followed_by_the_answer_and_its_logprobs(server: ServerThread) -> None:
    options = {"prompt": "ab", "max_tokens": 5, "logprobs": 2, "logit_bias": NO_END}
    plain = post(server, **options)["choices"][0]
    echoed = post(server, **options, echo=True)["choices"][0]
    assert echoed["text"] == "ab" + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][2:] == plain["logprobs"][name]
    assert echoed["logprobs"]["text_offset"] == list(range(7))


def test_echo_offsets_count_characters_not_bytes(server: ServerThread) -> None:
    logprobs = post(server, prompt="aé€b", **ECHO)["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_streamed_equals_whole(server: ServerThread, max_tokens: int) -> None:
    body = {**ECHO, "prompt": [PROMPT, "x"], "n": 2, "max_tokens": max_tokens, "logit_bias": NO_END}
    whole = post(server, **body)["choices"]
    assert streamed(server, **body) == [
        {name: choice[name] for name in ("text", "logprobs", "finish_reason")} for choice in whole
    ]


def test_echo_is_the_same_whatever_is_cached_and_however_it_is_cut(start_server: StartServer) -> None:
    body = {**ECHO, "prompt": PROMPT, "max_tokens": 3, "logit_bias": NO_END}
    found = []
    for engine, backend in (
        ({"prefix_cache": True}, {}),
        ({"prefix_cache": False}, {}),
        ({"max_step_tokens": 16}, {}),
        ({"max_step_rows": 4}, {"max_step_samples": 8}),
    ):
        server = start_server(engine=engine, backend=backend)
        for _ in range(2):
            post(server, prompt=PROMPT, max_tokens=1)  # leaves the prompt in the cache, where there is one
            found.append(post(server, **body)["choices"])
    assert all(choices == found[0] for choices in found)
