"""The `openai` package, unmodified, against a real server on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest

from serve_harness import MODEL, RealServer, chat_prompt, real_server

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    script = {chat_prompt("Hi"): "Hello é...", "alphabet:": "ABCDEFGHIJ"}
    settings = {"api_keys": ("secret",)}
    with real_server(script, settings=settings, step_seconds=0.001) as running:
        yield running


@pytest.fixture
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20
    ) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "Hello é..."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10


def test_chat_stream_has_the_same_text_and_usage(client: openai.OpenAI) -> None:
    """D13, D14: more than one chunk, the same text, usage last and only once."""
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_streaming_without_options_reads_choices_0_always(client: openai.OpenAI) -> None:
    """D13: what simple clients do."""
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "Hello é..."


def test_logprobs_and_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    assert len(answer.choices) == 2
    found = answer.choices[1].logprobs
    assert found is not None
    assert found.content is not None
    assert [entry.token for entry in found.content][:5] == ["H", "e", "l", "l", "o"]
    assert len(found.content[0].top_logprobs) == 2


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="alphabet:", temperature=0, stop=["EFG"], logprobs=1, echo=True
    )
    assert answer.choices[0].text == "alphabet:ABCD"
    stream = client.completions.create(
        model=MODEL, prompt="alphabet:", temperature=0, max_tokens=5, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "ABCDE"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_become_the_packages_own(server: RealServer, client: openai.OpenAI) -> None:
    """D27, D28: each status is its own exception, with code and param."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_async_clients_share_the_engine(server: RealServer) -> None:
    """Twelve at once: each gets its own text, whole or streamed."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True, max_tokens=number
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(parts)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=20
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(1, 6)))

    assert asyncio.run(run()) == ["H", "He", "Hel", "Hell", "Hello"]


class _City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    population: int = pydantic.Field(ge=0, le=10**7)
    kind: Literal["town", "village"]
    twins: list[str] = pydantic.Field(max_length=0)


def test_structured_output_becomes_an_object(client: openai.OpenAI) -> None:
    """`parse` sends the model's JSON schema and reads the answer with it."""
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=_City, temperature=1.0, seed=1, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, _City)


def test_a_stream_of_structured_output_becomes_an_object(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=_City, temperature=1.0, seed=2
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert isinstance(final.choices[0].message.parsed, _City)


def test_extra_body_and_json_object(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x", extra_body={"guided_regex": "[0-9]{3}"}, max_tokens=9
    )
    assert answer.choices[0].text.isdecimal()
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"guided_regex": "("})
    chosen = client.completions.create(model=MODEL, prompt="x", best_of=3, n=2, max_tokens=2)
    assert len(chosen.choices) == 2
