"""Many requests of mixed lengths at once, some of which leave: is every answer whole and the same?

An answer is checked against the same request alone: one at a time, on a server without a prefix
cache.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.checks import Violation, check_idle, check_whole
from load_tests.client import Address, Reply, post, together

PATH = "/v1/completions"
PREFIXES = 8
LONGEST_PROMPT = 320
LONGEST_OUTPUT = 64
LEAVING = 0.1
SAMPLED = 0.2
SHARING = 0.4


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, and when its client leaves: after so many events, or so many seconds."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stream: bool
    leave_after: int | None = None
    leave_seconds: float | None = None

    @property
    def leaves(self) -> bool:
        return self.leave_after is not None or self.leave_seconds is not None

    def body(self, *, stream: bool, **more: Any) -> bytes:
        fields: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields | more).encode()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of many requests showed, all of it in order."""

    asks: Sequence[Ask]
    replies: Sequence[Reply]
    metrics: dict[str, float]
    """Of the idle server afterwards."""

    @property
    def summary(self) -> str:
        left = sum(reply.left for reply in self.replies)
        ends = Counter(reason for reply in self.replies for reason in reply.finish_reasons)
        shown = ", ".join(f"{count} {reason}" for reason, count in sorted(ends.items()))
        cached = self.metrics["shark_prefix_cache_hits_total"]
        asked = self.metrics["shark_prefix_cache_queries_total"] or 1
        return (
            f"{len(self.replies)} requests: {shown}, {left} left; "
            f"{self.metrics['shark_num_preemptions_total']:.0f} preemptions, "
            f"{100 * cached / asked:.0f} % of prompt tokens cached"
        )


def asks(count: int, *, seed: int, tokens: Sequence[int]) -> list[Ask]:
    """So many requests over the vocabulary `tokens`; the same ones for the same seed."""
    source = random.Random(seed)
    prefixes = [
        tuple(source.choices(tokens, k=source.randint(20, LONGEST_PROMPT // 2)))
        for _ in range(PREFIXES)
    ]
    return list(_asks(count, source, prefixes, tokens))


def _asks(
    count: int, source: random.Random, prefixes: Sequence[tuple[int, ...]], tokens: Sequence[int]
) -> Iterator[Ask]:
    for number in range(count):
        prompt = source.choice(prefixes) if source.random() < SHARING else ()
        most = LONGEST_PROMPT - len(prompt)
        prompt += tuple(source.choices(tokens, k=int(most ** source.random())))
        max_tokens = source.randint(1, LONGEST_OUTPUT)
        stream = source.random() < 0.6
        leaves = source.random() < LEAVING
        yield Ask(
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=1.0 if source.random() < SAMPLED else 0.0,
            seed=number,
            stream=stream,
            leave_after=source.randint(0, max_tokens // 2) if leaves and stream else None,
            leave_seconds=source.uniform(0.0, 0.2) if leaves and not stream else None,
        )


async def run(address: Address, given: Sequence[Ask], *, concurrency: int) -> Outcome:
    """Send all, so many at a time, and check each answer by itself, then the idle server.

    Raises:
        Violation: an answer was lost, cut or ended twice, or the server kept something back.
    """
    replies: list[Reply | None] = [None] * len(given)
    waiting = list(enumerate(given))[::-1]

    async def stream() -> None:
        while waiting:
            number, ask = waiting.pop()
            replies[number] = await post(
                address,
                PATH,
                ask.body(stream=ask.stream),
                leave_after=ask.leave_after,
                leave_seconds=ask.leave_seconds,
            )

    await together(stream() for _ in range(concurrency))
    answered = [reply for reply in replies if reply is not None]
    assert len(answered) == len(given), "a task would have raised"
    for number, reply in enumerate(answered):
        if not reply.left:
            check_whole(reply, f"request {number}")
    return Outcome(asks=given, replies=answered, metrics=await check_idle(address))


def check_counts(outcome: Outcome) -> None:
    """The server counts exactly one end for every request that it took.

    Raises:
        Violation: it counts fewer or more.
    """
    ended = outcome.metrics["shark_request_success_total"]
    awaited = sum(not reply.left for reply in outcome.replies)
    # A client that leaves at once may be gone before its request is read.
    if not awaited <= ended <= len(outcome.replies):
        raise Violation(f"{awaited} requests were answered to the end, the server counts {ended}")


async def check_alone(address: Address, outcome: Outcome) -> int:
    """Every answer is that of the same request alone; returns how many were compared.

    What a client that left had seen must be the beginning.

    Raises:
        Violation: one is not.
    """
    compared = 0
    for number, (ask, reply) in enumerate(zip(outcome.asks, outcome.replies, strict=True)):
        if not reply.text and reply.left:
            continue
        alone = await post(address, PATH, ask.body(stream=False))
        check_whole(alone, f"request {number}, alone")
        compared += 1
        if reply.left:
            same = alone.text.startswith(reply.text)
        else:
            same = (alone.text, alone.finish_reasons, alone.completion_tokens) == (
                reply.text,
                reply.finish_reasons,
                reply.completion_tokens,
            )
        if not same:
            raise Violation(
                f"request {number} ({len(ask.prompt)} tokens, seed {ask.seed}, temperature "
                f"{ask.temperature}) gave {reply.text!r}, alone it gives {alone.text!r}"
            )
    return compared
