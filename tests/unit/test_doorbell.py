"""One call into the event loop for all readers that got something meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shark_llm.server.doorbell import Doorbell, Doorbells


def test_many_rings_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's events for eight requests cost one wake-up of the loop, and reach all eight."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        calls: list[Callable[..., Any]] = []
        real = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda call, *a: (calls.append(call), real(call, *a))
        )
        doorbell = Doorbell(loop)
        readers = [asyncio.Event() for _ in range(8)]
        for reader in readers:  # on the loop's own thread: it cannot answer in between
            doorbell.ring(reader)
        assert len(calls) == 1
        async with asyncio.timeout(5):
            for reader in readers:
                await reader.wait()
        doorbell.ring(readers[0])
        assert len(calls) == 2

    asyncio.run(scenario())


def test_no_ring_is_lost_between_threads() -> None:
    """A ring while the loop answers the one before is answered too."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        doorbell = Doorbell(loop)
        reader = asyncio.Event()
        sent, seen = 3000, 0
        unread = threading.Semaphore(0)
        heard = threading.Semaphore(1)

        def engine() -> None:
            for _ in range(sent):
                assert heard.acquire(timeout=5), "a ring was not answered"
                unread.release()
                doorbell.ring(reader)

        thread = threading.Thread(target=engine)
        thread.start()
        async with asyncio.timeout(20):
            while seen < sent:
                await reader.wait()
                reader.clear()
                while unread.acquire(blocking=False):
                    seen += 1
                    heard.release()
        thread.join()

    asyncio.run(scenario())


def test_a_closed_loop_is_an_error() -> None:
    async def here() -> Doorbell:
        return Doorbells().here()

    doorbell = asyncio.run(here())
    with pytest.raises(RuntimeError):
        doorbell.ring(asyncio.Event())


def test_each_loop_has_its_own() -> None:
    doorbells = Doorbells()

    async def here() -> tuple[Doorbell, Doorbell]:
        return doorbells.here(), doorbells.here()

    first, again = asyncio.run(here())
    other, _ = asyncio.run(here())
    assert first is again
    assert other is not first
