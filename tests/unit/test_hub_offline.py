"""What a cache can do without the network, and what it lacks when it cannot."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopback_hub import Fault, LoopbackHub, read_files, serve_hub
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.errors import HubError
from shark_llm.hub import HubSettings, fetch_metadata, parse_model, resolve_checkpoint
from tiny import write_tiny

SETTINGS = HubSettings(retry_delays_s=(0.0,), timeout_s=2.0)
OFFLINE = HubSettings(offline=True)
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
COMMIT = "c0ffee" * 6 + "c0ff"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), shards=2)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf-home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, home: Path, tiny: Path) -> Iterator[LoopbackHub]:
    for hub in serve_hub(monkeypatch, home):
        hub.add_repo("org/tiny", read_files(tiny))
        yield hub


def cache_by_hand(home: Path, *, ref: str | None, without: tuple[str, ...] = ()) -> Path:
    """A snapshot as another tool may have left it: plain files, no blobs."""
    repo = home / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    write_tiny(snapshot, shards=2)
    for name in without:
        (snapshot / name).unlink()
    if ref is not None:
        (repo / "refs").mkdir()
        (repo / "refs" / ref).write_text(COMMIT)
    return snapshot


def test_pinned_commit_without_refs(hub: LoopbackHub, home: Path) -> None:
    """A23: a cache without refs/main serves its commit offline."""
    snapshot = cache_by_hand(home, ref=None)
    pinned = HubSettings(offline=True, revision=COMMIT)
    resolved = resolve_checkpoint("org/tiny", settings=pinned)
    assert (resolved.path, resolved.revision) == (snapshot, COMMIT)
    assert open_checkpoint(resolved.path).config.num_layers == 2
    assert hub.requests == []


def test_main_with_refs(hub: LoopbackHub, home: Path) -> None:
    """A23: main is looked up in refs, not as a folder; nothing but what is read is demanded."""
    snapshot = cache_by_hand(home, ref="main")
    for settings in (OFFLINE, HubSettings(offline=True, revision="main")):
        resolved = resolve_checkpoint("org/tiny", settings=settings)
        assert resolved.path == snapshot
        assert f"offline: cached commit {COMMIT} is used" in resolved.notes[0]


def test_main_without_refs_says_which_commit_is_there(hub: LoopbackHub, home: Path) -> None:
    """A23: refused, and the commit that could be used is named."""
    cache_by_hand(home, ref=None)
    with pytest.raises(HubError) as caught:
        resolve_checkpoint("org/tiny", settings=OFFLINE)
    assert f"does not know revision main: it holds {COMMIT}; name" in str(caught.value)
    assert "--revision" in str(caught.value)


def test_hf_hub_offline(hub: LoopbackHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_by_hand(home, ref="main")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert hub.requests == []


def test_nothing_cached(hub: LoopbackHub) -> None:
    with pytest.raises(HubError, match=r"offline; .* it holds nothing of this model; run"):
        resolve_checkpoint("org/tiny", settings=OFFLINE)


@pytest.mark.parametrize(
    "without",
    [(SHARDS[1],), tuple(SHARDS), ("config.json",), ("model.safetensors.index.json",)],
)
def test_incomplete_cache_lists_what_is_missing(
    hub: LoopbackHub, home: Path, without: tuple[str, ...]
) -> None:
    """A22: a half-empty snapshot is not returned as good."""
    cache_by_hand(home, ref="main", without=without)
    with pytest.raises(HubError, match=f"incomplete: of commit {COMMIT} {', '.join(without)}"):
        resolve_checkpoint("org/tiny", settings=OFFLINE)


def test_missing_tokenizer_is_a_note(hub: LoopbackHub, home: Path) -> None:
    cache_by_hand(home, ref="main", without=("tokenizer.json", "tokenizer_config.json"))
    notes = resolve_checkpoint("org/tiny", settings=OFFLINE).notes
    assert "without tokenizer.json, tokenizer_config.json, which the hub may have" in notes[1]


def test_dangling_link_counts_as_missing(hub: LoopbackHub, home: Path) -> None:
    resolved = resolve_checkpoint("org/tiny", settings=SETTINGS)
    (resolved.path / SHARDS[0]).resolve().unlink()
    with pytest.raises(HubError, match=f"{SHARDS[0]} is missing"):
        resolve_checkpoint("org/tiny", settings=OFFLINE)


def test_lfs_pointer_in_the_cache(hub: LoopbackHub, home: Path) -> None:
    snapshot = cache_by_hand(home, ref="main")
    (snapshot / SHARDS[0]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(HubError, match="is a Git LFS pointer"):
        resolve_checkpoint("org/tiny", settings=OFFLINE)


def test_stopped_download_and_a_hub_out_of_order(
    hub: LoopbackHub, home: Path, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A22: stopped after shard 1 of 2, then 503: refused as incomplete; then finished."""
    caplog.set_level(logging.CRITICAL)
    hub.fault(SHARDS[1], Fault(cut_after=100, times=1))
    hub.fault(SHARDS[1], Fault(cut_after=0))
    one_by_one = HubSettings(retry_delays_s=(0.0,), parallel_files=1)
    with pytest.raises(HubError, match="the download stopped at 100 of"):
        resolve_checkpoint("org/tiny", settings=one_by_one)
    hub.clear_faults()
    hub.fault("/api/models", Fault(status=503))
    with pytest.raises(HubError) as caught:
        resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert "HTTP 503" in str(caught.value)
    assert f"(incomplete: {SHARDS[1]})" in str(caught.value)
    hub.clear_faults()
    hub.requests.clear()
    resolved = resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert read_files(resolved.path) == read_files(tiny)
    assert hub.downloads() == [SHARDS[1]]


