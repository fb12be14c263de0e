"""How the engine thread tells the event loop that there is something to read: once for many.

Each call into an event loop from outside is a system call, during which this thread gives the
interpreter away and may have to queue for it again. A step of the engine brings an event to each of
its requests, so a call for each of them would be most of what the host does between two steps.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Doorbell:
    """Wakes the readers of one event loop. `ring` is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[asyncio.Event] = deque()
        self._rung = False

    def ring(self, reader: asyncio.Event) -> None:
        """Set `reader` on its loop soon, with all others that were rung for until then.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._waiting.append(reader)
        if not self._rung:
            # Set before the call: an answer that runs in between sees our reader anyway.
            self._rung = True
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False
        while self._waiting:
            self._waiting.popleft().set()


class Doorbells:
    """The doorbell of the running loop; a server has one loop in all its life."""

    def __init__(self) -> None:
        self._last: Doorbell | None = None

    def here(self) -> Doorbell:
        """The one of the loop that runs the caller."""
        loop = asyncio.get_running_loop()
        if self._last is None or self._last.loop is not loop:
            self._last = Doorbell(loop)
        return self._last
