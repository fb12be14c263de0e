"""Does the server's process grow over an hour's worth of requests, sent as fast as it can?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.servers import Server

from load_tests import mixed
from load_tests.checks import Violation
from load_tests.client import Address

ROUNDS = 12
ALLOWED = 0.01
"""Growth from the middle third of the rounds to the last. The first third warms up: allocators,
and the prefix cache up to the size of the pool."""


async def run(
    address: Address,
    server: Server,
    *,
    requests: int,
    concurrency: int,
    seed: int,
    tokens: Sequence[int],
) -> list[float]:
    """MiB after each round of ever new requests.

    Raises:
        Violation: it grows, or what `mixed` raises.
    """
    resident = []
    for number in range(ROUNDS):
        asks = mixed.asks(requests // ROUNDS, seed=seed + number, tokens=tokens)
        await mixed.run(address, asks, concurrency=concurrency)
        resident.append(server.memory_mib())
    check_growth(resident)
    return resident


def check_growth(resident: Sequence[float]) -> None:
    """Raises Violation when the last third of the rounds lies above the middle one."""
    third = len(resident) // 3
    middle = statistics.median(resident[third : 2 * third])
    last = statistics.median(resident[2 * third :])
    if last > middle * (1 + ALLOWED):
        shown = ", ".join(f"{value:.1f}" for value in resident)
        raise Violation(f"the process grows from {middle:.1f} to {last:.1f} MiB: {shown}")
