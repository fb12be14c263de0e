"""Structured output over HTTP, in all its names, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from serve_harness import FakeServer, fake_server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:  # random logits: nothing but the grammar gives the text a form
        yield running
        running.wait_idle()


def texts(body: dict[str, Any]) -> list[str]:
    choices = body["choices"]
    assert all(choice["finish_reason"] == "stop" for choice in choices), choices
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in choices
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_keeps_to_its_schema(server: FakeServer, path: str, fields: dict[str, Any]) -> None:
    prompt = {"messages": HI} if "chat" in path else {"prompt": ["Hi", "Ho"]}
    body = {**prompt, **fields, "n": 3, "seed": 5, "temperature": 1.3}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answers = texts(response.json())
    assert len(answers) == (3 if "chat" in path else 6)
    for answer in answers:
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert len(set(answers)) > 1
    assert texts(server.post(path, body).json()) == answers  # seeded


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-c]{2}"}, "[0-9]{3}-[a-c]{2}"),
        ({"structured_outputs": {"regex": "x{4}"}}, "x{4}"),
        ({"guided_choice": ["red", "green 삼"]}, "red|green 삼"),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
    ],
)
def test_regex_and_choice(server: FakeServer, fields: dict[str, Any], pattern: str) -> None:
    for body in (
        server.complete("Hi", **fields),
        server.post("/v1/chat/completions", {"messages": HI, **fields}).json(),
    ):
        assert re.fullmatch(pattern, texts(body)[0])


def test_generate_takes_the_names_of_sglang(server: FakeServer) -> None:
    for sampling, check in (
        ({"regex": "ab{2}"}, lambda text: text == "abb"),
        ({"json_schema": json.dumps(SCHEMA)}, json.loads),
    ):
        body = {"text": "Hi", "sampling_params": {"temperature": 0, **sampling}}
        answer = server.post("/generate", body).json()
        assert check(answer["text"])
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    both = {"text": "Hi", "sampling_params": {"regex": "a", "json_schema": "{}"}}
    assert server.post("/generate", both).status_code == 400


def test_json_object_with_logprobs_and_a_warm_cache(server: FakeServer) -> None:
    fields = {
        "response_format": {"type": "json_object"},
        "logit_bias": {str(token): 20 for token in server.tokenizer.encode("}", add_bos=False)},
        "logprobs": 2,
        "max_tokens": 200,
    }
    first = server.complete("Hi " * 40, **fields)
    second = server.complete("Hi " * 40, **fields)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["choices"] == second["choices"]
    assert isinstance(json.loads(texts(first)[0]), dict)
    logprobs = first["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == first["usage"]["completion_tokens"]
    assert "".join(logprobs["tokens"]) == texts(first)[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_say_the_same(server: FakeServer, path: str) -> None:
    prompt = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
    body = {**prompt, "response_format": FORMAT, "seed": 2, "temperature": 1.0, "n": 2}
    whole = texts(server.post(path, body).json())
    streamed = ["", ""]
    for event in server.stream(path, body):
        for choice in event["choices"]:
            piece = choice["delta"]["content"] if "delta" in choice else choice["text"]
            streamed[choice["index"]] += piece or ""
    assert streamed == whole


def test_stop_strings_and_max_tokens_still_end_the_text(server: FakeServer) -> None:
    body = server.complete("Hi", guided_regex="[a-m]{30}STOP[a-z]{30}", stop="STOP")
    assert re.fullmatch("[a-m]{30}", texts(body)[0])
    body = server.complete("Hi", guided_regex="a{30}", max_tokens=7)
    assert body["choices"][0]["text"] == "a" * 7
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_json": {"type": "banana"}}, "guided_json", "banana"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": 3}, "guided_json", "JSON schema"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": "yes"}, "guided_choice", "list of strings"),
        ({"guided_choice": ["a", 3]}, "guided_choice", "list of strings"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "at most"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format",
            "json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"response_format": "json_object"}, "response_format", "object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "combined"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "combined"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag", "not supported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_a_400(
    server: FakeServer, fields: dict[str, Any], param: str, reason: str, stream: bool
) -> None:
    response = server.post("/v1/completions", {"prompt": "Hi", "stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert "\n" not in error["message"]


def test_neutral_values_ask_for_nothing(server: FakeServer) -> None:
    fields = {
        "response_format": {"type": "text"},
        "guided_json": None,
        "guided_choice": None,
        "structured_outputs": {},
    }
    assert server.complete("Hi", max_tokens=3, **fields) is not None


def test_a_tokenizer_without_grammars_refuses_only_these() -> None:
    with fake_server() as server:
        assert server.state.served is not None
        server.state.served = replace(server.state.served, grammars=None)
        response = server.post("/v1/completions", {"prompt": "Hi", "guided_regex": "a"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_parameter"
        server.complete("Hi", max_tokens=2)
