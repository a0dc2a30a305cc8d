"""Tool calls over HTTP with the stock client: every choice, streamed and whole, and what goes back in messages."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.server.conftest import StartServer

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\\n</tool_call>'


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "seed": 1}
    return client.chat.completions.create(**body | fields)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def streamed(chunks: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """(content, calls, finish) of a stream, joined as clients join them."""
    content, calls, finish = "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                assert delta.type == "function"
                assert delta.index == len(calls)
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments or ""
    return content, [(name, arguments) for name, arguments in calls.values()], finish


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_fit_their_schemas_streamed_and_whole(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    for seed in range(4):
        options = {"tool_choice": choice, "temperature": temperature, "seed": seed}
        (whole,) = ask(client, **options).choices
        calls = calls_of(whole.message)
        assert calls
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        for name, arguments in calls:
            if name == "get_weather":
                jsonschema.validate(json.loads(arguments), WEATHER)
            else:
                assert (name, choice) == ("now", "required")
                assert json.loads(arguments) == {}
        assert len(calls) == 1 or choice == "required"
        assert streamed(ask(client, **options, stream=True)) == ("", calls, "tool_calls")


def test_required_calls_one_at_a_time(client: openai.OpenAI) -> None:
    for seed in range(6):
        (choice,) = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed).choices
        assert len(choice.message.tool_calls) == 1


def test_required_calls_for_each_of_n_choices_have_ids_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice=NAMED, n=3, temperature=1)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(ids) == len(set(ids)) == 3


def test_required_call_cut_by_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED, max_tokens=50).choices
    assert choice.finish_reason == "length"
    assert calls_of(choice.message)[0][0] == "get_weather"


def test_auto_text_around_a_call_is_content(client: openai.OpenAI) -> None:
    said = {"structured_outputs": {"grammar": f'start: "I look.\\n{CALL.replace(chr(34), chr(92) + chr(34))}"'}}
    (whole,) = ask(client, extra_body=said).choices
    calls = [("get_weather", '{"city": "Rome", "days": 2}')]
    assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == ("I look.\n", calls, "tool_calls")
    assert streamed(ask(client, extra_body=said, stream=True)) == ("I look.\n", calls, "tool_calls")


def test_none_leaves_calls_text(client: openai.OpenAI) -> None:
    said = {"structured_outputs": {"grammar": f'start: "{CALL.replace(chr(34), chr(92) + chr(34))}"'}}
    (choice,) = ask(client, tool_choice="none", extra_body=said).choices
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")
    assert choice.finish_reason == "stop"


def test_auto_without_a_call_is_a_plain_answer(client: openai.OpenAI) -> None:
    (choice,) = ask(client).choices
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert choice.message.content


def test_parse_helper_gives_checked_arguments(client: openai.OpenAI) -> None:
    class GetWeather(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=8)
        days: int = pydantic.Field(ge=1, le=9)

    done = client.chat.completions.parse(
        model="fake",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        seed=2,
    )
    (call, *_) = done.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_stream_helper_gives_the_whole_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(**fields, seed=4)
    with client.chat.completions.stream(**fields, seed=4) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert calls_of(final.choices[0].message) == calls_of(whole.choices[0].message)
    assert "tool_calls.function.arguments.delta" in events


def test_results_go_back_and_change_the_prompt(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    history = [*MESSAGES, first.model_dump(exclude_none=True), result]
    again = ask(client, messages=history, max_tokens=5)
    other = ask(client, messages=[*history[:-1], {**result, "content": "rainy"}], max_tokens=5)
    assert again.choices[0].message.content != other.choices[0].message.content
    assert again.usage.prompt_tokens == other.usage.prompt_tokens > 200


def test_llama3_format_by_option(start_server: StartServer) -> None:
    server = start_server(tool_parser="llama3")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        (choice,) = ask(client, tool_choice=NAMED).choices
        assert choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), WEATHER)
        assert streamed(ask(client, tool_choice=NAMED, stream=True))[1] == calls_of(choice.message)


def test_reasoning_by_option_is_apart_streamed_and_whole(start_server: StartServer) -> None:
    server = start_server(reasoning_parser="think")
    body = {"messages": MESSAGES, "guided_choice": ["yes"], "logit_bias": {str(ord("<")): 50}, "max_tokens": 40}
    (whole,) = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"]
    assert whole["message"]["content"] == ""
    assert whole["finish_reason"] == "length"
    with httpx.stream("POST", server.url + "/v1/chat/completions", json={**body, "stream": True}) as answer:
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"] for line in answer.iter_lines() if line.startswith("data: {")
        ]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == whole["message"]["reasoning_content"]
    assert len(thought) == 40 - len("<think>")
    assert "".join(delta.get("content", "") for delta in deltas) == ""


def test_reasoning_model_is_held_to_a_schema_behind_its_reasoning(start_server: StartServer) -> None:
    server = start_server(reasoning_parser="think")
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    for seed in range(6):
        body = {"messages": MESSAGES, "response_format": form, "seed": seed, "logit_bias": {str(ord("{")): 50}}
        (choice,) = httpx.post(server.url + "/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), WEATHER)


def test_mistral_ids_have_the_length_its_templates_want(start_server: StartServer) -> None:
    server = start_server(tool_parser="mistral")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        (choice,) = ask(client, tool_choice=NAMED).choices
        assert len(choice.message.tool_calls[0].id) == 9
        jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), WEATHER)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]}, "tools[0].function.parametres"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": TOOLS * 100}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "long " * 100_000}}]}, "tools"),
    ({"tool_choice": "must"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    (
        {"tool_choice": "required", "tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters":
         {"properties": {"x": {"uniqueItems": True}}}}}]},
        "tools[1].function.parameters",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_tools_are_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": TOOLS, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
