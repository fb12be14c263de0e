"""shark-compile cache: what is listed, what goes, and what never does."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from bundles import publish_sample
from shark_llm.build import build
from shark_llm.cli import compile as compile_cli

DAY = 24 * 60 * 60


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of a build whose bundle is still there, with a bundle of a server in it."""
    FakeCompileSide.install(monkeypatch)
    root = tmp_path / "cache"
    monkeypatch.setenv("SHARK_CACHE_DIR", str(root))
    model = tiny.write_tiny(tmp_path / "t0")
    build(settings(model, tmp_path / "bundle", cache_dir=root), ListReporter())
    (root / "bundles" / "tiny--t0").mkdir(parents=True)
    publish_sample(root / "bundles" / "tiny--t0" / "0123456789abcdef")
    return root


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        compile_cli.main(["cache", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def entry(cache: Path, kind: str) -> Path:
    (path,) = (cache / kind).iterdir()
    return path


def test_path(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("path") == 0
    assert capsys.readouterr().out == f"{cache}\n"
    assert run("path", "--cache-dir", cache / "other") == 0
    assert capsys.readouterr().out == f"{cache / 'other'}\n"


def test_list(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, and what of them is a bundle's own; by last use."""
    age(entry(cache, "modules"), 3)
    assert run("list") == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["kind", "size", "last", "use", "key", "what"]
    assert rows[0].split()[0] == "modules"
    assert {row.split()[0] for row in rows} == {"archives", "modules", "bundles"}
    assert any(row.endswith("t0, f32, tp 1, x86-64-v3") for row in rows)
    assert total.startswith(f"{cache}: 3 entries, ")
    assert run("list", "--json") == 0
    contents = json.loads(capsys.readouterr().out)["contents"]
    archives = next(content for content in contents if content["kind"] == "archives")
    assert archives["num_bytes"] > 434176
    assert archives["freed_bytes"] < 2000  # entry.json; the archive is the bundle's as well


def test_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "prune"):
        assert run(command, "--cache-dir", tmp_path / "none") == 0
    assert "0 entries" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_prune_removes_what_is_old(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle that the files came from stays whole."""
    age(entry(cache, "archives"), 31)
    assert run("prune", "--dry-run") == 0
    assert "1 entries would be removed" in capsys.readouterr().out
    assert entry(cache, "archives").is_dir()
    assert run("prune") == 0
    assert "1 entries removed" in capsys.readouterr().out
    assert not list((cache / "archives").iterdir())
    assert entry(cache, "modules").is_dir()
    assert (tmp_path / "bundle" / "model.irpa").is_file()


def test_a_use_makes_it_young(cache: Path, tmp_path: Path) -> None:
    age(entry(cache, "archives"), 31)
    elsewhere = settings(tmp_path / "t0", tmp_path / "two", cache_dir=cache)
    build(elsewhere, ListReporter())
    assert run("prune") == 0
    assert entry(cache, "archives").is_dir()


def test_prune_all(cache: Path) -> None:
    assert run("prune", "--unused-days", "0") == 0
    assert sorted(path.name for path in cache.rglob("*")) == [
        ".lock", "archives", "bundles", "modules",
    ]  # fmt: skip


def test_prune_removes_damaged_entries_and_leftovers(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a killed writer, and of a bundle that lost its manifest."""
    (entry(cache, "modules") / "entry.json").write_text("{")
    shutil.copytree(entry(cache, "archives"), cache / "archives" / ".partial-0a0b0c0d")
    next((cache / "bundles" / "tiny--t0").iterdir()).joinpath("manifest.json").unlink()
    assert run("prune") == 0
    out = capsys.readouterr().out
    assert out.count("incomplete or damaged") == 2
    assert os.listdir(cache / "modules") == []
    assert len(os.listdir(cache / "archives")) == 1
    assert os.listdir(cache / "bundles") == []


def test_prune_waits_for_no_writer(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A leftover of one that lives is none."""
    with (cache / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert run("prune") == 2
    assert "a build is writing to the cache" in capsys.readouterr().err


def test_a_negative_age(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prune", "--unused-days", "-1") == 2
    assert "--unused-days is -1; it must be at least 0" in capsys.readouterr().err


def test_the_environment_is_no_flag_before_a_subcommand(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SHARK_CACHE_DIR is set for all commands of a machine."""
    with pytest.raises(SystemExit) as caught:
        compile_cli.main(["inspect", str(tmp_path / "bundle")])
    assert not caught.value.code
    assert capsys.readouterr().err == ""
