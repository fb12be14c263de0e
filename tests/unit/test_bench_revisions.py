"""scripts/bench --against: the files of another commit, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmark_samples import (
    OURS,
    Series,
    a_case,
    a_result,
    a_round,
    command,
    page,
    peers,
    results,
    revisions,
    worker,
)
from shark_llm.errors import UsageError

PINS = "iree-base-runtime==3.13.0\nnumpy==2.4.6\ntorch==2.13.0\nruff==0.14.0\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, whose cache is empty."""
    root = tmp_path / "repository"
    (root / "src").mkdir(parents=True)
    (root / "scripts").mkdir()
    (root / "src" / "answer.py").write_text("VALUE = 1\n")
    (root / "scripts" / "none.py").write_text("")
    (root / "constraints.txt").write_text(PINS)
    monkeypatch.setattr(peers, "ROOT", root)
    monkeypatch.setattr(peers, "CACHE", tmp_path / "cache")
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "one")


def test_files_are_those_of_the_commit(repository: Path) -> None:
    """Not of the tree, which may have changes, nor of a later commit; and they are kept."""
    (repository / "src" / "answer.py").write_text("VALUE = 2\n")
    found = revisions.check_out("HEAD")
    assert (found.root / "src" / "answer.py").read_text() == "VALUE = 1\n"
    assert found.side == f"{OURS} at {found.commit[:12]}"
    commit(repository)
    assert revisions.check_out("HEAD~1") == found
    assert (revisions.check_out("HEAD").root / "src" / "answer.py").read_text() == "VALUE = 2\n"
    environment = worker.environment(found.paths)
    assert environment["PYTHONPATH"].split(":") == [
        str(found.root / "scripts"),
        str(found.root / "src"),
    ]


@pytest.mark.parametrize("asked", ["nonsense", "", "--all", "HEAD:src"])
def test_what_is_no_commit_is_refused(repository: Path, asked: str) -> None:
    with pytest.raises(UsageError, match=f"--against is '{asked}', which is no commit"):
        revisions.check_out(asked)


def test_a_commit_with_another_compiler_is_refused(repository: Path) -> None:
    """Its figures would be those of a compiler that it never saw; a linter makes no difference."""
    (repository / "constraints.txt").write_text(PINS.replace("ruff==0.14.0", "ruff==0.15.0"))
    revisions.check_out("HEAD")
    (repository / "constraints.txt").write_text(PINS.replace("3.13.0", "3.14.0"))
    with pytest.raises(UsageError, match=r"which pins iree-base-runtime==.*; here iree-base"):
        revisions.check_out("HEAD")


def test_one_of_commit_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="leaves no room for --openvino"):
        command.run(["decode", "--against", "HEAD", "--openvino"])


def test_a_comparison_is_not_for_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "KEPT", tmp_path / "kept")
    case = a_case([a_round(100)], [a_round(120)])
    other = Series(side=f"{OURS} at 0123456789ab", rounds=[a_round(120)])
    compared = case.model_copy(update={"series": [case.series[0], other]})
    results.write(a_result(steps=[compared]), tmp_path / "result.json")
    with pytest.raises(UsageError, match="compares two commits"):
        page.keep([tmp_path / "result.json"])
    assert not list((tmp_path / "kept").glob("*"))
