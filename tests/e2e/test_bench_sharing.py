"""The benchmarks of chunked prefill and of the prefix cache, on servers over a fake device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from benchmark_samples import load, servers, sharing, sides
from serve_harness import VOCAB_SIZE, real_server
from shark_llm.engine.settings import EngineSettings
from shark_llm.runtime.runner import Phase, Row

PREFIX = sharing.Prefix(prompts=6, common_tokens=160, own_tokens=16, max_tokens=4, concurrency=(1,))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def as_long_as_it_is(index: int, phase: Phase, rows: Sequence[Row]) -> None:
    """A step takes 1 ms and half a millisecond for each position."""
    time.sleep(0.001 + 0.0005 * sum(len(row.tokens) for row in rows if phase == "prefill"))


@pytest.mark.parametrize("caching", [True, False])
def test_a_common_beginning_hits_once_it_was_computed(caching: bool) -> None:
    settings = EngineSettings(enable_prefix_caching=caching)
    with real_server(engine_settings=settings, on_forward=as_long_as_it_is) as server:
        bodies = list(sharing.prefix_bodies(PREFIX, VOCAB_SIZE, seed=1))
        found = sharing.prefix_round(port_of(server.url), bodies, 1)
    # The first prompt misses; the others find the 10 whole pages of the 160 tokens.
    assert found["hit_rate"] == pytest.approx(5 * 160 / (6 * 176) if caching else 0)
    assert found["ttft_max_ms"] > 80
    assert (found["ttft_p50_ms"] < 60) == caching


def test_chunks_shorten_the_wait_of_the_others() -> None:
    """256 tokens take 129 ms at once; in chunks of 32, no stream waits that long."""
    gaps = {}
    for budget in (48, 400):
        settings = EngineSettings(max_num_batched_tokens=budget, enable_prefix_caching=False)
        with real_server(engine_settings=settings, on_forward=as_long_as_it_is) as server:
            asked = sharing.Arrival(
                streams=3, stream_prompt_tokens=8, prompt_tokens=256, chunk=budget
            )
            found = asyncio.run(sharing.arrive(port_of(server.url), asked, VOCAB_SIZE, 0))
            assert found["ttft_ms"] > 128
            gaps[budget] = found["longest_gap_ms"]
    assert gaps[400] > 128 > gaps[48] > 16


def test_the_share_in_which_the_device_waits_is_read_from_the_metrics() -> None:
    with real_server(step_seconds=0.005) as server:
        port = port_of(server.url)
        before = servers.metrics(port)
        body = load.completion_body([100, 101], 20)
        asyncio.run(load.complete("127.0.0.1", port, body))
        assert 0 < sides.device_wait(before, servers.metrics(port)) < 0.9
