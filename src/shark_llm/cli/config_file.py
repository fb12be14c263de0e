"""`--config FILE`: the flags of a command as a TOML file, below the environment and the flags.

    artifacts-dir = "/models/llama-3.1-8b"
    device-ids = [0, 1, 2, 3]
    enable-prefix-caching = false

A key is a flag without its dashes. Values have TOML's own types: "8000" is no port.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import typer

from shark_llm.errors import UsageError

_NOT_IN_FILES = frozenset({"config", "version", "debug", "help"})
# type of the flag's value -> what TOML may say, and how that is called
_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a string"),
    Path: ((str,), "a string"),
}


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of an eager `--config`: takes the file's values as the command's defaults.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has a key or value that no flag takes.
    """
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is not TOML: {error}") from error
    params = {p.name: p for p in context.command.params if p.name not in _NOT_IN_FILES}
    context.default_map = {}
    for key, value in values.items():
        param = params.get(key.replace("-", "_"))
        if param is None or param.name is None:
            known = ", ".join(sorted(str(name).replace("_", "-") for name in params))
            raise UsageError(f"--config: {path} has the key {key!r}; the keys are {known}")
        context.default_map[param.name] = _checked(param, value, f"--config: {path}: {key}")
    return path


def _checked(param: Any, value: object, where: str) -> object:
    annotation = param.type_descriptor.annotation
    while get_args(annotation):  # list[int] | None
        annotation = get_args(annotation)[0]
    types, wanted = _TYPES[annotation]
    several = value if param.multiple and isinstance(value, list) else [value]
    for each in several:
        is_wanted = isinstance(each, types) and (isinstance(each, bool) == (types == (bool,)))
        if not is_wanted:
            more = ", or a list of those" if param.multiple else ""
            raise UsageError(f"{where} is {each!r}; it must be {wanted}{more}")
    return several if param.multiple else value
