"""Signals that end a command, held back while native code runs."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from shark_llm.interrupts import signals_held_back


@pytest.fixture(autouse=True)
def ending_handler() -> Iterator[object]:
    """As `shark-compile` handles SIGTERM; the test's own handler comes back afterwards."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    yield end
    signal.signal(signal.SIGTERM, before)


def test_a_signal_is_handled_at_the_end_of_the_block(ending_handler: object) -> None:
    reached: list[bool] = []

    def work() -> None:
        with signals_held_back():
            signal.raise_signal(signal.SIGTERM)
            reached.append(True)

    with pytest.raises(SystemExit) as ended:
        work()
    assert reached == [True]
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is ending_handler


def test_ctrl_c_is_held_back_too() -> None:
    with pytest.raises(KeyboardInterrupt), signals_held_back():
        signal.raise_signal(signal.SIGINT)


def test_without_a_signal_nothing_happens(ending_handler: object) -> None:
    with signals_held_back():
        pass
    assert signal.getsignal(signal.SIGTERM) is ending_handler


def test_an_error_in_the_block_is_not_lost_with_the_handlers_put_back(
    ending_handler: object,
) -> None:
    with pytest.raises(ValueError, match="of the block"), signals_held_back():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGTERM) is ending_handler


def test_other_threads_may_use_it() -> None:
    done: list[bool] = []

    def work() -> None:
        with signals_held_back():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
