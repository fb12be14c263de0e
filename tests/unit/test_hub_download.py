"""Downloads that are cut, slow, damaged, killed or refused for a while."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopback_hub import Fault, LoopbackHub, read_files, serve_hub
from shark_llm.errors import CapacityError, HubError, UsageError
from shark_llm.hub import HubSettings, Metadata, fetch_metadata, fetch_weights, parse_model
from tiny import write_tiny

SETTINGS = HubSettings(retry_delays_s=(0.0, 0.0), timeout_s=5.0)
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


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


def metadata_of(settings: HubSettings = SETTINGS) -> Metadata:
    return fetch_metadata(parse_model("org/tiny"), settings=settings)


def ranges(hub: LoopbackHub, name: str) -> list[str]:
    """The ranges that the CDN was asked for, per request for `name`."""
    return [
        request.headers.get("range", "all")
        for request in hub.requests
        if request.server == "cdn" and request.path.endswith(name)
    ]


def partials(home: Path) -> list[Path]:
    return list((home / "hub").rglob("*.incomplete"))


def test_cut_connections_are_resumed_where_they_broke(hub: LoopbackHub, tiny: Path) -> None:
    hub.fault(SHARDS[0], Fault(cut_after=1000, times=3))
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    last = (tiny / SHARDS[0]).stat().st_size - 1
    assert ranges(hub, SHARDS[0]) == ["all"] + [
        f"bytes={start}-{last}" for start in (1000, 2000, 3000)
    ]
    assert read_files(resolved.path) == read_files(tiny)


def test_an_answer_without_length_that_ends_early_is_not_the_file(
    hub: LoopbackHub, tiny: Path
) -> None:
    hub.fault(SHARDS[0], Fault(cut_after=1000, chunked=True, times=1))
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    assert len(ranges(hub, SHARDS[0])) == 2
    assert read_files(resolved.path) == read_files(tiny)


def test_a_hub_that_ignores_ranges_makes_a_file_begin_again(hub: LoopbackHub, tiny: Path) -> None:
    hub.fault(SHARDS[0], Fault(cut_after=1000, times=1))
    hub.fault(SHARDS[0], Fault(ignore_range=True))
    seen: list[int] = []
    resolved = fetch_weights(
        metadata_of(), settings=SETTINGS, progress=lambda done, total: seen.append(total - done)
    )
    assert read_files(resolved.path) == read_files(tiny)
    assert seen[-1] == 0
    assert min(seen) == 0


def test_a_hub_that_ignores_ranges_and_always_breaks_is_given_up(hub: LoopbackHub) -> None:
    """Getting as far as before is no progress."""
    hub.fault(SHARDS[0], Fault(cut_after=1000, ignore_range=True))
    with pytest.raises(HubError, match="the download stopped at 1000 of"):
        fetch_weights(metadata_of(), settings=SETTINGS)
    assert len(ranges(hub, SHARDS[0])) == 4  # one that brings something, and three in vain


def test_large_files_come_in_parts(
    hub: LoopbackHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (tiny / SHARDS[0]).stat().st_size
    monkeypatch.setattr("shark_llm.hub.client.PART_BYTES", size // 2)
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    assert ranges(hub, SHARDS[0])[0] == f"bytes=0-{size // 2 - 1}"
    assert len(ranges(hub, SHARDS[0])) == (2 if size % 2 == 0 else 3)
    assert read_files(resolved.path) == read_files(tiny)


def test_a_stalled_connection_is_given_up_and_resumed(hub: LoopbackHub, tiny: Path) -> None:
    settings = HubSettings(retry_delays_s=(0.0,), timeout_s=0.3)
    hub.fault(SHARDS[1], Fault(stall_after=2000, times=1))
    resolved = fetch_weights(metadata_of(settings), settings=settings)
    assert ranges(hub, SHARDS[1])[1].startswith("bytes=2000-")
    assert read_files(resolved.path) == read_files(tiny)


def test_what_stays_cut_is_reported_and_continued_by_the_next_run(
    hub: LoopbackHub, tiny: Path, home: Path
) -> None:
    hub.fault(SHARDS[1], Fault(cut_after=700, times=1))
    hub.fault(SHARDS[1], Fault(cut_after=0))
    size = (tiny / SHARDS[1]).stat().st_size
    metadata = metadata_of()
    with pytest.raises(HubError, match=f"{SHARDS[1]}: the download stopped at 700 of {size} bytes"):
        fetch_weights(metadata, settings=SETTINGS)
    assert not (metadata.path / SHARDS[1]).exists()
    assert 700 in [path.stat().st_size for path in partials(home)]
    hub.clear_faults()
    hub.requests.clear()
    first: list[int] = []
    resolved = fetch_weights(
        metadata_of(), settings=SETTINGS, progress=lambda done, _: first.append(done)
    )
    assert ranges(hub, SHARDS[1]) == [f"bytes=700-{size - 1}"]
    assert first[0] >= 700
    assert read_files(resolved.path) == read_files(tiny)
    assert partials(home) == []


def test_busy_hub_is_asked_again(hub: LoopbackHub, tiny: Path) -> None:
    hub.fault("/api/models", Fault(status=429, times=1))
    hub.fault("/api/models", Fault(status=503, times=1))
    hub.fault("config.json", Fault(status=503, headers={"Retry-After": "0"}, times=1))
    hub.fault(SHARDS[0], Fault(status=429, times=2))
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    assert read_files(resolved.path) == read_files(tiny)


def test_a_wait_of_minutes_is_reported_instead(hub: LoopbackHub) -> None:
    hub.fault("/api/models", Fault(status=429, headers={"Retry-After": "300"}))
    with pytest.raises(HubError, match=r"asks for fewer requests \(HTTP 429\): try again in 300 s"):
        metadata_of()
    assert len(hub.requests) == 1


def test_damage_on_the_way_is_found_by_the_digest(hub: LoopbackHub, tiny: Path, home: Path) -> None:
    hub.fault(SHARDS[0], Fault(corrupt=True))
    metadata = metadata_of()
    sha256 = hashlib.sha256((tiny / SHARDS[0]).read_bytes()).hexdigest()
    with pytest.raises(
        HubError, match=f"{SHARDS[0]}: arrived with digest .* the hub says {sha256}"
    ):
        fetch_weights(metadata, settings=SETTINGS)
    assert not (metadata.path / SHARDS[0]).exists()
    assert not (home / "hub/models--org--tiny/blobs" / sha256).exists()
    hub.clear_faults()
    assert read_files(fetch_weights(metadata, settings=SETTINGS).path) == read_files(tiny)


def test_damage_in_a_small_file_is_found_too(hub: LoopbackHub) -> None:
    hub.fault("config.json", Fault(corrupt=True))
    with pytest.raises(HubError, match=r"config\.json: arrived with digest"):
        metadata_of()


def test_a_damaged_part_of_an_earlier_run_is_replaced(
    hub: LoopbackHub, tiny: Path, home: Path
) -> None:
    metadata = metadata_of()
    content = (tiny / SHARDS[0]).read_bytes()
    blobs = home / "hub/models--org--tiny/blobs"
    partial = blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete"
    for damaged in (bytes(5000), content + b"more", content[:-1] + b"\xff"):
        partial.write_bytes(damaged)
        resolved = fetch_weights(metadata, settings=SETTINGS)
        assert (resolved.path / SHARDS[0]).read_bytes() == content
        (resolved.path / SHARDS[0]).resolve().unlink()


def test_a_truncated_cached_file_is_fetched_again(hub: LoopbackHub, tiny: Path) -> None:
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    blob = (resolved.path / SHARDS[0]).resolve()
    os.truncate(blob, 1000)
    metadata = metadata_of()
    assert [file.is_local for file in metadata.weight_files] == [False, True]
    assert read_files(fetch_weights(metadata, settings=SETTINGS).path) == read_files(tiny)


def test_lfs_pointer_in_the_place_of_weights(hub: LoopbackHub, tiny: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    hub.add_repo("org/tiny", read_files(tiny) | {SHARDS[1]: pointer})
    with pytest.raises(HubError, match=f"is a Git LFS pointer of {len(pointer)} bytes"):
        fetch_weights(metadata_of(), settings=SETTINGS)


def test_files_come_in_parallel(hub: LoopbackHub, tiny: Path) -> None:
    """Both shards are under way at once: each waits for the other's request."""
    both = threading.Barrier(2, timeout=5)
    take_fault = hub.take_fault

    def wait_for_both(path: str) -> Fault | None:
        if path.endswith(tuple(SHARDS)):
            both.wait()
        return take_fault(path)

    hub.take_fault = wait_for_both  # type: ignore[method-assign]
    fetch_weights(metadata_of(), settings=SETTINGS)


