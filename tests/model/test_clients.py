"""Stock clients against a live server with the default model: OpenAI's, sync and async, LiteLLM, LangChain."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.server.run import ServerThread

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Name one colour."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    """The API's address."""
    config = EngineConfig(model=str(smollm2_path), num_blocks=128, max_model_len=512, max_step_rows=8)
    options = ServerConfig(port=0, served_model_name=MODEL)
    with ServerThread(lambda: AsyncEngine(config), options) as server:
        yield server.url + "/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def said(client: openai.OpenAI) -> str:
    """What the model answers."""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    text = answer.choices[0].message.content
    assert text
    return text


def test_openai_stream_and_stream_helper_say_the_same(client: openai.OpenAI, said: str) -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(deltas) == said
        assert stream.get_final_completion().choices[0].message.content == said


def test_openai_async_client_says_the_same(url: str, said: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY) for _ in range(3))
            )
            assert {answer.choices[0].message.content for answer in answers} == {said}
            stream = await client.completions.create(model=MODEL, prompt="One two", stream=True, **GREEDY)
            text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
            whole = await client.completions.create(model=MODEL, prompt="One two", **GREEDY)
            assert whole.choices[0].text == text
            assert len((await client.models.list()).data) == 1

    asyncio.run(run())


def test_openai_parse_helper_gives_an_object(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=form, temperature=0, max_tokens=40
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_openai_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a kitten"])
    assert [len(item.embedding) for item in answer.data] == [576, 576]


def test_openai_continuation_and_errors(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "My favourite colour is"}]
    extra = {"continue_final_message": True}
    answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **GREEDY)
    assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="temperatur"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"temperatur": 1})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed")
def test_litellm_says_the_same(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "unused", "messages": MESSAGES}
    answer = litellm.completion(**options, **GREEDY)
    assert answer.choices[0].message.content == said
    chunks = litellm.completion(**options, **GREEDY, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    vectors = litellm.embedding(model=f"openai/{MODEL}", api_base=url, api_key="unused", input=["a cat"])
    assert len(vectors.data[0]["embedding"]) == 576


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_langchain_says_the_same(url: str, said: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=url, api_key="unused", temperature=0, max_tokens=8, max_retries=0)  # type: ignore[call-arg,arg-type]
    assert model.invoke("Name one colour.").content == said
    assert "".join(str(chunk.content) for chunk in model.stream("Name one colour.")) == said
