"""A build in a process of its own: what is read of it, what it raises, and that it ends with us."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shark_llm.cli import build_process
from shark_llm.cli.build_process import run_build
from shark_llm.errors import CompileError, HubError, SharkError, UsageError

# A shark-compile that does what its first argument says in Python, with a JsonReporter at hand.
FAKE = """
import os, sys, time
from shark_llm.cli.reporter import JsonReporter, end_when_closed
from shark_llm.errors import HubError
from shark_llm.stages import StageRecord
end_when_closed(sys.stdin.fileno())
assert sys.argv[-3:] == ["--progress", "json", "--end-with-stdin"]
reporter = JsonReporter()
exec(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_process, "COMMAND", (sys.executable, "-c", FAKE))


class Reports(list[tuple[str, float | None]]):
    def __call__(self, detail: str, percent: float | None = None) -> None:
        self.append((detail, percent))


def test_stages_and_bytes_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """/health gets stage and percent, and no paths; the log gets all of it."""
    caplog.set_level(logging.INFO)
    reports = Reports()
    run_build(
        [
            "reporter.start('fetch', 'org/name'); reporter.progress(100 * 10**6, 400 * 10**6)\n"
            "reporter.finish(StageRecord(name='fetch', seconds=1.5, peak_memory_bytes=0,"
            " compiler_peak_bytes=0, note='x'))\n"
            "reporter.start('publish', '/srv/bundle'); reporter.note('mind this')\n"
            "print('a library speaks'); reporter.say(['done'])"
        ],
        reports,
        {},
    )
    assert reports[0] == ("building the bundle: starting", None)
    assert reports[1] == ("building the bundle: fetch", None)
    assert reports[2][0].startswith("building the bundle: fetch, 100 of 400 MB (25 %)")
    assert reports[2][1] == 25.0
    assert reports[3] == ("building the bundle: publish", None)
    for line in ("build: fetch    org/name", "build: fetch    1.5 s (x)", "build: mind this"):
        assert line in caplog.messages
    assert "build: a library speaks" in caplog.messages


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("reporter.fail(HubError('no network')); sys.exit(1)", HubError, "no network"),
        (
            "sys.exit('shark-compile: error: building needs torch')",
            CompileError,
            "building needs torch",
        ),
        (
            "sys.stderr.write('shark-compile: error: no such flag'); sys.exit(2)",
            UsageError,
            "no such flag",
        ),
        (
            "os.kill(os.getpid(), 9)",
            CompileError,
            "shark-compile ended with exit code -9 (it said nothing): see its output above",
        ),
    ],
)
def test_its_error_is_ours(script: str, error: type[SharkError], message: str) -> None:
    with pytest.raises(SharkError) as caught:
        run_build([script], Reports(), {})
    assert type(caught.value) is error
    assert str(caught.value) == message


def test_what_it_says_besides_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    run_build(["print('a warning', file=sys.stderr)"], Reports(), {})
    assert capsys.readouterr().err == "a warning\n"


def test_the_token_goes_by_the_environment() -> None:
    run_build(["assert os.environ['HF_TOKEN'] == 'hf_x'"], Reports(), {"HF_TOKEN": "hf_x"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_when_its_server_does(tmp_path: Path, number: signal.Signals) -> None:
    """A server that was stopped while it builds leaves nothing that goes on for nobody."""
    pid_file = tmp_path / "pid"
    server = (
        "import sys\n"
        "from shark_llm.cli import build_process\n"
        f"build_process.COMMAND = (sys.executable, '-c', {FAKE!r})\n"
        f"script = \"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(100)\"\n"
        "build_process.run_build([script], lambda detail, percent=None: None, {})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", server])
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(30)
    pid = int(pid_file.read_text())
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the build goes on")