@pytest.mark.parametrize("down", [True, False])
def test_complete_cache_and_no_hub(hub: LoopbackHub, tiny: Path, down: bool) -> None:
    """Without a network, or with the hub out of order, a complete cache is used, and said so."""
    first = resolve_checkpoint("org/tiny", settings=SETTINGS)
    if down:
        hub.close()
    else:
        hub.fault("/api/models", Fault(status=500))
    again = resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert (again.path, again.revision) == (first.path, first.revision)
    assert ("no network" if down else "HTTP 500") in again.notes[0]
    assert f"cached commit {first.revision} is used" in again.notes[0]


def test_an_unfinished_new_commit_leaves_the_old_one_usable(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    """The ref moves only when all of the new commit is there."""
    old = resolve_checkpoint("org/tiny", settings=SETTINGS)
    hub.add_repo("org/tiny", read_files(write_tiny(tmp_path / "new", shards=2, seed=3)))
    fetch_metadata(parse_model("org/tiny"), settings=SETTINGS)  # and stopped before the weights
    assert resolve_checkpoint("org/tiny", settings=OFFLINE).revision == old.revision
    new = resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert resolve_checkpoint("org/tiny", settings=OFFLINE).revision == new.revision != old.revision


def test_a_read_only_cache_without_refs(
    hub: LoopbackHub, home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the hub tells cannot be noted in it, and need not be."""
    commit = fetch_metadata(parse_model("org/tiny"), settings=SETTINGS).revision
    assert commit is not None
    shutil.rmtree(home)
    snapshot = home / "hub/models--org--tiny/snapshots" / commit
    shutil.copytree(tiny, snapshot)

    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "refs")

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert resolve_checkpoint("org/tiny", settings=SETTINGS).path == snapshot
    assert not (snapshot.parents[1] / "refs").exists()


def test_a_complete_cache_is_not_written_to(hub: LoopbackHub, home: Path) -> None:
    """It may be mounted read-only: neither locks nor refs are touched."""
    resolve_checkpoint("org/tiny", settings=SETTINGS)
    before = {path: path.lstat().st_mtime_ns for path in home.rglob("*")}
    resolve_checkpoint("org/tiny", settings=SETTINGS)
    resolve_checkpoint("org/tiny", settings=OFFLINE)
    assert {path: path.lstat().st_mtime_ns for path in home.rglob("*")} == before
