"""Signals that end a command, kept out of native code.

Python runs a signal's handler between any two of its instructions, also of a function that C++ has
called. What the handler raises there ends the process where that C++ cannot pass it on, as MLIR's
bindings cannot, and nothing is cleaned up.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM that come in this block are handled at its end.

    For blocks of a second or so. In other threads than the main one nothing is held back: Python
    runs no handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: set[int] = set()
    handlers = {each: signal.signal(each, lambda number, _: came.add(number)) for each in _ENDING}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            # None stands for a handler that was not set from Python, and cannot be set again.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)
