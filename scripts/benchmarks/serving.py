"""serve and start: shark-serve under load beside its own bare module, and beside its peers.

A round is our server, the peers that were asked for, then our module alone doing the same decode
and the same prefill. All are pinned to the same cores; the client runs on the others where there
are any.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import load, machine, peers, servers, steps
from benchmarks.results import (
    OURS,
    LoadRound,
    LoadSeries,
    Round,
    Series,
    ServeCase,
    StepCase,
    Timing,
)
from benchmarks.servers import Server
from benchmarks.sides import OpenVinoSide, ServerSide, Side, openvino
from benchmarks.worker import Worker
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
) -> tuple[list[ServeCase], dict[str, str]]:
    """All concurrencies on each number of cores; versions of what takes part beside us."""
    manifest = open_bundle(setup.bundle).manifest
    peers.check_dtype(manifest, setup.dtype)
    _check(manifest, traffic)
    cases: list[ServeCase] = []
    versions: dict[str, str] = {}
    for count in cores:
        cpus = machine.choose_cpus(count)
        with ExitStack() as stack:
            running: list[Side] = [
                ServerSide(stack.enter_context(server), cpus, form)
                for server, form in start_servers(setup, traffic, manifest, cpus, llama_server)
            ]
            if setup.openvino:
                worker, said = stack.enter_context(
                    openvino(setup.dtype, cpus, kv_cache_tokens=_peer_tokens(traffic, manifest))
                )
                running.append(OpenVinoSide(worker, said))
                versions["openvino-genai"] = said["version"]
            tokens = steps.kv_cache_tokens(setup, manifest, _module_shapes(traffic, manifest))
            bare = steps.open_shark(stack, setup.device, setup.bundle, tokens, cpus)
            for streams in traffic.concurrency:
                case = _case(setup, traffic, manifest, streams, cpus, running, bare)
                cases.append(case)
                rates = ", ".join(
                    f"{s.side} {statistics.median(r.rate for r in s.rounds):.1f}"
                    for s in case.series
                )
                print(f"bench: {count} cores, {streams} streams, tok/s: {rates}", flush=True)
            bare.call("close")
    return cases, versions


def start_servers(
    setup: steps.Setup,
    traffic: Traffic,
    manifest: Manifest,
    cpus: Sequence[int],
    llama_server: Path | None,
) -> Iterator[tuple[Server, str]]:
    """Ours, then theirs if wanted in both its forms; each is started when asked for."""
    streams = max(traffic.concurrency)
    yield (
        servers.ours(
            setup.bundle,
            device=setup.device,
            cpus=cpus,
            kv_cache_tokens=streams * _tokens_of_a_stream(traffic, manifest) * KEPT_ANSWERS,
            max_num_seqs=streams,
        ),
        "",
    )
    if llama_server is not None:
        for unified in (True, False) if streams > 1 else (True,):
            server = servers.theirs(
                llama_server,
                peers.gguf(setup.dtype),
                cpus=cpus,
                kv_cache_tokens=_peer_tokens(traffic, manifest),
                max_num_seqs=streams,
                unified=unified,
            )
            yield server, "one KV cache" if unified else "a KV cache for each"


def _tokens_of_a_stream(traffic: Traffic, manifest: Manifest) -> int:
    page = manifest.page_size
    return -(-(traffic.prompt_tokens + traffic.max_tokens) // page) * page


def _peer_tokens(traffic: Traffic, manifest: Manifest) -> int:
    """A peer's KV cache: twice what the streams need, in whole steps of 256."""
    per_stream = -(-2 * _tokens_of_a_stream(traffic, manifest) // 256) * 256
    return max(traffic.concurrency) * per_stream


def _case(
    setup: steps.Setup,
    traffic: Traffic,
    manifest: Manifest,
    streams: int,
    cpus: Sequence[int],
    running: Sequence[Side],
    bare: Worker,
) -> ServeCase:
    loads: dict[Side, list[LoadRound]] = {side: [] for side in running}
    shapes = _shapes_of(traffic, manifest, streams)
    alone: list[list[Round]] = [[] for _ in shapes]
    for number in range(-1, setup.rounds):  # the first round warms up
        for side, rounds in loads.items():
            asked = load.Load(
                concurrency=streams,
                requests=streams * (traffic.per_stream if number >= 0 else 1),
                prompt_tokens=traffic.prompt_tokens,
                max_tokens=traffic.max_tokens,
                vocab_size=manifest.vocab_size,
                seed=streams * 1000 + number,
            )
            rounds.append(side.round(asked))
        if number < 0:
            loads = {side: [] for side in fastest_forms(loads)}
        for shape, of_shape in zip(shapes, alone, strict=True):
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
                of_shape.append(Round.model_validate(result))
    weights = steps.weight_bytes(setup.bundle, manifest)
    return ServeCase(
        cores=len(cpus),
        concurrency=streams,
        prompt_tokens=traffic.prompt_tokens,
        max_tokens=traffic.max_tokens,
        series=[
            LoadSeries(side=side.name, form=side.form, rounds=rounds)
            for side, rounds in loads.items()
        ],
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


def fastest_forms(warmups: Mapping[Side, Sequence[LoadRound]]) -> list[Side]:
    """Of each side's forms the one with the best rate, in the order of the sides."""
    best: dict[str, Side] = {}
    for side, rounds in warmups.items():
        other = best.get(side.name)
        if other is None or rounds[-1].rate > warmups[other][-1].rate:
            best[side.name] = side
    return list(best.values())


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
            for server, _ in start_servers(setup, traffic, manifest, cpus, llama_server):
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
