"""best_of: more candidates than answers, chosen by mean log-probability."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve_harness import FakeServer, fake_server


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running
        running.wait_idle()


def candidates(server: FakeServer, count: int, **fields: Any) -> list[dict[str, Any]]:
    """The same choices asked for with n, best first by the mean of their tokens."""
    body = server.complete("Hi", n=count, logprobs=0, seed=3, temperature=1.2, **fields)
    choices: list[dict[str, Any]] = body["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    return sorted(choices, key=mean, reverse=True)


def test_the_likeliest_come_first(server: FakeServer) -> None:
    fields = {"max_tokens": 6, "ignore_eos": True}
    expected = candidates(server, 8, **fields)
    body = server.complete("Hi", n=3, best_of=8, seed=3, temperature=1.2, **fields)
    assert [choice["text"] for choice in body["choices"]] == [e["text"] for e in expected[:3]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    # All that was generated is counted, the prompt once.
    assert body["usage"]["completion_tokens"] == 8 * 6
    assert body["usage"]["prompt_tokens"] == 3


def test_with_logprobs_echo_and_several_prompts(server: FakeServer) -> None:
    fields = {"max_tokens": 4, "ignore_eos": True, "seed": 3, "temperature": 1.2}
    several = ["Hi", "Ho there"]
    body = server.complete(several, best_of=4, echo=True, logprobs=1, **fields)
    assert [choice["text"][:2] for choice in body["choices"]] == ["Hi", "Ho"]
    for prompt, choice in zip(several, body["choices"], strict=True):
        alone = server.complete(prompt, best_of=4, **fields)
        assert choice["text"] == prompt + alone["choices"][0]["text"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == 1 + len(prompt) + 4
        assert logprobs["token_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 2 * 4 * 4


def test_the_end_of_the_text_counts_as_a_token() -> None:
    """An answer of one token and its EOS: the EOS's likelihood must be part of the mean."""
    with fake_server({"p": "x"}) as server:  # certain: 50 above all others
        body = server.complete("p", best_of=2, n=1)
        assert body["choices"][0]["text"] == "x"
        assert body["usage"]["completion_tokens"] == 4
        empty = server.complete("p", best_of=2, logit_bias={"1": 100.0, "91": -100.0})
        assert empty["choices"][0]["finish_reason"] == "stop"


def test_nothing_generated_is_fine(server: FakeServer) -> None:
    body = server.complete("Hi", best_of=3, max_tokens=0, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["Hi"]


def test_with_a_grammar(server: FakeServer) -> None:
    body = server.complete("Hi", best_of=5, n=2, guided_regex="[0-9]{4}", temperature=1.0)
    assert all(choice["text"].isdecimal() for choice in body["choices"])


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 3},
        {"best_of": 3, "stream": True},
        {"best_of": 0},
        {"best_of": 129},
        {"best_of": "2"},
    ],
)
def test_refusals(server: FakeServer, fields: dict[str, Any]) -> None:
    response = server.post("/v1/completions", {"prompt": "Hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"


def test_equal_to_n_may_stream(server: FakeServer) -> None:
    assert server.stream("/v1/completions", {"prompt": "Hi", "n": 2, "best_of": 2, "max_tokens": 2})


def test_the_fan_out_is_bounded(server: FakeServer) -> None:
    response = server.post("/v1/completions", {"prompt": ["p"] * 20, "best_of": 100})
    assert response.status_code == 400
    assert "2000" in response.json()["error"]["message"]
