"""artifacts/publish.py within one process. Kills and concurrency: property/test_bundle_kills.py."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bundles import fill, publish_sample
from shark_llm.artifacts import publish as module
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.publish import publish
from shark_llm.errors import CapacityError, UsageError

RUNTIME = "3.13.0"


def listing(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def module_of(path: Path) -> bytes:
    return open_bundle(path, verify="digests", runtime_version=RUNTIME).module.read_bytes()


def test_a_new_directory_with_its_parents(tmp_path: Path) -> None:
    path = publish_sample(tmp_path / "a" / "b")
    assert module_of(path) == b"vmfb"
    assert listing(path.parent) == ["b"], "neither lock nor partials stay"
    assert path.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_old_bundle_is_replaced_whole(tmp_path: Path) -> None:
    """Files of the old bundle that the new one lacks are gone."""
    path = publish_sample(tmp_path / "x", tp=3, module=b"old")
    reader = (path / "model.vmfb").open("rb")
    publish_sample(path, tp=1, module=b"new")
    assert module_of(path) == b"new"
    assert listing(path) == ["manifest.json", "model.irpa", "model.vmfb"]
    assert listing(tmp_path) == ["x"]
    assert reader.read() == b"old", "who has the old one open keeps it"
    reader.close()


@pytest.mark.parametrize("exchange", [True, False])
def test_it_is_replaced_with_and_without_exchange(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    path = publish_sample(tmp_path / "x", module=b"old")
    publish_sample(path, module=b"new")
    assert module_of(path) == b"new"
    assert listing(tmp_path) == ["x"]


def test_an_error_or_no_seal_leaves_the_old_bundle(tmp_path: Path) -> None:
    path = publish_sample(tmp_path / "x", module=b"old")
    with pytest.raises(ZeroDivisionError), publish(path) as staging:  # noqa: PT012
        fill(staging, module=b"new")
        raise ZeroDivisionError
    with publish(path) as staging:
        (staging.path / "model.vmfb").write_bytes(b"half")
    assert module_of(path) == b"old"
    assert listing(tmp_path) == ["x"]


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert module_of(publish_sample(tmp_path / "x")) == b"vmfb"


def test_a_symlink_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    real = publish_sample(tmp_path / "disk" / "real", module=b"old")
    link = tmp_path / "link"
    link.symlink_to(real)
    publish_sample(link, module=b"new")
    assert link.is_symlink()
    assert module_of(real) == module_of(link) == b"new"


@pytest.mark.parametrize(
    "name", ["notes.txt", "sub/data.bin", ".hidden", "manifest.json", "empty/"]
)
def test_files_of_a_user_are_never_deleted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x" / name
    path.parent.mkdir(parents=True)
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_text("{}")
    with pytest.raises(UsageError, match=rf"never deleted \({re.escape(name.rstrip('/'))}\)"):
        publish_sample(tmp_path / "x")
    assert path.exists()
    assert listing(tmp_path) == ["x"]


def test_nor_are_those_that_stand_in_a_bundle(tmp_path: Path) -> None:
    path = publish_sample(tmp_path / "x", module=b"old")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        publish_sample(path)
    assert module_of(path) == b"old"
    assert (path / "notes.txt").read_text() == "mine"


def test_nor_are_those_that_come_while_it_is_built(tmp_path: Path) -> None:
    path = publish_sample(tmp_path / "x", module=b"old")
    with pytest.raises(UsageError, match="late"), publish(path) as staging:  # noqa: PT012
        fill(staging, module=b"new")
        (path / "late").write_text("mine")
    assert (path / "late").exists()


def test_a_manifest_cannot_claim_files_outside(tmp_path: Path) -> None:
    """A hand-made manifest must not make a user's files look like ours."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "manifest.json").write_text(
        '{"schema_version": 1, "files": {"../precious": {}, "own": {}}}'
    )
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(UsageError, match="never deleted"):
        publish_sample(tmp_path / "x")
    assert (tmp_path / "precious").exists()


