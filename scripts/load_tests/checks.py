"""What must hold of every answer, and of a server that has nothing left to do."""

from __future__ import annotations

import asyncio

from benchmarks.servers import parse_metrics

from load_tests.client import Address, Reply, get

IDLE_TIMEOUT = 30.0


class Violation(Exception):
    """Something that must hold does not; the message says what and where."""


def check_whole(reply: Reply, what: str, *, choices: int = 1) -> None:
    """An answer that was awaited: each choice ends exactly once, and nothing follows the end."""
    if reply.status != 200:
        raise Violation(f"{what}: HTTP {reply.status}: {reply.body}")
    if reply.errors:
        raise Violation(f"{what}: {reply.errors[0]}")
    if len(reply.finish_reasons) != choices:
        raise Violation(f"{what}: {choices} choices ended {len(reply.finish_reasons)} times")
    if reply.body is None and (not reply.done or reply.after_done):
        raise Violation(f"{what}: the stream does not end with [DONE]")


def check_failed(reply: Reply, what: str) -> None:
    """An answer that a fault ended: one error, and no sign of a good end."""
    if reply.body is None:
        ended = len(reply.errors) == 1 and not reply.finish_reasons and not reply.done
    else:
        ended = reply.status >= 500 and len(reply.errors) == 1
    if not ended:
        raise Violation(
            f"{what}: HTTP {reply.status}, errors {reply.errors}, "
            f"ended {reply.finish_reasons}, [DONE] {reply.done}"
        )


async def metrics(address: Address) -> dict[str, float]:
    """The server's metrics by name, those of several labels added up."""
    _, text = await get(address, "/metrics")
    return parse_metrics(text)


async def check_idle(address: Address) -> dict[str, float]:
    """Wait until nothing runs: all pages must be back then, and the server healthy."""
    deadline = asyncio.get_running_loop().time() + IDLE_TIMEOUT
    while True:
        now = await metrics(address)
        left = {
            name: now[name]
            for name in (
                "shark_num_requests_running",
                "shark_num_requests_waiting",
                "shark_kv_cache_usage_perc",
            )
        }
        if not any(left.values()):
            break
        if asyncio.get_running_loop().time() > deadline:
            raise Violation(f"all clients are gone, and {IDLE_TIMEOUT:.0f} s later: {left}")
        await asyncio.sleep(0.05)
    status, body = await get(address, "/health")
    if status != 200:
        raise Violation(f"idle, and /health says {status}: {body}")
    return now
