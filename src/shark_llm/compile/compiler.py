"""Run iree-compile: a process per module, its diagnostics as errors, time and memory measured."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shark_llm.errors import CompileError
from shark_llm.stages import peak_resident_bytes

LOG_NAME = "compiler-output.txt"
_SHOWN_DIAGNOSTIC_CHARS = 600
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class CompileResult:
    """What one run of the compiler took."""

    seconds: float
    peak_memory_bytes: int


def compiler_command(source: Path | str, output: Path | str, flags: Sequence[str]) -> list[str]:
    """The command line, as a user could type it."""
    return ["iree-compile", str(source), "-o", str(output), *flags]


def shell_script(source: str, output: str, flags: Sequence[str]) -> str:
    """compile-command.sh, to lie beside `source`: rebuilds the module from any working directory.

    iree-compile is deterministic, so the result has the digest that the manifest names.
    """
    words = [shlex.quote(word) for word in compiler_command(source, "OUTPUT", flags)]
    words[words.index("OUTPUT")] = '"$output"'
    return (
        "#!/usr/bin/env bash\n"
        f"# Compiles {source} again. Usage: compile-command.sh [OUTPUT] (default: {output} here)\n"
        "set -euo pipefail\n"
        f'output=$(realpath -m "${{1:-{output}}}")\n'
        'cd "$(dirname "$0")"\n' + " \\\n  ".join(words) + "\n"
    )


def compiler_executable() -> Path:
    """The compiler itself, of the installed package.

    Not the script on PATH: that is Python waiting for this, would outlive it or be outlived when
    one is killed, and has a memory of its own.
    """
    try:
        from iree.compiler.tools import binaries
    except ImportError as error:
        raise CompileError(
            "iree-base-compiler is not installed: pip install 'shark-llm[compile]'"
        ) from error
    return Path(binaries.find_tool("iree-compile")).resolve()


def run_compiler(source: Path, output: Path, flags: Sequence[str]) -> CompileResult:
    """Compile `source` to `output`.

    Raises CompileError with the compiler's first diagnostic; all that it said is then in LOG_NAME
    beside `source`.
    """
    executable = compiler_executable()
    command = compiler_command(source.name, output.resolve(), flags)
    started = time.monotonic()
    # The compiler's temporary files, and what it says, go where its output goes: /tmp may be small.
    with tempfile.TemporaryDirectory(prefix=".compiler-", dir=output.parent) as scratch:
        log_path = Path(scratch) / "log"
        with log_path.open("wb") as log:
            try:
                process = subprocess.Popen(
                    [str(executable), *command[1:]],
                    cwd=source.parent,
                    env={**os.environ, "TMPDIR": str(Path(scratch).resolve())},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                raise CompileError(
                    f"cannot run {executable} ({error.strerror}): install iree-base-compiler "
                    "(pip install 'shark-llm[compile]')"
                ) from error
        try:
            status, peak = _wait(process.pid)
        except BaseException:
            process.kill()
            process.wait()
            output.unlink(missing_ok=True)
            raise
        process.returncode = code = os.waitstatus_to_exitcode(status)
        text = log_path.read_bytes().decode(errors="replace")
    seconds = time.monotonic() - started
    if code:
        output.unlink(missing_ok=True)
        source.with_name(LOG_NAME).write_text(text)
        raise CompileError(
            f"iree-compile {_ending(code)} after {seconds:.0f} s: {_first_diagnostic(text)}; "
            f"the command was: {shlex.join(command)}"
        )
    return CompileResult(seconds=seconds, peak_memory_bytes=peak)


def _wait(pid: int) -> tuple[int, int]:
    """Wait for a child: its wait status, and the peak of its resident memory in bytes.

    The high-water mark is read while the child runs: what wait4 says afterwards counts from the
    fork, and so includes all that this process held at that moment.
    """
    peak = 0
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, peak or usage.ru_maxrss * 1024
        peak = max(peak, peak_resident_bytes(pid) or 0)
        time.sleep(_POLL_SECONDS)


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"


def _first_diagnostic(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower() or "LLVM ERROR" in line]
    text = " ".join((errors or lines or ["no message"])[:2])
    shown = text[:_SHOWN_DIAGNOSTIC_CHARS]
    return shown if shown == text else f"{shown} ..."
