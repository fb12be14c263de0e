"""How long a connection may keep the server waiting for its bytes.

uvicorn closes a connection that is idle after an answer, and waits for ever for one that sends
nothing, half a head, or half a body: each of them takes a file descriptor, until no client gets in.
Here, the same patience holds for all: for a head as a whole, and for each part of a body.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientConnection(H11Protocol):
    """uvicorn's connection, which ends after `timeout_keep_alive` seconds without a request."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Wait for what is due: a whole head, from its first moment on, or a body's next part."""
        waits_for_head = self.conn.their_state is h11.IDLE
        if waits_for_head and self._patience is not None:
            return
        self._stop_watching()
        if waits_for_head or self.conn.their_state is h11.SEND_BODY:
            self._patience = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.flow.read_paused:
            self._watch()  # it is we who do not read
        else:
            self.transport.close()
