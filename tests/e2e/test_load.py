"""scripts/load in small, on a fake device: the same scenarios that it runs on a compiled model."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from serve_harness import RealServer, real_server
from shark_llm.engine.settings import EngineSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from load_tests import faults, malformed, memory, mixed
from load_tests.checks import Violation, check_whole
from load_tests.client import Address, Reply, post

Result = TypeVar("Result")
TOKENS = range(4, 260)  # each stands for one byte


def address_of(server: RealServer) -> Address:
    host, port = server.url.removeprefix("http://").split(":")
    return Address(host=host, port=int(port))


def run(server: RealServer, scenario: Callable[[Address], Coroutine[Any, Any, Result]]) -> Result:
    return asyncio.run(scenario(address_of(server)))


def test_mixed_requests_end_once_and_as_alone() -> None:
    """80 requests, 32 at once, too few pages, and a tenth of the clients leave: E14, D15."""
    asks = mixed.asks(80, seed=3, tokens=TOKENS)
    with real_server(max_model_len=400, num_pages=40) as server:
        outcome = run(server, lambda address: mixed.run(address, asks, concurrency=32))
        mixed.check_counts(outcome)
        assert outcome.metrics["shark_num_preemptions_total"] > 0
        assert outcome.metrics["shark_prefix_cache_hits_total"] > 0
        assert any(reply.left for reply in outcome.replies)
        stats = server.engine.stats()
        assert stats.pages_held == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total
    settings = EngineSettings(enable_prefix_caching=False, max_num_seqs=1)
    with real_server(max_model_len=400, engine_settings=settings) as server:
        assert run(server, lambda address: mixed.check_alone(address, outcome)) > 60


def test_bad_bodies_beside_a_good_stream() -> None:
    """100 bodies of all kinds: each is refused with a 4xx, and the stream does not notice."""
    with real_server() as server:
        statuses, streams = run(
            server,
            lambda address: malformed.run(
                address, malformed.bodies(100, seed=1), prompt=list(range(10, 30)), concurrency=4
            ),
        )
    assert statuses.total() == 100
    assert set(statuses) <= {400, 404, 413}
    assert streams > 0


def test_a_failing_step_ends_its_rows_and_a_slow_one_blocks_nobody() -> None:
    """D17: an error in the middle of a stream is an event of it, and nothing else is hit."""
    injected = faults.Faults()
    with real_server(on_forward=lambda *_: injected.strike()) as server:
        failed = run(
            server, lambda address: faults.failing_steps(address, injected, rounds=4, seed=5)
        )
        assert failed > 0
        run(server, lambda address: faults.slow_step(address, injected, seconds=1.0))


def test_a_lost_end_is_noticed() -> None:
    """The checks can fail: a stream cut short, one with two ends, one that goes on after [DONE]."""
    end = {"choices": [{"text": "", "finish_reason": "length"}]}
    token = {"choices": [{"text": "a"}]}
    check_whole(Reply(status=200, events=[token, end], done=True), "a good stream")
    for bad in (
        Reply(status=200, events=[token], done=True),
        Reply(status=200, events=[token, end]),
        Reply(status=200, events=[token, end, end], done=True),
        Reply(status=200, events=[token, end], done=True, after_done=True),
        Reply(status=200, events=[token, {"error": {"message": "x"}}, end], done=True),
        Reply(status=503, body={"error": {"message": "x"}}),
    ):
        with pytest.raises(Violation):
            check_whole(bad, "a bad stream")


def test_growth_is_noticed() -> None:
    steady = [100.0, 140, 150, 151, 150, 151, 151, 150, 151]
    memory.check_growth(steady)
    with pytest.raises(Violation, match="grows"):
        memory.check_growth([100.0, 140, 150, 153, 156, 159, 162, 165, 168])


def test_a_wrong_answer_is_noticed() -> None:
    """An answer that differs from the same request alone fails the run."""
    (ask,) = mixed.asks(1, seed=1, tokens=TOKENS)
    with real_server(max_model_len=400) as server:
        body = ask.body(stream=False)
        reply = run(server, lambda address: post(address, mixed.PATH, body))
        assert reply.body is not None
        outcome = mixed.Outcome(asks=[ask], replies=[reply], metrics={})
        assert run(server, lambda address: mixed.check_alone(address, outcome)) == 1
        changed = json.loads(json.dumps(reply.body))
        changed["choices"][0]["text"] += "x"
        other = mixed.Outcome(asks=[ask], replies=[Reply(status=200, body=changed)], metrics={})
        with pytest.raises(Violation, match="alone it gives"):
            run(server, lambda address: mixed.check_alone(address, other))
