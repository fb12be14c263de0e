"""What is refused early: texts far beyond the context, and more calls than fit."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from serve_harness import fake_server, real_server, wait_for
from shark_llm.server.tokenizer import PromptTokenizer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 3_000_000}),
        ("/v1/completions", {"prompt": ["fine", "long text " * 300_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3_000_000}]}),
        ("/generate", {"text": "é" * 1_000_000}),
    ],
)
def test_a_text_far_too_long_is_refused_after_its_beginning(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Tokenizing takes seconds per megabyte: what cannot fit is not tokenized to its end."""
    sizes: list[int] = []
    encode = PromptTokenizer.encode

    def record(self: PromptTokenizer, text: str, *, add_bos: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, add_bos=add_bos)

    monkeypatch.setattr(PromptTokenizer, "encode", record)
    with fake_server({"fine": "x"}) as server:
        response = server.post(path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512 tokens" in error["message"]
        assert "at least" in error["message"]
    assert sum(sizes) < 10_000


def test_a_long_text_of_few_tokens_is_not_refused() -> None:
    """64 letters to a token: far more letters than the parts looked at first."""
    with fake_server() as server:
        served = server.state.served
        assert served is not None
        text = "..." * 6000  # "..." is one token: 6000 of them do not fit in 512
        refused = server.post("/v1/completions", {"prompt": text, "max_tokens": 1})
        assert refused.status_code == 400
        # A tokenizer that makes one token of 100 letters.
        encode = served.tokenizer.encode

        def coarse(text: str, *, add_bos: bool = True) -> list[int]:
            return [9] * (len(text) // 100) if len(text) > 1000 else encode(text, add_bos=add_bos)

        served.tokenizer.encode = coarse  # type: ignore[method-assign]
        body = server.complete("y" * 50_000, max_tokens=1)
        assert body["usage"]["prompt_tokens"] == 500


def test_tokenize_counts_what_is_too_long() -> None:
    with fake_server() as server:
        text = "x" * 20_000
        body = server.post("/tokenize", {"prompt": text}).json()
        assert body["count"] == 20_001
        body = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()
        assert body["count"] > 20_000


def test_more_calls_than_the_limit_get_a_503() -> None:
    gate = threading.Event()
    options: dict[str, Any] = {"max_concurrent_requests": 2}
    with real_server(
        {"p": "x"}, settings=options, on_forward=lambda *_: gate.wait(10), wait_ready=False
    ) as server:
        gate.set()
        wait_for(lambda: server.life.state.phase == "ready")
        gate.clear()

        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                body = {"prompt": "p", "temperature": 0}
                calls = [
                    asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)
                ]
                while server.life.state.num_active < 2:
                    await asyncio.sleep(0.01)
                refused = await client.post("/v1/completions", json=body)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
                error = refused.json()["error"]
                assert error["code"] == "too_many_requests"
                assert "2" in error["message"]
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/metrics")).status_code == 200
                gate.set()
                for call in calls:
                    assert (await call).status_code == 200
                assert (await client.post("/v1/completions", json=body)).status_code == 200

        asyncio.run(run())


def test_a_call_that_fails_gives_its_place_back() -> None:
    with fake_server({"p": "x"}, settings={"max_concurrent_requests": 1}) as server:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": []}).status_code == 400
            assert server.get("/nope").status_code == 404
        assert server.complete("p")["choices"][0]["text"] == "x"


def test_an_unauthorized_call_takes_no_place() -> None:
    settings = {"max_concurrent_requests": 1, "api_keys": ("k",)}
    with fake_server({"p": "x"}, settings=settings) as server:
        assert server.post("/v1/completions", {"prompt": "p"}).status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert server.post("/v1/completions", {"prompt": "p"}, headers=headers).status_code == 200