def test_a_bundle_of_a_later_schema_may_be_replaced(tmp_path: Path) -> None:
    path = publish_sample(tmp_path / "x")
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"schema_version": 2', '"schema_version": 9'))
    publish_sample(path, module=b"new")
    assert module_of(path) == b"new"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError):
        publish_sample(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_told_with_both_numbers(tmp_path: Path) -> None:
    """F06: before anything is written, and while it is."""
    path = publish_sample(tmp_path / "x", module=b"old")
    with (
        pytest.raises(CapacityError, match=rf"needs {1 << 60} bytes and \d+ are free"),
        publish(path, needed_bytes=1 << 60),
    ):
        pytest.fail("the block must not run")
    with (  # noqa: PT012
        pytest.raises(CapacityError, match=r"needs more than \d+ bytes, and \d+ were free"),
        publish(path) as staging,
    ):
        (staging.path / "model.irpa").write_bytes(b"12345")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert module_of(path) == b"old"
    assert listing(tmp_path) == ["x"]


def test_what_dead_publishers_left_is_removed(tmp_path: Path) -> None:
    for name in (".x.partial-0123", ".x.old-4567", ".x.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.irpa").write_text("half")
    (tmp_path / ".x.lock").write_text("pid 1 on elsewhere")
    publish_sample(tmp_path / "x")
    publish_sample(tmp_path / "x")
    assert listing(tmp_path) == [".x.partial", "x"], "only names of our own form"


def test_a_bundle_set_aside_by_a_dead_publisher_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames of a swap without exchange, and the next build fails."""
    path = publish_sample(tmp_path / "x", module=b"old")
    path.rename(tmp_path / ".x.old-89ab")
    with pytest.raises(ZeroDivisionError), publish(path):
        raise ZeroDivisionError
    assert module_of(path) == b"old"


def test_neighbours_with_like_names_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / ".[x].partial-1"
    other.mkdir()
    (tmp_path / ".x.partial-1").mkdir()
    publish_sample(tmp_path / "[x]")
    assert listing(tmp_path) == [".x.partial-1", "[x]"]


def test_the_second_publisher_is_told_who_the_first_is(tmp_path: Path) -> None:
    told: list[str] = []
    waiting = threading.Event()

    def note(message: str) -> None:
        told.append(message)
        waiting.set()

    def second() -> None:
        with publish(tmp_path / "x", on_wait=note) as staging:
            fill(staging, module=b"second")

    with publish(tmp_path / "x") as staging:
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        fill(staging, module=b"first")
    thread.join(10)
    assert len(told) == 1
    assert f"waiting for pid {os.getpid()} on " in told[0]
    assert module_of(tmp_path / "x") == b"second"
    assert listing(tmp_path) == ["x"]


class TestInPlace:
    """The target is a mount point: nothing can be renamed over it."""

    @pytest.fixture(autouse=True)
    def _mount(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_is_confined", lambda target: target == tmp_path / "x")
        (tmp_path / "x" / "lost+found").mkdir(parents=True)

    def test_replaced_file_by_file(self, tmp_path: Path) -> None:
        path = publish_sample(tmp_path / "x", tp=3, module=b"old")
        assert module_of(path) == b"old"
        publish_sample(path, tp=1, module=b"new")
        assert module_of(path) == b"new"
        assert listing(path) == ["lost+found", "manifest.json", "model.irpa", "model.vmfb"]
        assert listing(tmp_path) == ["x"]

    def test_files_of_a_user_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x" / "notes.txt").write_text("mine")
        with pytest.raises(UsageError, match=r"notes\.txt"):
            publish_sample(tmp_path / "x")
        assert (tmp_path / "x" / "notes.txt").exists()

    @pytest.mark.parametrize("calls", range(14))
    def test_an_interruption_anywhere_is_recovered(
        self, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first `calls` removals and renames work, then the publisher is interrupted."""
        path = publish_sample(tmp_path / "x", module=b"old")
        left = calls

        def limited(original: Any) -> Any:
            def call(self: Path, *args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if not self.name.endswith(".lock"):
                    if left == 0:
                        raise KeyboardInterrupt
                    left -= 1
                return original(self, *args, **kwargs)

            return call

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("rename", "unlink"):
                patch.setattr(Path, name, limited(getattr(Path, name)))
            publish_sample(path, module=b"new")
        if (path / "manifest.json").exists():
            assert module_of(path) == (b"old" if calls < 7 else b"new")
        else:
            assert left == 0
        publish_sample(path, module=b"next")
        assert module_of(path) == b"next"
        assert not [name for name in listing(path) if name.startswith(".shark")]
