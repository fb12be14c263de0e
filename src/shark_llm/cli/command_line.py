"""What both commands do around typer: spellings of flags, errors on one line, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from shark_llm.errors import SharkError


def normalize_argv(argv: Sequence[str], multi_value_flags: Sequence[str]) -> list[str]:
    """The command line in typer's terms.

    Underscores in flag names are hyphens (`--device_ids`), and each of `multi_value_flags` may have
    its values behind it, separated by spaces: `--device-ids 0 1 2`, or `--device-ids=0,1,2` where
    the values are numbers.
    """
    result: list[str] = []
    several: str | None = None
    for position, argument in enumerate(argv):
        if argument == "--":
            return result + list(argv[position:])
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            several = name if name in multi_value_flags else None
            if several is None:
                result.append(name + equals + value)
            elif equals:
                result += _repeated(several, value)
        elif several is not None and not argument.startswith("-"):
            result += _repeated(several, argument)
        else:
            several = None
            result.append(argument)
    return result


def _repeated(flag: str, value: str) -> list[str]:
    """`--flag a --flag b`; a list of numbers with commas or spaces is several values."""
    parts = value.replace(",", " ").split()
    values = parts if parts and all(part.isdigit() for part in parts) else [value]
    return [part for each in values for part in (flag, each)]


def run_app(
    app: typer.Typer,
    program: str,
    argv: Sequence[str] | None,
    multi_value_flags: Sequence[str],
) -> NoReturn:
    """Run a typer app as a console script: one line per error, the exit code of its class.

    With `--debug` among the arguments a SharkError keeps its traceback.
    """
    arguments = normalize_argv(sys.argv[1:] if argv is None else argv, multi_value_flags)
    try:
        code = app(arguments, prog_name=program, standalone_mode=False)
    except SharkError as error:
        if "--debug" in arguments:
            raise
        _fail(program, str(error), error.exit_code)
    except TyperException as error:
        _fail(program, f"{error.format_message()} (see {program} --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail(program, "interrupted", 130)
    sys.exit(code or 0)


def _fail(program: str, message: str, code: int) -> NoReturn:
    line = " ".join(message.split())
    sys.stderr.write(f"{program}: error: {line}\n")
    sys.exit(code)
