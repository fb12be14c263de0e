"""arrival and prefix: what chunked prefill and the prefix cache do for those who wait.

Both compare two servers of ours that differ in one flag, round by round in alternation.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks import load, machine, peers, servers, steps
from benchmarks.results import Timing
from benchmarks.servers import Server
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.manifest import Manifest
from shark_llm.errors import UsageError

SETTLED_EVENTS = 8
"""So many tokens of each running stream are awaited before the prompt arrives."""
AFTERWARDS = 4
"""Tokens of the running streams that are awaited after its first one, to see their gap end."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A prompt of `prompt_tokens` that arrives while `streams` others decode."""

    streams: int
    stream_prompt_tokens: int
    prompt_tokens: int
    chunk: int
    """Token budget of a step with chunked prefill; without it, a step takes the whole prompt."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """`prompts` prompts whose first `common_tokens` are the same, then `own_tokens` each."""

    prompts: int
    common_tokens: int
    own_tokens: int
    max_tokens: int
    concurrency: Sequence[int]


def arrival(setup: steps.Setup, asked: Arrival, cores: Sequence[int]) -> list[Timing]:
    """Milliseconds to the first token of the prompt, and the longest that a stream had to wait."""
    manifest = _manifest(setup)
    longest = asked.stream_prompt_tokens + _stream_tokens(asked)
    _check_length(manifest, max(longest, asked.prompt_tokens + 1))
    whole = asked.prompt_tokens + asked.streams + manifest.page_size
    budgets = {f"chunks of {asked.chunk}": asked.chunk, "whole": whole}
    forms = {
        name: ("--max-num-batched-tokens", str(budget), "--no-enable-prefix-caching")
        for name, budget in budgets.items()
    }
    tokens = asked.streams * (longest + manifest.page_size) + asked.prompt_tokens + 64
    timings: list[Timing] = []
    for count in cores:
        values: dict[str, dict[str, list[float]]] = {name: {} for name in forms}
        with _running(setup, forms, machine.choose_cpus(count), asked.streams + 1, tokens) as found:
            for number in range(-1, setup.rounds):  # the first round warms up
                for name, server in found.items():
                    sample = asyncio.run(arrive(server.port, asked, manifest.vocab_size, number))
                    if number >= 0:
                        _add(values[name], sample)
        timings += [Timing(name=name, cores=count, values=v) for name, v in values.items()]
        print(f"bench: {count} cores: {values}", flush=True)
    return timings


def prefix(setup: steps.Setup, asked: Prefix, cores: Sequence[int]) -> list[Timing]:
    """Milliseconds to first tokens, the cache's hit rate, and how many times as fast it makes."""
    manifest = _manifest(setup)
    length = asked.common_tokens + asked.own_tokens + asked.max_tokens
    _check_length(manifest, length)
    forms = {"cache on": ("--enable-prefix-caching",), "cache off": ("--no-enable-prefix-caching",)}
    timings: list[Timing] = []
    for count in cores:
        rows = max(asked.concurrency)
        tokens = (rows + 1) * (length + manifest.page_size)
        with _running(setup, forms, machine.choose_cpus(count), rows, tokens) as found:
            for streams in asked.concurrency:
                timings += _prefix_case(setup, asked, manifest, found, streams, count)
    return timings


def _prefix_case(
    setup: steps.Setup,
    asked: Prefix,
    manifest: Manifest,
    found: Mapping[str, Server],
    streams: int,
    cores: int,
) -> list[Timing]:
    values: dict[str, dict[str, list[float]]] = {name: {} for name in found}
    for number in range(-1, setup.rounds):
        bodies = list(prefix_bodies(asked, manifest.vocab_size, seed=1000 * streams + number))
        for name, server in found.items():
            sample = prefix_round(server.port, bodies, streams)
            if number >= 0:
                _add(values[name], sample)
    on, off = (values[name]["ttft_p50_ms"] for name in ("cache on", "cache off"))
    speedups = [round(b / a, 2) for a, b in zip(on, off, strict=True)]
    values["cache on"]["ttft_speedup"] = speedups
    print(f"bench: {cores} cores, {streams} streams: {values}", flush=True)
    return [
        Timing(name=f"{name}, {streams} streams", cores=cores, values=v)
        for name, v in values.items()
    ]


