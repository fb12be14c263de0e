"""docs/performance.md: written by hand, with tables of docs/performance/*.json between markers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from benchmarks import results, tables
from benchmarks.peers import ROOT
from benchmarks.results import BENCHMARKS, Result
from shark_llm.errors import UsageError

PAGE = ROOT / "docs" / "performance.md"
KEPT = ROOT / "docs" / "performance"
BEGIN, END = "<!-- results: written by scripts/bench render -->", "<!-- end of results -->"


def keep(paths: Iterable[Path]) -> None:
    """Copy results to docs/performance, named for benchmark and precision."""
    for path in paths:
        result = results.read(path)
        KEPT.mkdir(parents=True, exist_ok=True)
        target = KEPT / f"{result.benchmark}-{result.dtype}.json"
        shutil.copyfile(path, target)
        print(f"bench: kept {target.relative_to(ROOT)}")


def render(text: str, kept: Iterable[Result]) -> str:
    """The page with all that is between its markers made anew from `kept`.

    Raises UsageError when the page has not exactly one pair of markers.
    """
    order = list(BENCHMARKS)
    ordered = sorted(kept, key=lambda result: (result.dtype, order.index(result.benchmark)))
    sections = [
        f"### {r.benchmark.capitalize()}, {r.dtype}\n\n{tables.section(r)}" for r in ordered
    ]
    return between(text, BEGIN, END, "\n".join(sections))


def between(text: str, begin: str, end: str, body: str) -> str:
    """The page with `body` between two lines that mark its place.

    Raises UsageError when the page has not exactly one pair of them.
    """
    before, found_begin, rest = text.partition(begin + "\n")
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in after or end in before + after:
        raise UsageError(f"the page must have the line {begin} once, and {end} behind it")
    return f"{before}{begin}\n\n{body}\n{end}{after}"


def kept_results() -> list[Result]:
    """Those of docs/performance."""
    return [results.read(path) for path in KEPT.glob("*.json")]


def write() -> None:
    """Make the page's tables anew."""
    PAGE.write_text(render(PAGE.read_text(), kept_results()))
    print(f"bench: wrote {PAGE.relative_to(ROOT)}")
