"""/v1/chat/completions over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve_harness import TEMPLATE, FakeServer, chat_prompt, fake_server

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    script = {chat_prompt("Hi"): "Hello é...", chat_prompt("ABC"): "ABCDEFGHIJ"}
    with fake_server(script) as running:
        yield running
        running.wait_idle()


def ask(server: FakeServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": HI, "temperature": 0, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_an_answer_whole_and_streamed(server: FakeServer) -> None:
    """D13, D14: the same text, reason and usage; the role comes once, first."""
    whole = ask(server)
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello é..."}
    assert choice["finish_reason"] == "stop"
    events = server.stream(
        "/v1/chat/completions",
        {"messages": HI, "stream_options": {"include_usage": True}},
    )
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta["role"] is None for delta in deltas[1:])
    assert "".join(delta["content"] or "" for delta in deltas) == "Hello é..."
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        whole["usage"]["prompt_tokens"],
        whole["usage"]["completion_tokens"],
    )


def test_exactly_one_bos(server: FakeServer) -> None:
    """D09: the template writes <s>, the tokenizer would add one: the prompt has one."""
    prompt = server.tokenizer.encode(chat_prompt("Hi"), add_bos=False)
    assert ask(server, max_tokens=1)["usage"]["prompt_tokens"] == len(prompt) + 1


@pytest.mark.parametrize("written", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_one_bos_whatever_the_template_writes(written: str) -> None:
    """D09."""
    template = written + TEMPLATE.removeprefix("{{ bos_token }}")
    with fake_server(template=template) as server:
        body = {"messages": HI}
        tokens = server.post("/tokenize", body).json()["tokens"]
        assert tokens[0] == 0
        assert tokens.count(0) == 1


def test_a_stop_string_over_several_tokens(server: FakeServer) -> None:
    """D04, D07 on the chat endpoint."""
    abc = [{"role": "user", "content": "ABC"}]
    cut = ask(server, messages=abc, stop=["DEFGHIJ"])
    assert cut["choices"][0]["message"]["content"] == "ABC"
    assert cut["choices"][0]["finish_reason"] == "stop"
    kept = ask(server, messages=abc, stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"] == "ABCDEFGHIJ"


def test_max_completion_tokens_is_the_same_limit(server: FakeServer) -> None:
    assert ask(server, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert ask(server, max_tokens=3)["choices"][0]["finish_reason"] == "length"


def test_several_choices(server: FakeServer) -> None:
    whole = ask(server, n=3)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    single = ask(server)
    assert whole["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 3 * single["usage"]["completion_tokens"]
    events = server.stream("/v1/chat/completions", {"messages": HI, "n": 2})
    for index in (0, 1):
        own = [c for e in events for c in e["choices"] if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == "stop"


def test_logprobs_carry_exact_bytes(server: FakeServer) -> None:
    """D11: tokens that are part of a letter read U+FFFD and have their bytes."""
    content = ask(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode() == "Hello é..."
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    events = server.stream(
        "/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2}
    )
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_text_parts_and_tools_reach_the_template(server: FakeServer) -> None:
    parts = [{"type": "text", "text": "Hi"}]
    message = {"role": "user", "content": parts}
    assert ask(server, messages=[message])["choices"][0]["message"]["content"] == "Hello é..."
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    plain = ask(server, max_tokens=1)["usage"]["prompt_tokens"]
    shown = ask(server, max_tokens=1, tools=[tool])["usage"]["prompt_tokens"]
    hidden = ask(server, max_tokens=1, tools=[tool], tool_choice="none")["usage"]["prompt_tokens"]
    assert shown > plain
    assert hidden == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "grammar"),
        ({"best_of": 2}, "best_of"),
        ({"guided_grammar": "root ::= a"}, "guided_grammar"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_what_is_not_supported_is_refused(
    server: FakeServer, fields: dict[str, Any], param: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": HI, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert response.json()["error"]["code"] == "unsupported_parameter"


def test_neutral_values_are_fine(server: FakeServer) -> None:
    ask(server, response_format={"type": "text"}, best_of=1, tool_choice="auto", store=False)


def test_a_template_error_is_a_400() -> None:
    with fake_server(template="{{ raise_exception('only users may speak') }}") as server:
        response = server.post("/v1/chat/completions", {"messages": HI})
        assert response.status_code == 400
        assert "only users may speak" in response.json()["error"]["message"]


def test_without_a_template_chat_is_refused_and_completions_work() -> None:
    with fake_server({"p": "x"}, template=None) as server:
        response = server.post("/v1/chat/completions", {"messages": HI})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"
        assert server.complete("p")["choices"][0]["text"] == "x"
