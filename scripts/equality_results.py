"""What scripts/equality keeps, in docs/correctness, and its table in docs/correctness.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import page, tables
from benchmarks.results import Fact
from pydantic import TypeAdapter, ValidationError

from shark_llm.errors import UsageError

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs" / "correctness" / "served.json"
PAGE = ROOT / "docs" / "correctness.md"
BEGIN, END = "<!-- served: written by scripts/equality -->", "<!-- end of served -->"


class Served(Fact):
    """The answers of one bundle, asked in one way, and what the judge says of them."""

    dtype: str
    tp: int
    how: str
    """alone, or mixed."""
    batch_sizes: list[int]
    """Of the bundle's entry points."""
    answers: list[list[int]]
    """Token ids, for each prompt."""
    near_ties: int
    """Tokens that are not the judge's, and less likely by no more than rounding can do."""
    behind: float
    """The most that a chosen token's logit is below the judge's best, as a share of the largest
    |logit|."""
    error: float
    """The largest difference of a log-probability, as a share of the largest |logit|."""
    wrong: list[str]
    """A line for each token or log-probability beyond the tolerance."""
    tolerance: float
    """That it was judged by, in the units of `error`."""
    started: str
    commit: str
    command: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def key(self) -> tuple[str, int, str]:
        """What there is one of: f32 before bf16, alone before mixed."""
        return (self.dtype.replace("bf", "~"), self.tp, self.how)


_ROWS = TypeAdapter(list[Served])


def read(path: Path = KEPT) -> list[Served]:
    """None where there is no file. Raises UsageError for another file."""
    if not path.exists():
        return []
    try:
        return _ROWS.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}: remove it, or correct it") from error


def keep(rows: Iterable[Served], path: Path = KEPT) -> list[Served]:
    """Put rows in the place of older ones of the same dtype, tp and way; returns all."""
    known = {row.key: row for row in [*read(path), *rows]}
    ordered = [known[key] for key in sorted(known)]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row.model_dump_json() for row in ordered]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return ordered


def table(rows: Sequence[Served]) -> str:
    """Markdown. Answers are compared with those of the first row of the same dtype."""
    header = ["dtype", "tp", "asked", "tokens", "transformers' own", "near-ties", "furthest behind"]
    header += ["wrong", "largest error", "answers as in the first row"]
    first: dict[str, Served] = {}
    lines = []
    for row in rows:
        of_first = first.setdefault(row.dtype, row).answers
        same = sum(a == b for a, b in zip(row.answers, of_first, strict=True))
        cells = [row.dtype, str(row.tp), row.how, str(row.tokens), str(row.tokens - row.near_ties)]
        cells += [str(row.near_ties), f"{row.behind:.1e}" if row.near_ties else "-"]
        cells += [str(len(row.wrong)), f"{row.error:.1e}", f"{same} of {len(of_first)}"]
        lines.append(cells)
    return tables.table(header, lines)


def render(text: str, rows: Sequence[Served]) -> str:
    """The page with the table made anew, and the commands that made it."""
    commands = dict.fromkeys(f"{row.command}  # {row.started}, {row.commit}" for row in rows)
    body = "\n".join([table(rows), "", "```text", *commands, "```", ""])
    return page.between(text, BEGIN, END, body)


def write(rows: Sequence[Served]) -> None:
    """Make the page's table anew."""
    PAGE.write_text(render(PAGE.read_text(), rows))
