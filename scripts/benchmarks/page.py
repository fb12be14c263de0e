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
    before, begin, rest = text.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before + after:
        raise UsageError(f"the page must have the line {BEGIN} once, and {END} behind it")
    order = list(BENCHMARKS)
    ordered = sorted(kept, key=lambda result: (result.dtype, order.index(result.benchmark)))
    sections = [
        f"### {r.benchmark.capitalize()}, {r.dtype}\n\n{tables.section(r)}" for r in ordered
    ]
    return "\n".join([before + BEGIN, "", *sections, END]) + after


def kept_results() -> list[Result]:
    """Those of docs/performance."""
    return [results.read(path) for path in KEPT.glob("*.json")]


def write() -> None:
    """Make the page's tables anew."""
    PAGE.write_text(render(PAGE.read_text(), kept_results()))
    print(f"bench: wrote {PAGE.relative_to(ROOT)}")
