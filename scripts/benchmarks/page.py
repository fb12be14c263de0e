"""docs/performance.md: written by hand, with tables of docs/performance/*.json between markers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from benchmarks import results, tables
from benchmarks.peers import ROOT
from shark_llm.errors import UsageError

PAGE = ROOT / "docs" / "performance.md"
KEPT = ROOT / "docs" / "performance"
_SECTION = re.compile(
    r"(<!-- results: (?P<name>[\w.-]+\.json) -->\n).*?(<!-- end of results -->)", re.DOTALL
)


def keep(paths: Iterable[Path]) -> None:
    """Copy results to docs/performance, named for benchmark and precision."""
    for path in paths:
        result = results.read(path)
        KEPT.mkdir(parents=True, exist_ok=True)
        target = KEPT / f"{result.benchmark}-{result.dtype}.json"
        shutil.copyfile(path, target)
        print(f"bench: kept {target.relative_to(ROOT)}")


def render(text: str, kept: Path) -> str:
    """The page with each marked section made anew from its file in `kept`.

    Raises UsageError for a marker without its file, and for a file without a marker.
    """
    marked: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        marked.add(name)
        return match[1] + "\n" + tables.section(results.read(kept / name)) + "\n" + match[3]

    rendered = _SECTION.sub(fill, text)
    there = {path.name for path in kept.glob("*.json")} if kept.is_dir() else set()
    if unmarked := sorted(there - marked):
        raise UsageError(
            f"{unmarked[0]} has no place on the page: add the lines "
            f"<!-- results: {unmarked[0]} --> and <!-- end of results --> where its table belongs"
        )
    return rendered


def write() -> None:
    """Make the page's tables anew."""
    PAGE.write_text(render(PAGE.read_text(), KEPT))
    print(f"bench: wrote {PAGE.relative_to(ROOT)}")
