"""scripts/clients: run clients that others wrote, unmodified, against shark-serve."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import command  # scripts/command.py
from benchmarks import peers, servers
from benchmarks.peers import PeerError
from benchmarks.servers import ServerError

from client_tests.clients import CLIENTS, ClientError, Served
from client_tests.environments import InstallError

KV_CACHE_TOKENS = 16384
MODEL = "SmolLM2-135M-Instruct"


def parser() -> argparse.ArgumentParser:
    """The command line of scripts/clients."""
    top = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    top.add_argument("client", nargs="*", metavar="CLIENT", help=f"{', '.join(CLIENTS)} (all)")
    top.add_argument("--bundle", type=Path, help=f"a bundle of {MODEL} instead of building one")
    return top


def run(arguments: Sequence[str]) -> int:
    """One line for each client; the exit code is 1 if one failed, and 0 if one did not install."""
    options = parser().parse_args(arguments)
    unknown = [name for name in options.client if name not in CLIENTS]
    if unknown:
        parser().error(f"no client {unknown[0]!r}: choose from {', '.join(CLIENTS)}")
    bundle = (options.bundle or peers.bundle("bf16")).resolve()
    failed = 0
    with servers.ours(
        bundle,
        device="local-task",
        cpus=sorted(os.sched_getaffinity(0)),
        kv_cache_tokens=KV_CACHE_TOKENS,
        max_num_seqs=16,
        flags=("--served-model-name", MODEL),
    ) as server:
        served = Served(url=f"http://{servers.HOST}:{server.port}", model=MODEL, bundle=bundle)
        for name in options.client or CLIENTS:
            began = time.perf_counter()
            try:
                shown = CLIENTS[name](served)
            except InstallError as error:
                shown = f"not installed here: {error}"
            except ClientError as error:
                failed += 1
                shown = f"FAILED: {error}"
            seconds = time.perf_counter() - began
            print(f"clients: {name}: {shown} ({seconds:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    command.main("clients", run, PeerError, ServerError)
