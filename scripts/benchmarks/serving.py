"""serve and start: shark-serve under load beside its own bare module, and beside llama-server.

A round is our server, theirs when asked for, then our module alone doing the same decode and the
same prefill. Servers and module are pinned to the same cores; the client runs on the others where
there are any.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import load, machine, peers, servers, steps, timing
from benchmarks.results import (
    OURS,
    LoadRound,
    LoadSeries,
    Round,
    Series,
    ServeCase,
    StepCase,
    Timing,
    percentile,
)
from benchmarks.servers import Server
from benchmarks.worker import Worker, on_cpus
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.manifest import Manifest
from shark_llm.errors import UsageError

START_PROMPT_TOKENS = 16
KEPT_ANSWERS = 4
"""Our prefix cache may keep this many finished requests of a stream before it must evict; with the
server's own default, of all that fits, it would never have to."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load of each case: `per_stream` requests in each of `concurrency` streams a round."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    per_stream: int


def measure(
    setup: steps.Setup, traffic: Traffic, cores: Sequence[int], *, llama_server: Path | None
) -> list[ServeCase]:
    """All concurrencies on each number of cores."""
    manifest = open_bundle(setup.bundle).manifest
    peers.check_dtype(manifest, setup.dtype)
    _check(manifest, traffic)
    cases: list[ServeCase] = []
    for count in cores:
        cpus = machine.choose_cpus(count)
        with ExitStack() as stack:
            running = [
                stack.enter_context(server)
                for server in start_servers(setup, traffic, manifest, cpus, llama_server)
            ]
            bare = stack.enter_context(
                steps.open_ours(setup, manifest, _module_shapes(traffic, manifest), cpus)
            )
            for streams in traffic.concurrency:
                case = _case(setup, traffic, manifest, streams, cpus, running, bare)
                cases.append(case)
                rate = percentile([r.rate for r in case.ours.rounds], 0.5)
                print(f"bench: {count} cores, {streams} streams: {rate:.1f} tok/s", flush=True)
            bare.call("close")
    return cases


