"""How the scripts that have a package of their own end: one line per error, as our commands do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from shark_llm.errors import SharkError


def main(script: str, run: Callable[[Sequence[str]], int], *errors: type[Exception]) -> NoReturn:
    """Run with the command line's arguments and end with the code that `run` returns.

    `errors` are the script's own whose message is for the user; they end it with 1, as those of
    the project do, but for a wrong use: 2.
    """
    expected: tuple[type[Exception], ...] = (SharkError, *errors)
    try:
        sys.exit(run(sys.argv[1:]))
    except expected as error:
        print(f"{script}: error: {error}", file=sys.stderr)
        sys.exit(2 if getattr(error, "exit_code", 1) == 2 else 1)
    except KeyboardInterrupt:
        sys.exit(130)
