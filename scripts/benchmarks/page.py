"""docs/performance.md: written by hand, with tables and plots of docs/performance/*.json between
markers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from benchmarks import plots, results, tables
from benchmarks.peers import ROOT
from benchmarks.results import BENCHMARKS, OURS, Result
from shark_llm.errors import UsageError

PAGE = ROOT / "docs" / "performance.md"
KEPT = ROOT / "docs" / "performance"
BEGIN, END = "<!-- results: written by scripts/bench render -->", "<!-- end of results -->"


def keep(paths: Iterable[Path]) -> None:
    """Copy results to docs/performance, named for benchmark and precision.

    Raises UsageError for one that compares two commits: its command means something else tomorrow.
    """
    for path in paths:
        result = results.read(path)
        if any(peer.startswith(OURS) for case in result.steps for peer in case.peers):
            raise UsageError(f"{path} compares two commits; the page has only peers: give another")
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
    return between(text, BEGIN, END, "\n".join(map(_section, ordered)))


def _section(result: Result) -> str:
    parts = [f"### {result.benchmark.capitalize()}, {result.dtype}", tables.section(result)]
    if (plot := plots.name(result)) is not None:
        what = f"{result.benchmark}, {result.dtype}: tokens per second of each side"
        parts.insert(1, f"![{what}]({KEPT.name}/{plot})")
    return "\n\n".join(parts)


def between(text: str, begin: str, end: str, body: str) -> str:
    """The page with `body` between two lines that mark its place.

    Raises UsageError when the page has not exactly one pair of them.
    """
    before, found_begin, rest = text.partition(begin + "\n")
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in after or end in before + after:
        raise UsageError(f"the page must have the line {begin} once, and {end} behind it")
    return f"{before}{begin}\n\n{body}\n{end}{after}"


def kept_results() -> dict[Path, Result]:
    """Those of docs/performance, and the files of their samples."""
    return {path: results.read(path) for path in sorted(KEPT.glob("*.json"))}


def write() -> None:
    """Make the page's tables and plots anew."""
    kept = kept_results()
    PAGE.write_text(render(PAGE.read_text(), kept.values()))
    plots.draw(kept.items())
    print(f"bench: wrote {PAGE.relative_to(ROOT)}")
