"""The command line of shark-serve: spellings, refusals, exit codes."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shark_llm.cli import serve
from shark_llm.cli.command_line import normalize_argv
from shark_llm.engine.settings import EngineSettings
from shark_llm.server.settings import ServerSettings


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The command sets up the process's logging; the test process wants its own back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize(
    ("argv", "normal"),
    [
        (["--device_ids", "0", "1"], ["--device-ids", "0", "--device-ids", "1"]),
        (["--device-ids=0,1"], ["--device-ids", "0", "--device-ids", "1"]),
        (["--device_ids=0 1"], ["--device-ids", "0", "--device-ids", "1"]),
        (["--device-ids", "0", "--port", "1"], ["--device-ids", "0", "--port", "1"]),
        (["--artifacts_dir", "a_b"], ["--artifacts-dir", "a_b"]),
        (["--artifacts_dir=a_b"], ["--artifacts-dir=a_b"]),
        (["--no_enable_prefix_caching"], ["--no-enable-prefix-caching"]),
        (["--api-key", "a_b", "c"], ["--api-key", "a_b", "--api-key", "c"]),
        (["--", "--device_ids", "0"], ["--", "--device_ids", "0"]),
        ([], []),
    ],
)  # fmt: skip
def test_both_spellings_and_lists(argv: list[str], normal: list[str]) -> None:
    assert normalize_argv(argv, serve.MULTI_VALUE_FLAGS) == normal


def run(*argv: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        serve.main(list(argv))
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "Missing option '--artifacts-dir'"),
        (["--no-such-flag"], 2, "No such option: --no-such-flag"),
        (["--artifacts-dir", "d", "--port", "x"], 2, "--port"),
        (["--artifacts-dir", "d", "--port", "70000"], 2, "port is 70000; it must be in 0..65535"),
        (["--artifacts-dir", "d", "--device-ids", "x"], 2, "--device-ids"),
        (["--artifacts-dir", "d", "--max-num-seqs", "0"], 2, "max_num_seqs is 0"),
        (["--artifacts-dir", "d", "--max-model-len", "0"], 2, "--max-model-len is 0"),
        (["--artifacts-dir", "d", "--kv-cache-tokens", "-5"], 2, "--kv-cache-tokens is -5"),
        (["--artifacts-dir", "d", "--scheduling-policy", "best"], 2, "it must be one of fcfs, lpm"),
        (["--artifacts-dir", "d", "--log-level", "loud"], 2, "it must be one of debug, info"),
        (["--artifacts-dir", "d", "--shutdown-timeout", "-1"], 2, "--shutdown-timeout is -1"),
        (["--artifacts-dir", "d", "--api-key", ""], 2, "an --api-key is empty"),
        (["--artifacts-dir", "./no/such/dir", "--port", "0"], 1, "no/such/dir"),
        (["--artifacts-dir", "d", "surplus"], 2, "surplus"),
    ],
)
def test_refusals_are_one_line(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(*argv)
    captured = capsys.readouterr()
    assert found == code, captured.err
    (line,) = captured.err.splitlines()
    assert line.startswith("shark-serve: error: ")
    assert message in line
    assert captured.out == ""


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for flag in ("--artifacts-dir", "--device-ids", "--no-enable-prefix-caching", "--api-key"):
        assert flag in text
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("shark-serve 0.")


def test_defaults_are_those_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = " ".join(capsys.readouterr().out.split())
    engine, server = EngineSettings(), ServerSettings(served_model_name="")
    for value in (engine.max_num_seqs, engine.max_num_batched_tokens, server.port, server.host):
        assert f"[default: {value}]" in text


def test_debug_shows_the_traceback() -> None:
    argv = ["--artifacts-dir", "./no/such/dir", "--port", "0"]
    command = [sys.executable, "-m", "shark_llm.cli.serve", *argv]
    quiet = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loud = subprocess.run([*command, "--debug"], capture_output=True, text=True, timeout=60)
    assert (quiet.returncode, loud.returncode) == (1, 1)
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr


def test_the_key_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An empty variable is no key; a bad one is refused without being shown."""
    monkeypatch.setenv("SHARK_API_KEY", "k\u00e9y")
    assert run("--artifacts-dir", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "--api-key" in error
    assert "k\u00e9y" not in error
