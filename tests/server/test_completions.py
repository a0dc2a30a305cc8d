"""Text completions: prompts of every kind, echo, logprobs in the older form."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from tests.server.raw import events

NO_END = {"256": -100, "257": -100}  # every token is a character of the answer
OPTIONS: dict[str, Any] = {"model": "fake", "max_tokens": 10, "seed": 3, "logit_bias": NO_END}


def test_completion_text_and_ids_of_one_prompt_agree(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["hello", [104, 101, 108, 108, 111], ["hello"], [[104, 101, 108, 108, 111]]]
    texts = {client.completions.create(prompt=prompt, **OPTIONS).choices[0].text for prompt in prompts}
    assert len(texts) == 1


def test_completion_several_prompts_number_choices_prompt_by_prompt(client: openai.OpenAI) -> None:
    alone = [client.completions.create(prompt=p, **OPTIONS).choices[0].text for p in ("one", "two")]
    both = client.completions.create(prompt=["one", "two"], n=2, **OPTIONS)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [both.choices[0].text, both.choices[2].text] == alone
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=["one", "two"], n=2, stream=True, **OPTIONS):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in both.choices]
    assert both.usage is not None
    assert both.usage.prompt_tokens == 6
    assert both.usage.completion_tokens == 40


def test_completion_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=["ab", "c"], **OPTIONS).choices
    echoed = client.completions.create(prompt=["ab", "c"], echo=True, **OPTIONS).choices
    ids = client.completions.create(prompt=[97, 98], echo=True, **OPTIONS).choices
    assert [choice.text for choice in echoed] == ["ab" + plain[0].text, "c" + plain[1].text]
    assert ids[0].text == echoed[0].text
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["ab", "c"], echo=True, stream=True, **OPTIONS):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in echoed]


def test_completion_logprobs_align_with_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt="x", logprobs=2, **OPTIONS).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == choice.text
    assert logprobs.text_offset == list(range(10))
    assert logprobs.top_logprobs is not None
    for token, value, top in zip(
        logprobs.tokens or (), logprobs.token_logprobs or (), logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value
        assert 2 <= len(top) <= 3


def test_completion_default_length_is_sixteen(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "logit_bias": NO_END}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completion_usage_counts_cached_tokens(http: httpx.Client) -> None:
    body = {"prompt": "a prompt that fills several blocks of sixteen tokens, to be found again", "max_tokens": 1}
    http.post("/v1/completions", json=body)
    again = http.post("/v1/completions", json=body).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_completion_stop_may_be_kept_in_the_output(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "seed": 3, "logit_bias": NO_END}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[10:12]
    cut = http.post("/v1/completions", json={**body, "stop": stop}).json()["choices"][0]
    kept = http.post("/v1/completions", json={**body, "stop": stop, "include_stop_str_in_output": True}).json()
    end = text.index(stop)
    assert cut["text"] == text[:end]
    assert kept["choices"][0]["text"] == text[: end + 2]
    assert cut["finish_reason"] == "stop"


def test_completion_stop_token_id_ends_the_answer(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "seed": 3, "logit_bias": NO_END}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stopped = http.post("/v1/completions", json={**body, "stop_token_ids": [ord(text[6])]}).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert text.startswith(stopped["text"])
    assert text[6] not in stopped["text"]


def test_completion_logit_bias_and_greedy_force_a_token(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0, "logit_bias": {"65": 100}}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "AAAA"


def test_completion_one_write_carries_every_choice_of_a_step(http: httpx.Client) -> None:
    body = {"prompt": "x", "n": 8, "max_tokens": 5, "stream": True, "logit_bias": NO_END}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        writes = [events(chunk) for chunk in answer.iter_raw()]
    choices = [{event["choices"][0]["index"] for event in write if event != "[DONE]"} for write in writes]
    assert max(len(indices) for indices in choices) == 8
