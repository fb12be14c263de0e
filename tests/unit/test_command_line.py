"""What both commands do around typer: lists of values, one line per error, exit codes."""

from __future__ import annotations

import pytest
import typer

from shark_llm.cli.command_line import normalize_argv, run_app
from shark_llm.errors import CompileError, UsageError

FLAGS = {"--sizes": int, "--keys": str}


@pytest.mark.parametrize(
    ("argv", "normal"),
    [
        (["--sizes", "1", "4"], ["--sizes", "1", "--sizes", "4"]),
        (["--sizes", "1", "4", "--a_b", "x"], ["--sizes", "1", "--sizes", "4", "--a-b", "x"]),
        (["--sizes=1,4"], ["--sizes", "1", "--sizes", "4"]),
        (["--sizes", "1, 4"], ["--sizes", "1", "--sizes", "4"]),
        (["--sizes="], ["--sizes", ""]),
        (["--sizes", "-1", "4"], ["--sizes", "-1", "--sizes", "4"]),
        (["--keys", "1,4", "b"], ["--keys", "1,4", "--keys", "b"]),
        (["--keys=1,4"], ["--keys", "1,4"]),
        (["--extra=--some_flag=a_b"], ["--extra=--some_flag=a_b"]),
        (["a_b", "--", "--sizes", "1"], ["a_b", "--", "--sizes", "1"]),
    ],
)
def test_lists_and_spellings(argv: list[str], normal: list[str]) -> None:
    assert normalize_argv(argv, FLAGS) == normal


@pytest.mark.parametrize("argv", [["--sizes"], ["--sizes", "--a", "1"], ["--sizes", "--", "1"]])
def test_a_list_without_values_is_not_passed_over(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="--sizes has no value"):
        normalize_argv(argv, FLAGS)


def run(raised: BaseException | None, *argv: str) -> int | str | None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    def command(number: int = 0, debug: bool = False) -> None:
        if raised is not None:
            raise raised

    with pytest.raises(SystemExit) as caught:
        run_app(app, "prog", list(argv), FLAGS)
    return caught.value.code


@pytest.mark.parametrize(
    ("raised", "argv", "code", "line"),
    [
        (CompileError("it\nfailed"), [], 1, "prog: error: it failed"),
        (UsageError("wrong"), [], 2, "prog: error: wrong"),
        (KeyboardInterrupt(), [], 130, "prog: error: interrupted"),
        (None, ["--sizes"], 2, "prog: error: --sizes has no value: give one or more"),
        (None, ["--number", "x"], 2, "prog: error: Invalid value for '--number': "),
        (None, ["--nope"], 2, "prog: error: No such option: --nope"),
    ],
)
def test_every_error_is_one_line(
    raised: BaseException | None,
    argv: list[str],
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(raised, *argv) == code
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith(line)


def test_success_is_zero() -> None:
    assert run(None) == 0


def test_debug_keeps_the_traceback() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def command(debug: bool = False) -> None:
        raise CompileError("it failed")

    with pytest.raises(CompileError):
        run_app(app, "prog", ["--debug"], FLAGS)
