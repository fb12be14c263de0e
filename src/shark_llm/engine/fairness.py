"""Whose turn it is: round-robin over the owners of waiting requests.

An owner is whoever the server says asks, one API key for instance. Among the owners that wait, the
one that was served least recently is next. An owner that comes back after a pause keeps its place
in that order, so that sending one request after the other gains nothing over sending all at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from shark_llm.engine.state import RequestState


class Turns:
    """When each owner was served last. It remembers every owner: there are as many as keys."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._num_served = 0

    def served(self, owner: str) -> None:
        """A request of `owner` was admitted: all others that wait go before its next one."""
        self._num_served += 1
        self._last[owner] = self._num_served

    def in_turn(self, queues: Mapping[str, deque[RequestState]]) -> Iterator[RequestState]:
        """Empty the queues, one owner after the other.

        The order follows what `served` is told meanwhile. An owner whose request was not admitted
        keeps its turn: its next request comes next.
        """
        left = {owner: queue for owner, queue in queues.items() if queue}
        while left:
            owner = min(left, key=lambda each: self._last.get(each, 0))
            yield left[owner].popleft()
            if not left[owner]:
                del left[owner]
