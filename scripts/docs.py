"""Writes the generated pages of docs/: the command line, the errors and the supported models.

    scripts/docs            write them
    scripts/docs --check    change nothing, exit 1 when a page is stale

The pages depend on code and recipes alone, never on the terminal, the machine or the day.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from support_table import support_page

from shark_llm import errors
from shark_llm.errors import RequestError, SharkError

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "shark_llm"
NOTICE = "<!-- Written by scripts/docs from the code; do not edit. -->"

# --- docs/cli.md ---------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command, argument and flag, from the typer apps."""
    from shark_llm.cli import compile as compile_cli
    from shark_llm.cli import serve as serve_cli

    lines = [
        "# Command line",
        "",
        NOTICE,
        "",
        "`shark-compile` turns a checkpoint into a bundle, `shark-serve` serves a bundle;",
        "`shark-compile serve` is the same command as `shark-serve`. A flag that takes several",
        "values takes them separated by spaces.",
    ]
    for name, app in (("shark-compile", compile_cli.app), ("shark-serve", serve_cli.app)):
        lines += _command_section(name, typer.main.get_command(app), depth=2)
    return "\n".join(lines) + "\n"


def _command_section(path: str, command: Any, *, depth: int) -> Iterator[str]:
    """The section of one command, then those of its subcommands."""
    yield from ("", f"{'#' * depth} {path}", "")
    yield inspect.cleandoc(command.help or "").replace("\f", "")
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    if arguments:
        yield from ("", "| argument | meaning |", "|---|---|")
        for param in arguments:
            yield f"| `{param.name.upper()}` | {_cell(param.help)} |"
    panels: dict[str, list[Any]] = {}
    for param in shown:
        if param.param_type_name == "option" and "completion" not in param.name:
            panels.setdefault(param.rich_help_panel or "Options", []).append(param)
    for panel, params in panels.items():
        yield from ("", f"**{panel}**", "", "| flag | default | meaning |", "|---|---|---|")
        for param in params:
            meaning = _cell(param.help)
            if param.envvar:
                meaning += f" Environment: `{param.envvar}`."
            yield f"| {_spelling(param)} | {_default(param)} | {meaning} |"
    for name, sub in getattr(command, "commands", {}).items():
        if getattr(sub, "hidden", False):
            continue
        if path == "shark-compile" and name == "serve":
            yield from (
                "",
                f"{'#' * (depth + 1)} {path} serve",
                "",
                "See [shark-serve](#shark-serve).",
            )
        else:
            yield from _command_section(f"{path} {name}", sub, depth=depth + 1)


def _spelling(param: Any) -> str:
    """All spellings of a flag, with a placeholder for its value."""
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    if param.is_flag:
        return names
    several = " ..." if param.multiple or param.nargs != 1 else ""
    return f"{names} {_placeholder(param)}{several}"


def _placeholder(param: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    annotation = param.type_descriptor.annotation
    while typing.get_origin(annotation) in (list, tuple, types.UnionType, typing.Union):
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " \\| ".join(f"`{choice.value}`" for choice in annotation)
    return {int: "N", float: "X", Path: "PATH"}.get(annotation, "TEXT")


def _default(param: Any) -> str:
    default = param.default
    if isinstance(param.show_default, str):
        return param.show_default
    if param.required:
        return "required"
    if default is None or default in ([], ()) or callable(default):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, list | tuple):
        default = " ".join(str(value) for value in default)
    return f"`{default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


# --- docs/errors.md ------------------------------------------------------------------------------


def errors_page() -> str:
    """The exception tree, and for every class the messages that the code can give."""
    messages = _messages()
    tree = inspect.getdoc(errors) or ""
    lines = [
        "# Errors",
        "",
        NOTICE,
        "",
        "Every error a user can cause is one line that names the value found, the limit or the",
        "expectation, and the remedy. The command line tools exit with 2 when the command line is",
        "wrong and with 1 for everything else; `--debug` adds the traceback. The server answers",
        'with the JSON body `{"error": {"message", "type", "param", "code"}}`.',
        "",
        "```text",
        *[line[4:] for line in tree.splitlines() if line.startswith("    ")],
        "```",
        "",
        "Below, `<name>` stands for a value that the message fills in.",
    ]
    for cls in _classes(SharkError):
        lines += ["", f"## {cls.__name__}", "", inspect.getdoc(cls) or ""]
        if not issubclass(cls, RequestError):
            lines += ["", f"Exit code {cls.exit_code}."]
        found = messages.get(cls.__name__, {})
        if found:
            lines += ["", "| message | raised in |", "|---|---|"]
            lines += [f"| {_cell(_escape(text))} | `{where}` |" for text, where in found.items()]
    return "\n".join(lines) + "\n"


def _classes(base: type[SharkError]) -> Iterator[type[SharkError]]:
    yield base
    for sub in base.__subclasses__():
        if sub.__module__ == errors.__name__:
            yield from _classes(sub)


def _messages() -> dict[str, dict[str, str]]:
    """Class name -> message template -> module, for every message written where it is raised."""
    names = {cls.__name__ for cls in _classes(SharkError)}
    found: dict[str, dict[str, str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if isinstance(node.func, ast.Name):
                name = node.func.id
            template = _template(node.args[0]) if name in names else None
            if name and template:
                found.setdefault(name, {}).setdefault(" ".join(template.split()), where)
    return found


def _template(node: ast.expr) -> str | None:
    """A message with `<...>` for what is filled in; None for one that is computed elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"<{_hole(value.value)}>" if isinstance(value, ast.FormattedValue) else str(value.value)
            for value in node.values
            if isinstance(value, ast.FormattedValue | ast.Constant)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return None if left is None or right is None else left + right
    return None


def _hole(node: ast.expr) -> str:
    """A short name for the value in a hole: the last name of the expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            return part.attr
        if isinstance(part, ast.Name) and part.id not in ("len", "repr", "str", "sorted", "list"):
            return part.id
    return "value"


def _escape(text: str) -> str:
    for char in ("\\", "<", ">", "*", "_", "[", "]", "`"):
        text = text.replace(char, "\\" + char)
    return text


# --- the command ---------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "errors.md": errors_page,
    "support.md": lambda: support_page(NOTICE),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pages are fresh")
    check = parser.parse_args().check
    stale = 0
    for name, make in PAGES.items():
        path, new = ROOT / "docs" / name, make()
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == new:
            continue
        if check:
            stale += 1
            print(f"docs/{name} is stale; run scripts/docs and commit it:")
            diff = difflib.unified_diff(old.splitlines(), new.splitlines(), "committed", "now", n=0)
            print("\n".join(list(diff)[:20]))
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new, encoding="utf-8")
            print(f"docs/{name} written")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
