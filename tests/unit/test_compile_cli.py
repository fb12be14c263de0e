"""The command line of shark-compile: spellings, refusals, subcommands, what it imports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_harness import FakeCompileSide
from bundles import publish_sample
from shark_llm.cli import compile as compile_cli
from shark_llm.cli import packages
from shark_llm.cli import serve as serve_cli
from shark_llm.errors import CompileError


@pytest.fixture(autouse=True)
def _own_sigterm() -> Iterator[None]:
    """The command handles SIGTERM; the test process wants its own back."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run(*argv: object) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        compile_cli.main([str(argument) for argument in argv])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "--hf-model is missing"),
        (["--hf-model", "m"], 2, "--output-artifacts-dir is missing"),
        (["--hf-model", "./nope", "--output-artifacts-dir", "b"], 2, "./nope: no such file"),
        (["--hf-model", "m", "--dtype", "f8", "--dry-run"], 2, "one of auto, bf16, f16, f32"),
        (
            ["--hf-model", "m", "--weights-dtype", "int3", "--dry-run"],
            2,
            "--weights-dtype is 'int3'; it must be one of int8",
        ),
        (["--hf-model", "m", "--tp", "9", "--dry-run"], 2, "--tp is 9; it must be in 1 to 8"),
        (["--hf-model", "m", "--tp", "0", "--dry-run"], 2, "--tp is 0"),
        (["--hf-model", "m", "--sharding-mode", "tp9", "--dry-run"], 2, "one of tp1 to tp8"),
        (
            ["--hf-model", "m", "--sharding-mode", "tp2", "--tp", "4", "--dry-run"],
            2,
            "--sharding-mode tp2 and --tp 4 contradict each other",
        ),
        (["--hf-model", "./m", "--compile-target", "gfx1", "--dry-run"], 2, "no compile target"),
        (["--hf-model", "./m", "--batch-sizes-decode", "4", "1", "--dry-run"], 2, "decode 4 1"),
        (["--hf-model", "./m", "--batch-sizes-decode", "0", "--dry-run"], 2, "decode 0"),
        (["--hf-model", "./m", "--batch-sizes-decode", "--dry-run"], 2, "has no value"),
        (["--hf-model", "./m", "--page-size", "17", "--dry-run"], 2, "page size 17"),
        (["--hf-model", "./m", "--page-size", "0", "--dry-run"], 2, "page size 0"),
        (["--hf-model", "./m", "--revision", "a b", "--dry-run"], 2, "revision 'a b'"),
        (["--hf-model", "m", "--cache-policy", "no", "--dry-run"], 2, "one of on, off, redo, read"),
        (["--hf-model", "m", "--progress", "no", "--dry-run"], 2, "it must be one of auto, json"),
        (["--hf-model", "m", "cache", "list"], 2, "--hf-model before 'cache' has no effect"),
        (["--no-such-flag"], 2, "No such option: --no-such-flag"),
        (["--hf-model", "m", "verify", "d"], 2, "--hf-model before 'verify' has no effect"),
        (["no-such-command"], 2, "no-such-command"),
        (["serve"], 2, "nothing to serve"),
        (["serve", "--artifacts-dir", "./no/such", "--port", "0"], 1, "no/such"),
        (["serve", "--artifacts-dir", "d", "--device_ids", "x"], 2, "--device-ids"),
        (["cache"], 2, "Missing command"),
        (["inspect", "./no/such"], 1, "no bundle at"),
        (["repro", "./no/such"], 1, "no bundle at"),
    ],
)
def test_refusals_are_one_line(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(*argv)
    captured = capsys.readouterr()
    assert found == code, captured.err
    (line,) = captured.err.splitlines()
    assert line.startswith("shark-compile: error: ")
    assert message in line


def test_build_again_and_dry_run(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--hf_model", t0, "--output_artifacts_dir", tmp_path / "b", "--compile-target"]
    argv += ["x86-64-v3", "--batch_sizes_prefill", "1", "--batch-sizes-decode", "1", "2"]
    assert run(*argv, "--dry-run") == 0
    text = capsys.readouterr().out
    for line in (
        "entries  prefill_bs{1} decode_bs{1,2}",
        "fetch    nothing: all weights are here",
        "write    model.irpa: 434176 bytes",
        "check    golden check against the model",
    ):
        assert line in text.splitlines()
    assert "MB free: fits" in text
    assert not (tmp_path / "b").exists()
    assert run(*argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "stage          time    peak memory" in lines
    assert f"serve    shark-serve --artifacts-dir {tmp_path / 'b'}" in lines
    assert run(*argv) == 0
    again = capsys.readouterr().out
    assert "is what was asked for already: nothing to do" in again
    assert "reused, " in again
    assert (compile_side.exports, compile_side.compiles) == (1, 1)
    assert run(*argv, "--dry-run") == 0
    assert f"nothing to do: {tmp_path / 'b'}" in capsys.readouterr().out
    assert run(*argv, "--dry-run", "--page-size", "32") == 0
    assert "reuse    model.irpa: 434176 bytes" in capsys.readouterr().out


def test_stages_can_be_forced(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache is where the environment says; each flag forces its stage."""
    argv = ["--hf-model", t0, "--compile-target", "x86-64-v3", "--output-artifacts-dir"]
    work = []
    for flags in ([], [], ["--ensure-export"], ["--ensure-compile"], ["--cache-policy", "off"]):
        assert run(*argv, tmp_path / f"b{len(work)}", *flags) == 0
        work.append((compile_side.exports, compile_side.compiles))
    assert work == [(1, 1), (1, 1), (2, 1), (3, 2), (4, 3)]
    capsys.readouterr()
    assert run("cache", "list") == 0
    assert "2 entries" in capsys.readouterr().out


def test_progress_as_json_tells_errors_too(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--hf-model", t0, "--output-artifacts-dir", tmp_path / "b", "--progress", "json"]
    assert run(*argv) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("start", "done")
    assert run(*argv, "--tp", "5") == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["class"]) == ("error", "ShardingError")


def test_sharding_mode_and_tp_are_the_same(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "--hf-model",
        t0,
        "--output-artifacts-dir",
        tmp_path / "b",
        "--compile-target",
        "gfx942",
    ]
    assert run(*argv, "--sharding-mode", "tp2") == 0
    capsys.readouterr()
    assert run(*argv, "--tp", 2, "--sharding-mode", "tp2") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_extra_compile_args_reach_the_compiler(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    flags = ["--extra-compile-arg=--iree-opt-level=O3", "--extra-compile-arg=--some_flag=a_b"]
    assert run("--hf-model", t0, "--output-artifacts-dir", tmp_path / "b", *flags) == 0
    assert compile_side.flags[0][-2:] == ("--iree-opt-level=O3", "--some_flag=a_b")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CompileError("iree-compile failed"), 1, "shark-compile: error: iree-compile failed"),
        (KeyboardInterrupt(), 130, "shark-compile: error: interrupted"),
    ],
)
def test_failures_leave_nothing_half_written(
    tmp_path: Path,
    t0: Path,
    compile_side: FakeCompileSide,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(source: Path) -> None:
        raise error

    compile_side.on_compile = fail
    assert run("--hf-model", t0, "--output-artifacts-dir", tmp_path / "b") == code
    assert capsys.readouterr().err.splitlines() == [message]
    assert [p.name for p in tmp_path.iterdir()] == ["t0"]


def test_sigterm_ends_the_compiler_and_cleans_up(tmp_path: Path, t0: Path) -> None:
    """As Ctrl-C does: no partial directory, no compiler that goes on for nobody."""
    script = tmp_path / "bin" / "iree-compile"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nexec sleep 100\n")
    script.chmod(0o755)
    code = (
        "import sys; from pathlib import Path\n"
        "from shark_llm.compile import compiler\n"
        "from build_harness import FakeCompileSide\n"
        "from shark_llm.cli.compile import main\n"
        "from shark_llm.export import compose\n"
        "compose.export_module = FakeCompileSide().export_module\n"
        f"compiler.compiler_executable = lambda: Path({str(script)!r})\n"
        "main(sys.argv[1:])\n"
    )
    argv = ["--hf-model", t0, "--output-artifacts-dir", tmp_path / "b"]
    argv += ["--output-dev-artifacts-dir", tmp_path / "d"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, argv)], env=env)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "pid", "t0"]


def test_without_the_compile_side_the_remedy_is_said(
    t0: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installation for serving has no torch and no compiler."""
    found = packages.is_installed
    monkeypatch.setattr(
        packages, "is_installed", lambda m: m not in ("torch", "iree.compiler") and found(m)
    )
    assert run("--hf-model", t0, "--dry-run") == 1
    assert capsys.readouterr().err == (
        "shark-compile: error: building needs torch, iree-base-compiler, not installed here: "
        "pip install 'shark-llm[compile]'\n"
    )


def test_compiler_and_runtime_of_different_releases_are_refused(
    t0: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F10: before hours of compiling a module that this runtime would not load."""
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version",
        lambda name: "3.9.0" if name == "iree-base-compiler" else real(name),
    )
    message = f"iree-base-compiler 3.9.0 and iree-base-runtime {real('iree-base-runtime')} do not"
    assert run("--version") == 0
    assert message in capsys.readouterr().out
    assert run("--hf-model", t0, "--dry-run") == 1
    assert message in capsys.readouterr().err


def test_the_token_comes_from_the_environment_or_a_flag(
    tmp_path: Path, t0: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--hf-model", t0, "--hf-token", "hf_abc", "--dry-run") == 0
    captured = capsys.readouterr()
    assert "hf_abc" not in captured.out + captured.err


def test_serve_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Flag by flag; only the program's name differs."""
    run("serve", "--help")
    ours = capsys.readouterr().out
    with pytest.raises(SystemExit):
        serve_cli.main(["--help"])
    theirs = capsys.readouterr().out
    assert ours.replace("shark-compile serve", "shark-serve") == theirs


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for word in ("--hf-model", "--revision", "--save-intermediates", "verify", "inspect", "repro"):
        assert word in text
    assert run("--version") == 0
    line = capsys.readouterr().out
    for word in ("shark-compile 0.", "iree-base-compiler 3.", "iree-base-runtime 3.", "torch 2."):
        assert word in line


# Runs the command in a process where torch, the compiler and the hub's client cannot be imported.
PROBE = """
import sys
forbidden = ("torch", "iree.compiler", "huggingface_hub", "transformers")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in forbidden:
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
from shark_llm.cli.compile import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_sample(tmp_path_factory.mktemp("quick") / "bundle")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["inspect", "BUNDLE"], 0),
        (["verify", "BUNDLE", "--no-golden"], 0),
        (["repro", "BUNDLE"], 0),
        (["cache", "list"], 0),
        (["cache", "prune"], 0),
        (["serve", "--help"], 0),
        (["plan", "--help"], 0),
        (["serve", "--artifacts-dir", "./no/such", "--port", "0"], 1),
        (["--hf-model", "m", "--tp", "9", "--dry-run"], 2),
    ],
)
def test_what_needs_no_torch_does_not_import_it(argv: list[str], code: int, bundle: Path) -> None:
    command = [str(bundle) if word == "BUNDLE" else word for word in argv]
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *command], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr


def test_a_local_model_never_loads_the_hub_client(tmp_path: Path, t0: Path) -> None:
    code = (
        "import sys\n"
        "from shark_llm.cli.compile import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('huggingface_hub' in sys.modules)"
    )
    argv = ["--hf-model", str(t0), "--output-artifacts-dir", str(tmp_path / "b"), "--dry-run"]
    result = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_json_is_all_that_verify_and_inspect_print(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", bundle, "--json", "--no-golden") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert run("inspect", bundle, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tp"] == 2
