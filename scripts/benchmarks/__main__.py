"""scripts/bench: measure this project beside its peers on this machine, and keep what came out."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command  # scripts/command.py

from benchmarks import (
    builds,
    machine,
    page,
    peers,
    results,
    revisions,
    serving,
    shard,
    sharing,
    steps,
    tables,
)
from benchmarks.load import LoadError
from benchmarks.peers import PeerError
from benchmarks.results import BENCHMARKS, Result, Timing
from benchmarks.servers import ServerError
from benchmarks.steps import Setup, Shape
from benchmarks.worker import WorkerError
from shark_llm.errors import UsageError

STANDARD = ("decode", "prefill", "context", "serve")
RESULTS = peers.CACHE / "results"


def parser() -> argparse.ArgumentParser:
    """The command line of scripts/bench."""
    top = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = top.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, text in BENCHMARKS.items():
        _add_options(commands.add_parser(name, help=text, description=text), name)
    standard = f"{', '.join(STANDARD)}, in turn and with their defaults"
    every = commands.add_parser("all", help=standard, description=standard)
    _add_common(every, rounds=None)
    every.add_argument(
        "--keep", action="store_true", help="put the results into docs/performance.md at the end"
    )
    shard.add_options(commands)
    text = "write the tables of docs/performance.md from the results in docs/performance"
    render = commands.add_parser("render", help=text, description=text)
    render.add_argument("results", nargs="*", type=Path, help="results to keep there first")
    return top


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    add = command.add_argument
    rounds = {"serve": 3, "arrival": 5, "prefix": 3, "start": 5, "build": 1}.get(name, 7)
    _add_common(command, rounds=rounds)
    if name != "build":
        add("--bundle", type=Path, help="a bundle to measure instead of building one")
        add("--device", choices=("local-task", "local-sync"), default="local-task")
    if name in ("decode", "context", "serve", "prefill"):
        steps_of_round = 6 if name == "prefill" else 16
        add("--steps", type=_positive, default=steps_of_round, help="counted steps of a round")
    if name == "decode":
        add("--batch", type=_positive, nargs="+", default=[1, 2, 4, 8, 16, 32])
        add("--context", type=_positive, default=128, help="tokens behind each row")
    if name == "prefill":
        add("--tokens", type=_positive, nargs="+", default=[128], help="tokens of a prompt")
        add("--batch", type=_positive, nargs="+", default=[1])
    if name == "context":
        add("--context", type=_positive, nargs="+", default=[128, 1024, 4000, 8000])
        add("--batch", type=_positive, nargs="+", default=[1])
    if name == "serve":
        add("--concurrency", type=_positive, nargs="+", default=[1, 4, 8, 16], help="streams")
        add("--prompt-tokens", type=_positive, default=128)
        add("--max-tokens", type=_positive, default=64)
        add("--per-stream", type=_positive, default=1, help="requests of a stream in a round")
    if name == "arrival":
        add("--streams", type=_positive, default=8, help="that decode when the prompt arrives")
        add("--stream-prompt-tokens", type=_positive, default=128)
        add("--prompt-tokens", type=_positive, default=1024, help="of the one that arrives")
        add("--chunk", type=_positive, default=128, help="token budget of a step, with chunks")
    if name == "prefix":
        add("--prompts", type=_positive, default=16)
        add("--common-tokens", type=_positive, default=512, help="the same in all prompts")
        add("--own-tokens", type=_positive, default=32, help="different in each")
        add("--max-tokens", type=_positive, default=8)
        add("--concurrency", type=_positive, nargs="+", default=[1, 4], help="streams")
    if name in ("serve", "start"):
        add("--llama-server", action="store_true", help="also measure llama-server (builds it)")
    if name in ("decode", "prefill", "context"):
        text = "another commit of this project, measured in place of the peers"
        add("--against", metavar="COMMIT", help=text)
    if name in ("decode", "prefill", "serve"):
        add("--openvino", action="store_true", help="also measure OpenVINO GenAI (installs it)")


def _add_common(command: argparse.ArgumentParser, *, rounds: int | None) -> None:
    add = command.add_argument
    add(
        "--dtype",
        choices=("bf16", "f16", "f32", "int8"),
        default="bf16",
        help="of both sides; int8: our weights, the rest being bf16, and q8_0",
    )
    add("--cores", type=_positive, nargs="+", default=[1, 2], help="how many cores, in turn")
    add("--rounds", type=_positive, default=rounds, help="of each side, in alternation")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def measure(options: argparse.Namespace, given: str) -> Path:
    """Run one benchmark; returns the file of its result."""
    where, started = machine.facts(), machine.now()
    extra: dict[str, Any] = {}
    versions = machine.versions()
    if options.benchmark == "build":
        extra["timings"] = builds.measure(options.dtype, options.cores, options.rounds)
    else:
        against = getattr(options, "against", None)
        if against is not None and getattr(options, "openvino", False):
            raise UsageError("--against leaves no room for --openvino: give one of them")
        setup = Setup(
            bundle=options.bundle or peers.bundle(options.dtype),
            dtype=options.dtype,
            device=options.device,
            rounds=options.rounds,
            steps=getattr(options, "steps", 1),
            openvino=getattr(options, "openvino", False),
            against=None if against is None else revisions.check_out(against),
        )
        if options.benchmark in ("serve", "start"):
            extra, found = _measure_servers(setup, options)
            versions |= found
        elif options.benchmark in ("arrival", "prefix"):
            extra = {"timings": _measure_sharing(setup, options)}
        else:
            measured = steps.measure(setup, shapes(options), options.cores)
            extra = {"steps": measured.cases, "bandwidth": measured.bandwidth}
            versions |= measured.versions
    result = Result(
        benchmark=options.benchmark,
        command=given,
        started=started,
        commit=machine.commit(),
        model="SmolLM2-135M-Instruct",
        dtype=options.dtype,
        machine=where,
        versions=versions,
        **extra,
    )
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = RESULTS / f"{options.benchmark}-{options.dtype}-{stamp}.json"
    results.write(result, path)
    text = tables.section(result)
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}\nbench: the samples are in {path.relative_to(peers.ROOT)}", flush=True)
    return path


def shapes(options: argparse.Namespace) -> list[Shape]:
    """The steps that decode, prefill or context measures."""
    if options.benchmark == "prefill":
        return [
            Shape(phase="prefill", batch=n, context=count)
            for n in options.batch
            for count in options.tokens
        ]
    contexts = [options.context] if options.benchmark == "decode" else options.context
    return [
        Shape(phase="decode", batch=n, context=count) for n in options.batch for count in contexts
    ]


def _measure_servers(
    setup: Setup, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str]]:
    llama_server = peers.llama_server() if options.llama_server else None
    if options.benchmark == "start":
        return {"timings": serving.start(setup, options.cores, llama_server=llama_server)}, {}
    traffic = serving.Traffic(
        concurrency=tuple(options.concurrency),
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.max_tokens,
        per_stream=options.per_stream,
    )
    served, versions = serving.measure(setup, traffic, options.cores, llama_server=llama_server)
    return {"serve": served}, versions


def _measure_sharing(setup: Setup, options: argparse.Namespace) -> list[Timing]:
    if options.benchmark == "arrival":
        arrival = sharing.Arrival(
            streams=options.streams,
            stream_prompt_tokens=options.stream_prompt_tokens,
            prompt_tokens=options.prompt_tokens,
            chunk=options.chunk,
        )
        return sharing.arrival(setup, arrival, options.cores)
    prefix = sharing.Prefix(
        prompts=options.prompts,
        common_tokens=options.common_tokens,
        own_tokens=options.own_tokens,
        max_tokens=options.max_tokens,
        concurrency=tuple(options.concurrency),
    )
    return sharing.prefix(setup, prefix, options.cores)


def run(arguments: Sequence[str]) -> int:
    """What the command line says; returns the exit code."""
    options = parser().parse_args(arguments)
    if options.benchmark == "render":
        page.keep(options.results)
        page.write()
        return 0
    if options.benchmark == "shard":
        shard.run(options)
        return 0
    if options.benchmark != "all":
        measure(options, shlex.join(["scripts/bench", *arguments]))
        return 0
    given = ["--dtype", options.dtype, "--cores", *map(str, options.cores)]
    given += ["--rounds", str(options.rounds)] if options.rounds else []
    made = []
    for name in STANDARD:
        each = [name, *given]
        made.append(measure(parser().parse_args(each), shlex.join(["scripts/bench", *each])))
    if options.keep:
        page.keep(made)
        page.write()
    return 0


if __name__ == "__main__":
    command.main("bench", run, PeerError, WorkerError, ServerError, LoadError)
