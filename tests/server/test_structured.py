"""Answers in a given form over HTTP: every field that asks for one, streamed and whole, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MESSAGES: list[Any] = [{"role": "user", "content": "describe a colour"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "level": {"type": "integer", "maximum": 99}},
    "required": ["name", "level"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True}}


def ask(http: httpx.Client, route: str = "chat", **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"max_tokens": 200, "seed": 1} | fields
    body |= {"messages": MESSAGES} if route == "chat" else {"prompt": "x"}
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    return http.post(path, json=body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema_answers_are_valid(http: httpx.Client, route: str, temperature: float) -> None:
    for seed in range(4):
        answer = ask(http, route, response_format=FORMAT, temperature=temperature, seed=seed)
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_json_schema_streamed_text_is_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "response_format": FORMAT, "seed": 3}
    whole = client.chat.completions.create(**fields).choices[0]
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"


def test_json_schema_parse_helper_of_the_stock_client_gives_the_model(client: openai.OpenAI) -> None:
    class Colour(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=9)
        level: int = pydantic.Field(le=99)

    done = client.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Colour, seed=5)
    assert isinstance(done.choices[0].message.parsed, Colour)


def test_json_schema_n_choices_are_all_valid_and_differ(http: httpx.Client) -> None:
    answer = ask(http, response_format=FORMAT, n=4, temperature=1).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 4


def test_json_object_gives_an_object_or_is_cut_with_length(http: httpx.Client) -> None:
    ends = set()
    for seed in range(8):
        answer = ask(http, response_format={"type": "json_object"}, temperature=1, seed=seed, max_tokens=60).json()
        (choice,) = answer["choices"]
        ends.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert answer["usage"]["completion_tokens"] == 60
    assert ends <= {"stop", "length"}


EXTENSIONS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, "[ab]{3}-[0-9]{2}"),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'yes|n"o'),
    ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{2}/ ">"'}}, "<[a-z]{2}>"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] [0-9]'}}, "a[0-9]{2}"),
    ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, '1|"two"'),
    ({"guided_json": '{"const": [1]}'}, r"\[ ?1 ?\]|\[\n?\s*1\n?\s*\]"),
    ({"guided_regex": "x{4}"}, "x{4}"),
    ({"guided_choice": ["one"]}, "one"),
    ({"guided_grammar": 'start: "g"'}, "g"),
]


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize(("fields", "pattern"), EXTENSIONS)
def test_extensions_rule_the_answer(http: httpx.Client, route: str, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(ask(http, route, temperature=1, **fields)))


def test_schema_with_fields_of_a_stricter_server_is_taken(http: httpx.Client) -> None:
    loose = {"name": "n", "schema": {"type": "object", "properties": {}}, "strict": None, "description": "d"}
    answer = ask(http, response_format={"type": "json_schema", "json_schema": loose}, max_tokens=1)
    assert answer.status_code == 200, answer.text


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"uniqueItems": True}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_forms_are_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = ask(http, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert f"`{param}" in error["message"] or f"`{param.rsplit('.', 1)[-1]}` is not a field" in error["message"]


def test_bad_schema_leaves_other_requests_alone(http: httpx.Client) -> None:
    assert ask(http, response_format=FORMAT).status_code == 200
    assert ask(http, structured_outputs={"regex": "(a{9999}){9999}("}).status_code == 400
    assert ask(http, response_format=FORMAT).status_code == 200
    assert http.get("/ready").status_code == 200


def test_grammar_that_becomes_too_complex_is_refused_and_harms_nobody(http: httpx.Client) -> None:
    slow = {"structured_outputs": {"grammar": 'start: e\ne: e e | "a"'}, "ignore_eos": True}
    answer = ask(http, **slow, max_tokens=1500)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "structured_outputs.grammar"
    assert "too complex" in answer.json()["error"]["message"]
    assert ask(http, response_format=FORMAT).status_code == 200


WORDS = (
    "type object properties required items anyOf allOf oneOf not $ref #/$defs/a $defs a enum const pattern format "
    "minLength maxLength minimum maximum minItems maxItems additionalProperties string integer array number null "
    "json_schema json_object schema name strict function parameters regex grammar json choice auto required "
    "start: root ::= (a{9999}){9999} [ ( ^$ x-guidance"
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 3, 10**6, 10**30, 1e308, 0.5]),
    st.sampled_from(WORDS.split(" ")),
    st.text(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(WORDS.split(" ")), inner, max_size=5)
    ),
    max_leaves=12,
)
FORMS = st.one_of(
    VALUES.map(lambda value: {"response_format": value}),
    VALUES.map(lambda v: {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": v}}}),
    VALUES.map(lambda value: {"guided_json": value}),
    st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar"]), VALUES, max_size=2).map(
        lambda value: {"structured_outputs": value}
    ),
    st.tuples(VALUES, VALUES).map(lambda pair: {"tools": pair[0], "tool_choice": pair[1]}),
    st.tuples(VALUES, st.sampled_from(["auto", "required"])).map(
        lambda pair: {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": pair[0], "strict": True}}],
            "tool_choice": pair[1],
        }
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FORMS)
def test_any_form_is_answered_or_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = ask(http, **fields, max_tokens=3)
    if answer.status_code != 200:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
