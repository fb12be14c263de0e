"""The command line of shark-serve: spellings, refusals, exit codes."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, EngineSettings, dict[str, Any]]]:
    """What the command would serve, were it to go on after its own checks."""
    calls: list[tuple[Path, EngineSettings, dict[str, Any]]] = []

    def note(directory: Path, engine: EngineSettings, **rest: Any) -> int:
        calls.append((directory, engine, rest))
        return 0

    monkeypatch.setattr(serve, "_run", note)
    return calls


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
        (
            [],
            2,
            "nothing to serve: name a bundle with --artifacts-dir, or a model with --model-path",
        ),
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
        (["--artifacts-dir", "d", "--api-key-file", "no/file"], 2, "cannot read no/file: No such"),
        (["--artifacts-dir", "d", "--config", "no/file"], 2, "cannot read no/file: No such"),
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
        assert f"default: {value}]" in text


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


def test_flags_come_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[Any]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'artifacts-dir = "from file"\nport = 1\nmax_num_seqs = 3\nmax-model-len = 99\n'
        "device-ids = [4, 5]\nenable-prefix-caching = false\nrequest-timeout = 2\n"
        'api-key = "one"\ncpu-threads = 7\n'
    )
    monkeypatch.setenv("SHARK_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("SHARK_MAX_MODEL_LEN", "100")
    monkeypatch.setenv("SHARK_CORS_ALLOW_ORIGIN", "a b")
    monkeypatch.setenv("SHARK_HOST", "")  # empty is not set
    assert run("--config", str(file), "--max-model-len", "101") == 0
    ((directory, engine, rest),) = asked
    assert directory == Path("from file")
    assert (rest["port"], rest["host"], rest["device_ids"]) == (1, "127.0.0.1", (4, 5))
    assert (rest["request_timeout"], rest["api_keys"], rest["cpu_threads"]) == (2.0, ("one",), 7)
    assert rest["cors_allow_origins"] == ("a", "b")
    assert (engine.max_num_seqs, engine.max_model_len) == (4, 101)
    assert not engine.enable_prefix_caching


def test_the_file_may_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[Any]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('artifacts-dir = "d"')
    monkeypatch.setenv("SHARK_CONFIG", str(file))
    assert run() == 0
    assert asked[0][0] == Path("d")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = true", "port is True; it must be an integer"),
        ("port = 1.5", "port is 1.5; it must be an integer"),
        ('port = "8000"', "port is '8000'; it must be an integer"),
        ("enable-prefix-caching = 1", "it must be true or false"),
        ("device-ids = [0, true]", "it must be an integer, or a list of those"),
        ("host = [1]", "it must be a string"),
        ("prot = 1", "has the key 'prot'; the keys are allow-dummy-weights, api-key, "),
        ("debug = true", "has the key 'debug'"),
        ("port = ", "is not TOML"),
        ("[serve]\nport = 1", "has the key 'serve'"),
        ("max-num-seqs = 0", "max_num_seqs is 0; it must be at least 1"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert run("--artifacts-dir", "d", "--config", str(file)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert asked == []


def test_every_setting_has_its_variable_and_no_other() -> None:
    params = typer.main.get_command(serve.app).params
    for param in params:
        if param.name not in ("debug", "version", "help"):
            assert param.envvar == f"SHARK_{str(param.name).upper()}"


def test_keys_from_a_file_join_the_others(tmp_path: Path, asked: list[Any]) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \r\n")
    assert run("--artifacts-dir", "d", "--api-key", "zero", "--api-key-file", str(file)) == 0
    assert asked[0][2]["api_keys"] == ("zero", "one", "two")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"k\xff", "se\u00e4cret".encode(), b"se cret"])
def test_a_wrong_key_file_is_refused_and_not_shown(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert run("--artifacts-dir", "d", "--api-key-file", str(file)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--api-key" in line
    assert "cret" not in line
    assert asked == []
