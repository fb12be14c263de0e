"""What both commands do around typer: spellings of flags, errors on one line, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from shark_llm.errors import SharkError, UsageError

INTERRUPTED_EXIT_CODE = 130  # what shells report for a program that SIGINT has ended

MultiValueFlags = Mapping[str, type]
"""Flags that take several values, with the type of one: int or str."""


def normalize_argv(argv: Sequence[str], multi_value_flags: MultiValueFlags) -> list[str]:
    """The command line in typer's terms.

    Underscores in flag names are hyphens (`--device_ids`), and each of `multi_value_flags` may have
    its values behind it, separated by spaces: `--device-ids 0 1 2`, or `--device-ids=0,1,2` where
    the values are numbers. Raises UsageError for one that has none.
    """
    result: list[str] = []
    several: str | None = None  # the flag whose values are being read
    missing = False  # it has none yet
    for position, argument in enumerate(argv):
        if argument.startswith("-") and not _is_negative_number(argument, several):
            _check_has_value(several, missing)
            if argument == "--":
                return result + list(argv[position:])
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            several = name if name in multi_value_flags else None
            missing = several is not None and not equals
            if several is None:
                result.append(name + equals + value)
            elif equals:
                result += _repeated(several, value, multi_value_flags[several])
        elif several is not None:
            missing = False
            result += _repeated(several, argument, multi_value_flags[several])
        else:
            result.append(argument)
    _check_has_value(several, missing)
    return result


def _is_negative_number(argument: str, flag: str | None) -> bool:
    """Behind a flag of several values `-1` is one of them, for the command to refuse."""
    return flag is not None and argument[1:].isdigit()


def _check_has_value(flag: str | None, missing: bool) -> None:
    if missing:
        raise UsageError(f"{flag} has no value: give one or more, separated by spaces")


def _repeated(flag: str, value: str, value_type: type) -> list[str]:
    """`--flag a --flag b`; numbers may be separated by commas or spaces."""
    values = value.replace(",", " ").split() if value_type is int else []
    return [part for each in values or [value] for part in (flag, each)]


def run_app(
    app: typer.Typer,
    program: str,
    argv: Sequence[str] | None,
    multi_value_flags: MultiValueFlags,
) -> NoReturn:
    """Run a typer app as a console script: one line per error, the exit code of its class.

    With `--debug` among the arguments a SharkError keeps its traceback.
    """
    given = sys.argv[1:] if argv is None else argv
    try:
        arguments = normalize_argv(given, multi_value_flags)
        code = app(arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except SharkError as error:
        if "--debug" in given:
            raise
        _fail(program, str(error), error.exit_code)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = program if context is None else context.command_path
        _fail(program, f"{error.format_message()} (see {command} --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail(program, "interrupted", INTERRUPTED_EXIT_CODE)
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if code == INTERRUPTED_EXIT_CODE:  # typer turns a KeyboardInterrupt into this
        _fail(program, "interrupted", code)
    sys.exit(code or 0)


def _fail(program: str, message: str, code: int) -> NoReturn:
    line = " ".join(message.split())
    sys.stderr.write(f"{program}: error: {line}\n")
    sys.exit(code)
