"""Bodies that must be refused, beside a stream that must not notice."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.checks import Violation, check_idle, check_whole
from load_tests.client import Address, Reply, post, together

GOOD: Mapping[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FORM = {"message", "type", "param", "code"}
"""What every error has."""

# By path: fields of a valid body, and values that make it one to refuse.
VALID: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"prompt": "once", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
WRONG_ANYWHERE: Mapping[str, Sequence[Any]] = {
    "max_tokens": (-1, 10**9, 10**30, 1.5, "4", [], {}),
    "temperature": (-0.1, 2.1, "hot", [], {}),
    "top_p": (-0.1, 1.1, "x", []),
    "top_k": (-2, 1.5, "x", []),
    "min_p": (-1, 2, "x"),
    "n": (0, -1, 129, "2", 1.5, []),
    "seed": ("x", 1.5, [], 2**70),
    "stop": (["", "a"], "", [1], 7, {}),
    "stop_token_ids": ([10**9], [-1], "x", [1.5]),
    "logit_bias": ({"999999": 1}, {"-1": 1}, {"abc": 1}, {"5": "x"}, {"5": 101}, []),
    "presence_penalty": (-2.1, 2.1, "x"),
    "frequency_penalty": (-2.1, 2.1, "x"),
    "repetition_penalty": (0, -1, "x"),
    "stream": ("yes", 2, [], {}),
    "model": (7, [], "another/model", "\ud800"),
}
WRONG: Mapping[str, Mapping[str, Sequence[Any]]] = {
    COMPLETIONS: {
        **WRONG_ANYWHERE,
        "prompt": ([], [""] * 2000, [-1], [10**9], [2**40], [1.5], [[1, 2], [3], 4], 7, {}, None),
    },
    CHAT: {
        **WRONG_ANYWHERE,
        "messages": ([], "hi", [7], [{}], [{"role": 7, "content": "x"}], None),
    },
}


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A body, the endpoint it goes to, and what is wrong with it."""

    path: str
    body: bytes
    what: str


def bodies(count: int, *, seed: int) -> Iterator[Malformed]:
    """So many of all kinds; the same ones for the same seed."""
    source = random.Random(seed)
    kinds: Sequence[Callable[[str, random.Random], tuple[str, bytes]]] = (
        _wrong_value,
        _wrong_value,
        _wrong_value,
        _missing,
        _cut,
        _noise,
        _other_json,
        _nested,
        _not_a_number,
        _bad_text,
    )
    for _ in range(count):
        path = source.choice((COMPLETIONS, CHAT))
        what, body = source.choice(kinds)(path, source)
        yield Malformed(path=path, body=body, what=what)


def _wrong_value(path: str, source: random.Random) -> tuple[str, bytes]:
    name = source.choice(list(WRONG[path]))
    value = source.choice(WRONG[path][name])
    stream = {"stream": True} if source.random() < 0.3 else {}
    body = {**stream, **VALID[path], name: value}
    return f"{name} = {value!r:.40}", json.dumps(body).encode()


def _missing(path: str, source: random.Random) -> tuple[str, bytes]:
    return "nothing asked", json.dumps({"max_tokens": source.randint(1, 9)}).encode()


def _cut(path: str, source: random.Random) -> tuple[str, bytes]:
    whole = json.dumps(VALID[path]).encode()
    return "cut", whole[: source.randrange(len(whole))]


def _noise(path: str, source: random.Random) -> tuple[str, bytes]:
    return "noise", b"\xff" + source.randbytes(source.randint(0, 300))


def _other_json(path: str, source: random.Random) -> tuple[str, bytes]:
    return "no object", json.dumps(source.choice([None, True, 7, "x", [], [{}], 1e300])).encode()


def _nested(path: str, source: random.Random) -> tuple[str, bytes]:
    depth = source.choice((100, 5000, 100_000))
    opening = source.choice((b"[", b'{"a":'))
    return f"{depth} levels", b'{"prompt": "x", "messages": ' + opening * depth


def _not_a_number(path: str, source: random.Random) -> tuple[str, bytes]:
    word = source.choice((b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"))
    return word.decode(), json.dumps(VALID[path]).encode()[:-1] + b', "temperature": ' + word + b"}"


def _bad_text(path: str, source: random.Random) -> tuple[str, bytes]:
    text = source.choice((b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80"))
    field = (
        b'{"prompt": "' if path == COMPLETIONS else b'{"messages": [{"role": "user", "content": "'
    )
    return "bytes that are no UTF-8", field + text + (b'"}' if path == COMPLETIONS else b'"}]}')


async def run(
    address: Address, given: Iterator[Malformed], *, prompt: Sequence[int], concurrency: int
) -> tuple[Counter[int], int]:
    """Send all, while one stream after another runs beside them.

    Returns how often each status came, and how many streams ran meanwhile.

    Raises:
        Violation: a body was not refused in the usual form, or a stream was disturbed.
    """
    stop = asyncio.Event()
    statuses: Counter[int] = Counter()

    async def send() -> None:
        for bad in given:  # shared: each body goes to one sender
            reply = await post(address, bad.path, bad.body)
            check_refused(reply, bad)
            statuses[reply.status] += 1

    async def send_all() -> None:
        try:
            await together(send() for _ in range(concurrency))
        finally:
            stop.set()

    body = json.dumps({**GOOD, "prompt": prompt, "stream": True}).encode()
    alone = await post(address, COMPLETIONS, body)
    check_whole(alone, "the good stream, before")
    streams = 0
    sending = asyncio.create_task(send_all())
    while not stop.is_set():
        reply = await post(address, COMPLETIONS, body)
        check_whole(reply, "the good stream, beside the bad bodies")
        if reply.text != alone.text:
            raise Violation(f"the good stream gave {reply.text!r}, before it gave {alone.text!r}")
        streams += 1
    await sending
    await check_idle(address)
    return statuses, streams


def check_refused(reply: Reply, bad: Malformed) -> None:
    """A 4xx with the error's usual form.

    Raises:
        Violation: it is not.
    """
    error = (reply.body or {}).get("error")
    if not (400 <= reply.status < 500 and isinstance(error, dict) and error.keys() >= FORM):
        raise Violation(
            f"{bad.path}, {bad.what}: HTTP {reply.status}, {reply.body}; sent {bad.body[:200]!r}"
        )
