"""scripts/load: put a server of a tiny model under load and faults, and check every answer."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import command  # scripts/command.py
from benchmarks.servers import ServerError

from load_tests import faults, malformed, memory, mixed, target
from load_tests.checks import Violation
from load_tests.target import TargetError
from shark_llm.engine.settings import EngineSettings
from shark_llm.server.settings import ServerSettings

SCENARIOS = ("mixed", "malformed", "faults", "memory")
KV_CACHE_TOKENS = 800
"""Less than 16 running requests of `mixed` need: some are preempted, and pages are evicted."""
STALLED_CHOICES, STALLED_TOKENS = 4, 3000
BACKLOG_TOKENS = 256


def parser() -> argparse.ArgumentParser:
    """The command line of scripts/load."""
    top = argparse.ArgumentParser(prog="scripts/load", description=__doc__)
    add = top.add_argument
    add("scenario", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; default: all")
    add("--requests", type=int, default=2000, help="of mixed")
    add("--concurrency", type=int, default=64, help="requests at once")
    add("--bodies", type=int, default=5000, help="of malformed")
    add("--rounds", type=int, default=20, help="of faults: failing steps")
    add("--hour", type=int, default=12000, help="requests of memory: an hour's worth")
    add("--seed", type=int, default=0)
    return top


def say(text: str) -> None:
    print(f"load: {text}", flush=True)


def run_mixed(options: argparse.Namespace, bundle: Path) -> str:
    asks = mixed.asks(options.requests, seed=options.seed, tokens=target.PROMPT_TOKENS)
    with target.process(bundle, "--kv-cache-tokens", str(KV_CACHE_TOKENS)) as (address, _):
        outcome = asyncio.run(mixed.run(address, asks, concurrency=options.concurrency))
        mixed.check_counts(outcome)
    alone = ("--no-enable-prefix-caching", "--max-num-seqs", "1")
    with target.process(bundle, *alone) as (address, _):
        compared = asyncio.run(mixed.check_alone(address, outcome))
    return f"{outcome.summary}; {compared} answers equal those of the same request alone"


def run_malformed(options: argparse.Namespace, bundle: Path) -> str:
    with target.process(bundle) as (address, _):
        statuses, streams = asyncio.run(
            malformed.run(
                address,
                malformed.bodies(options.bodies, seed=options.seed),
                prompt=target.prompt(40),
                concurrency=8,
            )
        )
    shown = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return f"{statuses.total()} bodies: {shown}; {streams} streams beside them, all the same"


def run_faults(options: argparse.Namespace, bundle: Path) -> str:
    logging.getLogger("shark_llm").setLevel(logging.CRITICAL + 1)  # it tells of every fault
    injected = faults.Faults()
    with target.in_this_process(
        bundle,
        lambda runner: faults.FaultyRunner(runner, injected),
        kv_cache_tokens=(1 + STALLED_CHOICES) * STALLED_TOKENS,
        settings=EngineSettings(),
        server_settings=ServerSettings(
            served_model_name="t0", port=0, max_backlog_tokens=BACKLOG_TOKENS
        ),
    ) as address:
        failed = asyncio.run(
            faults.failing_steps(address, injected, rounds=options.rounds, seed=options.seed)
        )
        slowest = asyncio.run(faults.slow_step(address, injected, seconds=3.0))
        stalled = asyncio.run(
            faults.stalled_reader(
                address,
                choices=STALLED_CHOICES,
                max_tokens=STALLED_TOKENS,
                backlog=BACKLOG_TOKENS,
            )
        )
    return (
        f"{options.rounds} failing steps ended {failed} requests and nothing else; in a step of "
        f"3 s /health took at most {1e3 * slowest:.0f} ms; a stalled reader was given up after "
        f"{stalled:.0f} of {STALLED_CHOICES * STALLED_TOKENS} tokens"
    )


def run_memory(options: argparse.Namespace, bundle: Path) -> str:
    with target.process(bundle, "--kv-cache-tokens", str(KV_CACHE_TOKENS)) as (address, server):
        resident = asyncio.run(
            memory.run(
                address,
                server,
                requests=options.hour,
                concurrency=options.concurrency,
                seed=options.seed,
                tokens=target.PROMPT_TOKENS,
            )
        )
    shown = ", ".join(f"{value:.0f}" for value in resident)
    return f"{options.hour} requests; MiB resident after each of {len(resident)} rounds: {shown}"


RUN: dict[str, Callable[[argparse.Namespace, Path], str]] = {
    "mixed": run_mixed,
    "malformed": run_malformed,
    "faults": run_faults,
    "memory": run_memory,
}


def run(arguments: Sequence[str]) -> int:
    """All scenarios asked for, one line each; returns the exit code."""
    options = parser().parse_args(arguments)
    unknown = [name for name in options.scenario if name not in SCENARIOS]
    if unknown:
        parser().error(f"no scenario {unknown[0]!r}: choose from {', '.join(SCENARIOS)}")
    say("compiling the tiny model for this CPU, unless it is there")
    bundle = target.bundle()
    failed = 0
    for name in options.scenario or SCENARIOS:
        began = time.perf_counter()
        try:
            shown = RUN[name](options, bundle)
        except Violation as violation:
            failed += 1
            shown = f"FAILED: {violation}"
        say(f"{name}: {shown} ({time.perf_counter() - began:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    command.main("load", run, TargetError, ServerError)
