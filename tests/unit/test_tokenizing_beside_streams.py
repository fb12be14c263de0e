"""Long texts are tokenized beside the streams and the engine, not in front of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from serve_harness import byte_tokenizer, real_server
from shark_llm.server.tokenizer import PromptTokenizer

LONG = "some words and more words " * 10_000  # 260,000 characters


@contextmanager
def longest_pause() -> Iterator[list[float]]:
    """Measures for how long another thread did not get to run, in the one element of the list."""
    worst = [0.0]
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.wait(0.001):
            now = time.perf_counter()
            worst[0] = max(worst[0], now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield worst
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_the_tokenizer_lets_other_threads_run(method: str) -> None:
    """D23: tokenizing held the interpreter lock, so one long prompt stopped every stream."""
    tokenizer = PromptTokenizer(byte_tokenizer())
    ids = tokenizer.encode(LONG)
    work: Callable[[Any], object] = getattr(tokenizer, method)
    argument = LONG if method == "encode" else ids
    began = time.perf_counter()
    with longest_pause() as worst:
        work(argument)
    took = time.perf_counter() - began
    assert worst[0] < max(0.5 * took, 0.05), (worst, took)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": [LONG[:2000]] * 150}),
        ("/v1/completions", {"prompt": [7] * 500_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 20_000}),
        ("/generate", {"text": LONG}),
        ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
        ("/detokenize", {"tokens": [99] * 400_000}),
    ],
)
def test_the_event_loop_answers_during_a_long_prompt(path: str, body: Any) -> None:
    """D23: another client's call is answered while a prompt that is far too long is looked at."""
    with real_server({"p": "x"}) as server:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(server.url + path, json=body, timeout=60))

        started = time.perf_counter()
        client = threading.Thread(target=ask)
        client.start()
        slowest = 0.0
        with httpx.Client(timeout=60) as other:
            while client.is_alive():
                began = time.perf_counter()
                assert other.get(f"{server.url}/health").status_code == 200
                slowest = max(slowest, time.perf_counter() - began)
        assert answers[0].status_code in (200, 400), answers[0].text
        took = time.perf_counter() - started
        assert slowest < max(0.5 * took, 0.25), (slowest, took)