def start_servers(
    setup: steps.Setup,
    traffic: Traffic,
    manifest: Manifest,
    cpus: Sequence[int],
    llama_server: Path | None,
) -> Iterator[Server]:
    """Ours, then theirs if wanted; each is started when asked for."""
    streams = max(traffic.concurrency)
    page = manifest.page_size
    per_stream = -(-(traffic.prompt_tokens + traffic.max_tokens) // page) * page
    yield servers.ours(
        setup.bundle,
        device=setup.device,
        cpus=cpus,
        kv_cache_tokens=streams * per_stream * KEPT_ANSWERS,
        max_num_seqs=streams,
    )
    if llama_server is not None:
        yield servers.theirs(
            llama_server,
            peers.gguf(setup.dtype),
            cpus=cpus,
            kv_cache_tokens=streams * -(-2 * per_stream // 256) * 256,
            max_num_seqs=streams,
        )


def _case(
    setup: steps.Setup,
    traffic: Traffic,
    manifest: Manifest,
    streams: int,
    cpus: Sequence[int],
    running: Sequence[Server],
    bare: Worker,
) -> ServeCase:
    loads: dict[str, list[LoadRound]] = {server.side: [] for server in running}
    shapes = _shapes_of(traffic, manifest, streams)
    alone: list[list[Round]] = [[] for _ in shapes]
    for number in range(-1, setup.rounds):  # the first round warms up
        for server in running:
            asked = load.Load(
                concurrency=streams,
                requests=streams * (traffic.per_stream if number >= 0 else 1),
                prompt_tokens=traffic.prompt_tokens,
                max_tokens=traffic.max_tokens,
                vocab_size=manifest.vocab_size,
                seed=streams * 1000 + number,
            )
            sample = load_round(server, asked, cpus)
            if number >= 0:
                loads[server.side].append(sample)
        for shape, rounds in zip(shapes, alone, strict=True):
            count = setup.steps if shape.phase == "decode" else max(2, setup.steps // 8)
            bare.call(
                "prepare",
                phase=shape.phase,
                batch=shape.batch,
                context=shape.context,
                steps=steps.WARMUP + setup.steps,
            )
            result = bare.call("round", steps=count, warmup=steps.WARMUP)
            if number >= 0:
                rounds.append(Round.model_validate(result))
    weights = steps.weight_bytes(setup.bundle, manifest)
    return ServeCase(
        cores=len(cpus),
        concurrency=streams,
        prompt_tokens=traffic.prompt_tokens,
        max_tokens=traffic.max_tokens,
        series=[LoadSeries(side=side, rounds=rounds) for side, rounds in loads.items()],
        module=[
            StepCase(
                cores=len(cpus),
                phase=shape.phase,
                batch=shape.batch,
                context=shape.context,
                bytes_read=weights + shape.batch * steps.kv_bytes(manifest, shape, setup.steps),
                series=[Series(side=OURS, rounds=rounds)],
            )
            for shape, rounds in zip(shapes, alone, strict=True)
        ],
    )


def load_round(server: Server, asked: load.Load, cpus: Sequence[int]) -> LoadRound:
    """One load from its first request to its last token."""
    allowed = os.sched_getaffinity(0)
    with on_cpus(allowed - set(cpus) or allowed):
        busy, own, spent = timing.machine_busy_seconds(), time.process_time(), server.cpu_seconds()
        before = servers.metrics(server.port) if server.side == OURS else {}
        answers, seconds = load.run(servers.HOST, server.port, asked)
        spent = server.cpu_seconds() - spent
        others = timing.machine_busy_seconds() - busy - spent - (time.process_time() - own)
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps] or [0.0]
    return LoadRound(
        output_tokens=sum(answer.output_tokens for answer in answers),
        wall_s=round(seconds, 4),
        ttft_ms=[round(answer.ttft * 1e3, 1) for answer in answers],
        tpot_ms=[round(answer.tpot * 1e3, 2) for answer in answers],
        gap_p50_ms=round(percentile(gaps, 0.5), 2),
        gap_p95_ms=round(percentile(gaps, 0.95), 2),
        server_cpu_s=round(spent, 2),
        others=round(min(1.0, max(0.0, others / seconds / (os.cpu_count() or 1))), 3),
        load=round(os.getloadavg()[0], 2),
        device_wait=device_wait(before, servers.metrics(server.port)) if before else None,
    )


def device_wait(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Between two looks at our metrics."""
    step, forward = (
        after[name] - before[name]
        for name in ("shark_engine_step_seconds_total", "shark_engine_forward_seconds_total")
    )
    return round(1 - forward / step, 4)


def start(setup: steps.Setup, cores: Sequence[int], *, llama_server: Path | None) -> list[Timing]:
    """From the start of the process to ready, to the first token; memory before it. In turn."""
    manifest = open_bundle(setup.bundle).manifest
    peers.check_dtype(manifest, setup.dtype)
    traffic = Traffic(
        concurrency=(1,), prompt_tokens=START_PROMPT_TOKENS, max_tokens=1, per_stream=1
    )
    timings: list[Timing] = []
    for count in cores:
        cpus = machine.choose_cpus(count)
        values: dict[str, dict[str, list[float]]] = {}
        for number in range(setup.rounds):
            for server in start_servers(setup, traffic, manifest, cpus, llama_server):
                with server:
                    sample = {"ready_s": server.ready_seconds, "at_rest_mib": server.memory_mib()}
                    asked = load.Load(
                        concurrency=1,
                        requests=1,
                        prompt_tokens=START_PROMPT_TOKENS,
                        max_tokens=1,
                        vocab_size=manifest.vocab_size,
                        seed=number,
                    )
                    load.run(servers.HOST, server.port, asked)
                    sample["first_token_s"] = time.perf_counter() - server.started
                for name, value in sample.items():
                    side = values.setdefault(server.side, {})
                    side.setdefault(name, []).append(round(value, 3))
        timings += [Timing(name=side, cores=count, values=v) for side, v in values.items()]
        print(f"bench: {count} cores: started {setup.rounds} times", flush=True)
    return timings


def _shapes_of(traffic: Traffic, manifest: Manifest, streams: int) -> list[steps.Shape]:
    """What the module alone does of a load: decode in the middle of the answers, and prefills."""
    middle = traffic.prompt_tokens + traffic.max_tokens // 2
    largest = max(e.batch_size for e in manifest.entry_points if e.phase == "decode")
    prefills = [
        entry.batch_size
        for entry in manifest.entry_points
        if entry.phase == "prefill" and entry.batch_size <= streams
    ]
    return [
        steps.Shape(phase="decode", batch=min(streams, largest), context=middle),
        *(steps.Shape(phase="prefill", batch=n, context=traffic.prompt_tokens) for n in prefills),
    ]


def _module_shapes(traffic: Traffic, manifest: Manifest) -> list[steps.Shape]:
    return [s for streams in traffic.concurrency for s in _shapes_of(traffic, manifest, streams)]


def _check(manifest: Manifest, traffic: Traffic) -> None:
    length = traffic.prompt_tokens + traffic.max_tokens
    if length > manifest.max_model_len:
        raise UsageError(
            f"a request has {length} tokens, the bundle allows {manifest.max_model_len}: "
            "choose a smaller --prompt-tokens or --max-tokens"
        )
