"""Stages are timed, each with the memory of its own, and told to the reporter in order."""

from __future__ import annotations

import pytest

from build_harness import ListReporter
from shark_llm.stages import StageClock


def test_each_stage_has_its_own_time_and_memory() -> None:
    """The peak is reset between stages: a small one after a big one shows the small one's."""
    reporter = ListReporter()
    clock = StageClock(reporter)
    with clock.stage("big", "..."):
        block = bytearray(200 << 20)
        block[::4096] = b"x" * len(block[::4096])
        del block
    with clock.stage("small", "...") as stage:
        stage.note = "a note"
    big, small = clock.records
    assert reporter.records == [big, small]
    assert big.peak_memory_bytes - small.peak_memory_bytes > 150 << 20
    assert small.note == "a note"
    assert small.seconds < 5


def test_memory_of_a_child_counts() -> None:
    clock = StageClock(ListReporter())
    with clock.stage("compile", "...") as stage:
        stage.compiler_peak_bytes = 1 << 45
        stage.note = "ran"
    with clock.stage("publish", "..."):
        pass
    compiled, published = clock.records
    assert compiled.peak_memory_bytes == compiled.compiler_peak_bytes == 1 << 45
    assert published.compiler_peak_bytes == 0


def test_a_failed_stage_is_not_finished() -> None:
    reporter = ListReporter()
    clock = StageClock(reporter)
    with pytest.raises(ZeroDivisionError), clock.stage("compile", "..."):
        raise ZeroDivisionError
    assert (reporter.started, reporter.records, clock.records) == (["compile"], [], [])
