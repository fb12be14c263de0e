"""What a build shows: plain lines for logs and pipes, one live line on a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from shark_llm.cli import reporter as reporter_module
from shark_llm.cli.reporter import LiveReporter, PlainReporter, byte_progress, make_reporter
from shark_llm.errors import HubError
from shark_llm.stages import StageRecord

RECORD = StageRecord(
    name="shard",
    seconds=1.26,
    peak_memory_bytes=410_000_000,
    compiler_peak_bytes=0,
    note="reused",
)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    environment = {"TERM": "xterm"}  # whatever the tests run under
    shown = Console(
        file=text, force_terminal=terminal, width=120, color_system=None, _environ=environment
    )
    return shown, text


def test_plain_lines_on_a_dumb_terminal() -> None:
    """It cannot erase a line, so a live one would stay and repeat."""
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_reporter(dumb), PlainReporter)


def test_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No control characters, no markup, no wrapping; far progress only now and then."""
    shown, text = console(terminal=False)
    reporter = make_reporter(shown)
    assert isinstance(reporter, PlainReporter)
    clock = iter([0.0, 5.0, 11.0, 12.0])
    monkeypatch.setattr(reporter_module.time, "monotonic", lambda: next(clock))
    reporter.start("shard", "[bold]480 MB[/bold] " + "x" * 200)
    for done in (100, 220, 240):
        reporter.progress(done * 1_000_000, 480_000_000)
    reporter.finish(RECORD)
    reporter.note("a [note]")
    reporter.close()
    assert text.getvalue().splitlines() == [
        "shard    [bold]480 MB[/bold] " + "x" * 200,
        "shard    220 of 480 MB (45 %), 20 MB/s, 13 s left",
        "shard    1.3 s, 410 MB peak (reused)",
        "note     a [note]",
    ]


def test_a_live_line_on_a_terminal() -> None:
    shown, text = console(terminal=True)
    reporter = make_reporter(shown)
    assert isinstance(reporter, LiveReporter)
    reporter.start("shard", "480 MB")
    reporter.progress(120_000_000, 480_000_000)
    assert len(reporter._progress.tasks) == 1
    reporter.finish(RECORD)
    reporter.start("export", "decode_bs1")
    assert len(reporter._progress.tasks) == 1
    reporter.note("careful")
    reporter.close()
    out = text.getvalue()
    assert "✓ shard    1.3 s, 410 MB peak (reused)" in out
    assert "note: careful" in out


def test_a_live_line_goes_away_when_a_stage_fails() -> None:
    shown, text = console(terminal=True)
    reporter = make_reporter(shown)
    reporter.start("compile", "host")
    reporter.close()
    assert text.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # cursor shown, line erased


def test_byte_progress() -> None:
    assert byte_progress(0, 480_000_000, 1.0) == "0 of 480 MB (0 %)"
    assert byte_progress(120_000_000, 480_000_000, 3.0) == (
        "120 of 480 MB (25 %), 40 MB/s, 9 s left"
    )
    assert byte_progress(0, 0, 0.0) == "0 of 0 MB (0 %)"


def test_json_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs: every event on a line of its own, bytes at most ten times a second."""
    shown, text = console(terminal=True)
    reporter = make_reporter(shown, as_json=True)
    clock = iter([0.0, 1.0, 1.05, 1.2, 2.0])
    monkeypatch.setattr(reporter_module.time, "monotonic", lambda: next(clock))
    reporter.start("shard", "480 MB")
    for done in (100, 110, 240, 480):
        reporter.progress(done * 1_000_000, 480_000_000)
    reporter.finish(RECORD)
    reporter.note("a\nnote")
    reporter.fail(HubError("no network"))
    reporter.say(["bundle   b"])
    reporter.close()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event.pop("event") for event in events] == [
        "start", "progress", "progress", "progress", "finish", "note", "error", "done",
    ]  # fmt: skip
    assert events[0] == {"stage": "shard", "what": "480 MB"}
    assert [event["done"] for event in events[1:4]] == [100_000_000, 240_000_000, 480_000_000]
    assert events[1]["text"] == "100 of 480 MB (20 %), 100 MB/s, 4 s left"
    assert events[4:] == [
        {"stage": "shard", "seconds": 1.26, "note": "reused"},
        {"text": "a\nnote"},
        {"class": "HubError", "message": "no network"},
        {"lines": ["bundle   b"]},
    ]
    assert text.getvalue() == ""
