"""What scripts/equality keeps, and the table that docs/correctness.md makes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import equality_results
from equality_results import Served

from shark_llm.errors import UsageError


def served(**changes: Any) -> Served:
    given: dict[str, Any] = {
        "dtype": "f32",
        "tp": 2,
        "how": "alone",
        "batch_sizes": [1, 4],
        "answers": [[1, 2], [3, 4]],
        "near_ties": 0,
        "behind": 0.0,
        "error": 1.5e-4,
        "wrong": [],
        "tolerance": 1e-3,
        "started": "now",
        "commit": "abc",
        "command": "scripts/equality",
    }
    return Served(**given | changes)


def test_rows_are_kept_in_order_and_newer_ones_take_the_place_of_older(tmp_path: Path) -> None:
    path = tmp_path / "new" / "served.json"
    assert equality_results.read(path) == []
    equality_results.keep([served(dtype="bf16", tp=1), served(tp=8), served()], path)
    rows = equality_results.keep([served(tp=8, error=0.25), served(how="mixed")], path)
    assert [(row.dtype, row.tp, row.how, row.error) for row in rows] == [
        ("f32", 2, "alone", 1.5e-4),
        ("f32", 2, "mixed", 1.5e-4),
        ("f32", 8, "alone", 0.25),
        ("bf16", 1, "alone", 1.5e-4),
    ]
    assert equality_results.read(path) == rows


def test_the_table_counts_answers_that_are_the_first_rows() -> None:
    other = served(tp=3, answers=[[1, 2], [3, 5]], near_ties=1, behind=2e-3, wrong=["a", "b"])
    bf16 = served(dtype="bf16", tp=5, answers=[[7, 7]])
    lines = equality_results.table([served(), other, bf16]).splitlines()[2:]
    assert lines == [
        "| f32 | 2 | alone | 4 | 4 | 0 | - | 0 | 1.5e-04 | 2 of 2 |",
        "| f32 | 3 | alone | 4 | 3 | 1 | 2.0e-03 | 2 | 1.5e-04 | 1 of 2 |",
        "| bf16 | 5 | alone | 2 | 2 | 0 | - | 0 | 1.5e-04 | 1 of 1 |",
    ]


def test_another_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    path.write_text('[{"dtype": "f32"}]')
    with pytest.raises(UsageError, match=r"served\.json: 0\.tp: .*: remove it, or correct it"):
        equality_results.read(path)


def test_the_page_shows_what_is_kept_and_all_of_it_is_right() -> None:
    text = equality_results.PAGE.read_text(encoding="utf-8")
    rows = equality_results.read()
    assert rows
    assert equality_results.render(text, rows) == text
    assert [row.wrong for row in rows] == [[]] * len(rows)
