"""The openai package, sync and async, as its own documentation uses it. Runs in its environment."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from typing import Any, Literal

import openai
import pydantic

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "Say hello."}]


class City(pydantic.BaseModel):
    """What the model is asked to write."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    is_capital: bool
    continent: Literal["Africa", "Asia", "Europe"]


def synchronous(base_url: str) -> None:
    """Completions and chat, whole and streamed, n, logprobs, stop, and an error."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    whole = client.completions.create(
        model=model.id, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3
    )
    choice = whole.choices[0]
    assert choice.finish_reason in ("length", "stop"), choice
    assert choice.logprobs is not None
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert tokens
    assert len(tokens) == len(values)
    assert "".join(tokens) == choice.text
    assert all(len(top) >= 3 for top in choice.logprobs.top_logprobs or [{}])
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(
        client.completions.create(
            model=model.id,
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == choice.text
    assert chunks[-1].usage == whole.usage

    several = client.completions.create(
        model=model.id, prompt=[PROMPT, "Once upon"], n=3, max_tokens=8, temperature=1, seed=7
    )
    assert [c.index for c in several.choices] == list(range(6))
    again = client.completions.create(
        model=model.id, prompt=[PROMPT, "Once upon"], n=3, max_tokens=8, temperature=1, seed=7
    )
    assert [c.text for c in again.choices] == [c.text for c in several.choices]

    chat = client.chat.completions.create(
        model=model.id,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        n=2,
    )
    assert len(chat.choices) == 2
    first = chat.choices[0]
    assert first.message.role == "assistant"
    assert first.message.content == chat.choices[1].message.content, "greedy"
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert all(math.exp(t.logprob) <= 1.000001 for t in first.logprobs.content)
    assert all(len(t.top_logprobs) == 2 for t in first.logprobs.content)
    with client.chat.completions.create(
        model=model.id, messages=MESSAGES, max_tokens=12, temperature=0, stream=True
    ) as stream:
        streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert streamed == first.message.content

    cut = client.completions.create(
        model=model.id, prompt=PROMPT, max_tokens=12, temperature=0, stop=[choice.text[-3:]]
    )
    assert choice.text.startswith(cut.choices[0].text)
    assert cut.choices[0].finish_reason == "stop"
    for bad, kind in (
        ({"model": model.id, "max_tokens": -1}, openai.BadRequestError),
        ({"model": "no/such"}, openai.NotFoundError),
    ):
        try:
            client.completions.create(prompt=PROMPT, **bad)
        except kind as error:
            refused: Any = error.body
        else:
            raise AssertionError(f"{bad} was not refused")
        assert refused["message"], "the error's own form is understood"


def structured(base_url: str) -> None:
    """A JSON schema, by the package's own parser, whole and streamed, and one that is refused."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    asked: Any = {"model": model.id, "messages": MESSAGES, "max_tokens": 80, "temperature": 0}
    parsed = client.chat.completions.parse(**asked, response_format=City)
    city = parsed.choices[0].message.parsed
    assert isinstance(city, City), parsed
    with client.chat.completions.stream(**asked, response_format=City) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == city
    free = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content or ""), dict)
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
    try:
        client.chat.completions.create(**asked, response_format=bad)
    except openai.BadRequestError as error:
        refused = error.message
    else:
        raise AssertionError("a schema that is none was not refused")
    assert "response_format" in refused, refused


async def asynchronous(base_url: str) -> None:
    """Eight streams at once, each as it is alone; one is left early."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        (model,) = (await client.models.list()).data

        async def streamed(number: int) -> str:
            text = ""
            async for chunk in await client.completions.create(
                model=model.id,
                prompt=f"{number} and {number} are",
                max_tokens=16,
                temperature=0,
                stream=True,
            ):
                text += chunk.choices[0].text
            return text

        async def left() -> None:
            stream = await client.completions.create(
                model=model.id, prompt=PROMPT, max_tokens=400, stream=True
            )
            async for _ in stream:
                break
            await stream.close()

        *together, _ = await asyncio.gather(*(streamed(n) for n in range(8)), left())
        assert together[3] == await streamed(3)
        parsed = await client.chat.completions.parse(
            model=model.id,
            messages=MESSAGES,
            max_tokens=80,
            temperature=0,
            response_format=City,
        )
        assert isinstance(parsed.choices[0].message.parsed, City), parsed


if __name__ == "__main__":
    synchronous(sys.argv[1])
    structured(sys.argv[1])
    asyncio.run(asynchronous(sys.argv[1]))
    print(
        f"openai {openai.__version__}: sync, async, streams, n, logprobs, stop, JSON schema, errors"
    )
