"""A device that fails at some step, a step that takes long, a reader that does not read.

The device is the real one with a fault in front of it.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Collection, Sequence
from typing import Any

from load_tests import target
from load_tests.checks import Violation, check_failed, check_idle, check_whole, metrics
from load_tests.client import Address, Reply, get, post
from shark_llm.runtime.runner import ModelRunner, Phase, Row, StepOutput

PATH = "/v1/completions"
ANSWERING_WITHIN = 1.0
"""Seconds in which /health must answer while the device is busy with one step."""


class Faults:
    """What goes wrong, and at which steps. They count from the last `arm`."""

    def __init__(self) -> None:
        self.arm()

    def arm(
        self,
        *,
        fail_at: Collection[int] = (),
        slow_at: Collection[int] = (),
        slow_seconds: float = 0.0,
    ) -> None:
        """Count from 0 again: raise at the steps `fail_at`, sleep first at those of `slow_at`."""
        self._fail_at, self._slow_at = frozenset(fail_at), frozenset(slow_at)
        self._slow_seconds = slow_seconds
        self._step = 0

    def strike(self) -> None:
        """To be called at the beginning of each step."""
        step = self._step
        self._step += 1
        if step in self._slow_at:
            time.sleep(self._slow_seconds)
        if step in self._fail_at:
            raise RuntimeError(f"injected at step {step}")


class FaultyRunner:
    """A runner with faults in front of it."""

    def __init__(self, inner: ModelRunner, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.page_size = inner.page_size
        self.num_pages = inner.num_pages
        self.vocab_size = inner.vocab_size
        self.max_model_len = inner.max_model_len
        self.prefill_batch_sizes = inner.prefill_batch_sizes
        self.decode_batch_sizes = inner.decode_batch_sizes
        self.device_seconds = 0.0

    def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
        self._faults.strike()
        output = self._inner.run(phase, rows)
        self.device_seconds = self._inner.device_seconds
        return output

    def close(self) -> None:
        self._inner.close()


def body(number: int, *, stream: bool = True, **fields: Any) -> bytes:
    """A greedy request of its own prompt."""
    asked = {"prompt": target.prompt(20 + 3 * number, first=number), "max_tokens": 30}
    return json.dumps({**asked, "temperature": 0, "stream": stream, **fields}).encode()


async def failing_steps(address: Address, injected: Faults, *, rounds: int, seed: int) -> int:
    """Eight requests at once, one step of which fails, so many times; returns how many failed.

    Raises:
        Violation: a request ended in no way or in two, one that was not hit is not as it was
            before, or the server is worse for it.
    """
    source = random.Random(seed)
    injected.arm()
    before = [await post(address, PATH, body(number)) for number in range(8)]
    failed = 0
    for turn in range(rounds):
        injected.arm(fail_at=[source.randint(0, 40)])
        replies = await asyncio.gather(
            *(post(address, PATH, body(n, stream=n % 2 == 0)) for n in range(8))
        )
        for number, (reply, good) in enumerate(zip(replies, before, strict=True)):
            what = f"round {turn}, request {number}"
            if reply.errors:
                check_failed(reply, what)
                failed += 1
                continue
            check_whole(reply, what)
            _check_same(reply, good, what)
        await check_idle(address)
        # What the failed step left in the pages must not come back through the prefix cache.
        injected.arm()
        for number, good in enumerate(before):
            again = await post(address, PATH, body(number))
            check_whole(again, f"request {number} after round {turn}")
            _check_same(again, good, f"request {number} after round {turn}")
    return failed


async def slow_step(address: Address, injected: Faults, *, seconds: float) -> float:
    """A step that takes long: the server answers meanwhile; returns its slowest /health.

    Raises:
        Violation: it did not, or a stream lost something.
    """
    injected.arm()
    good = await post(address, PATH, body(0))
    injected.arm(slow_at=[5], slow_seconds=seconds)
    running = asyncio.create_task(post(address, PATH, body(0)))
    slowest = 0.0
    while not running.done():
        began = time.perf_counter()
        await get(address, "/health")
        slowest = max(slowest, time.perf_counter() - began)
        await asyncio.sleep(0.02)
    if slowest > ANSWERING_WITHIN:
        raise Violation(f"/health took {slowest:.2f} s during a step of {seconds:.0f} s")
    reply = await running
    check_whole(reply, "the stream with a slow step")
    _check_same(reply, good, "the stream with a slow step")
    return slowest


async def stalled_reader(address: Address, *, choices: int, max_tokens: int, backlog: int) -> float:
    """A client that asks for much and reads nothing; returns the tokens that were made for it.

    It must be more than the kernel keeps for a connection (some MB), and `backlog` tokens a choice.

    Raises:
        Violation: others had to wait, or the server went on making tokens without bound.
    """
    before = await metrics(address)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (address.host, address.port))
        asked = body(0, n=choices, max_tokens=max_tokens, ignore_eos=True, logprobs=20)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n"
        await loop.sock_sendall(
            sock, head.encode() + b"Content-Type: application/json\r\n\r\n" + asked
        )
        while (await metrics(address))["shark_num_requests_running"] == 0:
            await asyncio.sleep(0.01)
        check_whole(await post(address, PATH, body(1)), "beside a stalled reader")
        after = await check_idle(address)
    made = after["shark_generation_tokens_total"] - before["shark_generation_tokens_total"]
    if made >= choices * max_tokens:
        raise Violation(f"all {made:.0f} tokens were made for a client that read none of them")
    if made < backlog:
        raise Violation(f"{made:.0f} tokens were made, and {backlog} may wait for a reader")
    return made


def _check_same(reply: Reply, good: Reply, what: str) -> None:
    if reply.text != good.text:
        raise Violation(f"{what} gave {reply.text!r}, without a fault it gives {good.text!r}")