def prefix_bodies(asked: Prefix, vocab_size: int, *, seed: int) -> Iterator[bytes]:
    """Each round has a beginning of its own, so that the round before cannot help."""
    source = random.Random(seed)
    ordinary = range(load.FIRST_ORDINARY_TOKEN, vocab_size)
    common = source.choices(ordinary, k=asked.common_tokens)
    for _ in range(asked.prompts):
        own = source.choices(ordinary, k=asked.own_tokens)
        yield load.completion_body(common + own, asked.max_tokens)


def prefix_round(port: int, bodies: Sequence[bytes], streams: int) -> dict[str, float]:
    """All of them, so many at a time: times to first tokens, and what the cache had of them."""
    before = servers.metrics(port)
    answers = asyncio.run(_ask_all(port, bodies, streams))
    after = servers.metrics(port)
    hits, queries = (
        after[f"shark_prefix_cache_{name}_total"] - before[f"shark_prefix_cache_{name}_total"]
        for name in ("hits", "queries")
    )
    ttft = [answer.ttft * 1e3 for answer in answers]
    return {
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_max_ms": max(ttft),
        "hit_rate": hits / queries,
    }


async def _ask_all(port: int, bodies: Sequence[bytes], streams: int) -> list[load.Answer]:
    waiting, answers = list(bodies), list[load.Answer]()

    async def stream() -> None:
        while waiting:
            answers.append(await load.complete(servers.HOST, port, waiting.pop(0)))

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    return answers


async def arrive(port: int, asked: Arrival, vocab_size: int, seed: int) -> dict[str, float]:
    """One arrival: its time to the first token, and the longest gap of the others meanwhile."""
    source = random.Random(seed)
    ordinary = range(load.FIRST_ORDINARY_TOKEN, vocab_size)
    times: list[list[float]] = [[] for _ in range(asked.streams)]
    running = []
    for each in times:
        prompt = source.choices(ordinary, k=asked.stream_prompt_tokens)
        body = load.completion_body(prompt, _stream_tokens(asked))
        running.append(asyncio.create_task(load.complete(servers.HOST, port, body, each)))
    try:
        await _until(lambda: all(len(each) >= SETTLED_EVENTS for each in times), running)
        body = load.completion_body(source.choices(ordinary, k=asked.prompt_tokens), 1)
        answer = await load.complete(servers.HOST, port, body)
        seen = [len(each) for each in times]
        await _until(
            lambda: all(len(e) >= n + AFTERWARDS for e, n in zip(times, seen, strict=True)), running
        )
    finally:
        for task in running:  # the server ends what nobody reads any more
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    first = answer.events[0]
    gaps = [
        b - a
        for each in times
        for a, b in itertools.pairwise(each)
        if b >= answer.sent and a <= first
    ]
    return {"ttft_ms": answer.ttft * 1e3, "longest_gap_ms": max(gaps) * 1e3}


def _stream_tokens(asked: Arrival) -> int:
    """Enough for a stream to outlast the arrival: a step is at least one page of prefill."""
    return SETTLED_EVENTS + asked.prompt_tokens // 16 + 64


async def _until(holds: Callable[[], bool], running: Sequence[asyncio.Task[load.Answer]]) -> None:
    deadline = time.perf_counter() + load.REQUEST_TIMEOUT
    while not holds():
        for task in running:
            if task.done():
                task.result()  # raises what ended it
                raise load.LoadError("a stream ended before the prompt had arrived")
        if time.perf_counter() > deadline:
            raise load.LoadError("the streams do not move")
        await asyncio.sleep(0.001)


@contextmanager
def _running(
    setup: steps.Setup,
    forms: Mapping[str, Sequence[str]],
    cpus: Sequence[int],
    max_num_seqs: int,
    kv_cache_tokens: int,
) -> Iterator[dict[str, Server]]:
    """A server for each form; those that are not asked are idle."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                servers.ours(
                    setup.bundle,
                    device=setup.device,
                    cpus=cpus,
                    kv_cache_tokens=kv_cache_tokens,
                    max_num_seqs=max_num_seqs,
                    flags=flags,
                )
            )
            for name, flags in forms.items()
        }


def _add(values: dict[str, list[float]], sample: Mapping[str, float]) -> None:
    for name, value in sample.items():
        values.setdefault(name, []).append(round(value, 3))


def _manifest(setup: steps.Setup) -> Manifest:
    manifest = open_bundle(setup.bundle).manifest
    peers.check_dtype(manifest, setup.dtype)
    return manifest


def _check_length(manifest: Manifest, length: int) -> None:
    if length > manifest.max_model_len:
        raise UsageError(
            f"a request has {length} tokens, the bundle allows {manifest.max_model_len}: "
            "choose shorter prompts"
        )