def test_one_failure_stops_the_others_and_keeps_their_parts(
    hub: LoopbackHub, tiny: Path, home: Path
) -> None:
    settings = HubSettings(retry_delays_s=(30.0,), timeout_s=5.0)
    hub.fault(SHARDS[0], Fault(cut_after=0))  # would wait half a minute
    hub.fault(SHARDS[1], Fault(status=404))
    metadata = metadata_of(settings)
    start = time.monotonic()
    with pytest.raises(HubError, match=f"has no file {SHARDS[1]}"):
        fetch_weights(metadata, settings=settings)
    assert time.monotonic() - start < 5


def test_a_failing_progress_callback_stops_the_download(hub: LoopbackHub) -> None:
    hub.fault(SHARDS[0], Fault(stall_after=100))
    settings = HubSettings(retry_delays_s=(), timeout_s=0.5)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_weights(metadata_of(settings), settings=settings, progress=interrupt)


def test_kill_and_resume(hub: LoopbackHub, tiny: Path, home: Path) -> None:
    """A killed process leaves nothing that counts, and the next one goes on from its last byte."""
    hub.fault(SHARDS[1], Fault(stall_after=3000, times=1))
    program = (
        "from shark_llm.hub import *;"
        "resolve_checkpoint('org/tiny', settings=HubSettings(timeout_s=60.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=dict(os.environ))
    deadline = time.monotonic() + 60
    while 3000 not in [path.stat().st_size for path in partials(home)]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (home / "hub/models--org--tiny/refs/main").exists()
    hub.requests.clear()
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    last = (tiny / SHARDS[1]).stat().st_size - 1
    assert ranges(hub, SHARDS[1]) == [f"bytes=3000-{last}"]
    assert read_files(resolved.path) == read_files(tiny)


def test_another_process_fetches_the_same_file(hub: LoopbackHub, tiny: Path, home: Path) -> None:
    """Whoever holds the lock fetches; the other waits, and uses what came."""
    from filelock import FileLock

    metadata = metadata_of()
    content = (tiny / SHARDS[0]).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    lock = home / "hub/.locks/models--org--tiny" / f"{sha256}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=fetch_weights, args=(metadata,), kwargs={"settings": SETTINGS})
    with FileLock(lock):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        (home / "hub/models--org--tiny/blobs" / sha256).write_bytes(content)
    thread.join()
    assert ranges(hub, SHARDS[0]) == []
    assert read_files(metadata.path) == read_files(tiny)


def test_too_small_a_disk_is_refused_before_the_first_byte(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = metadata_of()

    def small(path: Any) -> Any:
        return shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", small)
    with pytest.raises(CapacityError, match=f"needs {metadata.total_bytes} more bytes"):
        fetch_weights(metadata, settings=SETTINGS)
    assert hub.paths("cdn") == []


def test_a_disk_that_fills_up_is_named(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = metadata_of()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        fetch_weights(metadata, settings=SETTINGS)


# --- --ensure-download ---------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_forced_files_are_fetched_though_they_are_cached(
    hub: LoopbackHub, home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """What a bad disk has done to a cached file no size shows; also where there are no links."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", not links)
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    damaged = (resolved.path / SHARDS[1]).resolve()
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert metadata_of().missing_bytes == 0
    forced = dataclasses.replace(SETTINGS, force_download=True)
    metadata = metadata_of(forced)
    assert metadata.missing_bytes == metadata.total_bytes
    hub.requests.clear()
    again = fetch_weights(metadata, settings=forced)
    assert [ranges(hub, name) for name in SHARDS] == [["all"], ["all"]]
    assert read_files(again.path) == read_files(tiny)


def test_a_forced_download_that_fails_leaves_what_was_there(hub: LoopbackHub, tiny: Path) -> None:
    resolved = fetch_weights(metadata_of(), settings=SETTINGS)
    forced = dataclasses.replace(SETTINGS, force_download=True)
    metadata = metadata_of(forced)
    hub.fault(SHARDS[0], Fault(cut_after=0))
    with pytest.raises(HubError, match="the download stopped at 0"):
        fetch_weights(metadata, settings=forced)
    assert read_files(resolved.path) == read_files(tiny)


def test_a_forced_download_needs_the_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Using the cache instead would be to ignore the flag."""
    fetch_weights(metadata_of(), settings=SETTINGS)
    forced = dataclasses.replace(SETTINGS, force_download=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="no network"):
        metadata_of(forced)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE forbids it"):
        metadata_of(forced)
