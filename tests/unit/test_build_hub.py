"""Building from the hub: small files first, refusals before weights, the token nowhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from loopback_hub import GOOD_TOKEN, LoopbackHub, read_files, serve_hub
from shark_llm.build import build, plan_build
from shark_llm.errors import (
    CapacityError,
    ShardingError,
    SharkError,
    UnsupportedModelError,
    UnsupportedTargetError,
    UsageError,
)
from shark_llm.hub import HubSettings
from tiny_gguf import write_tiny_gguf


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    yield from serve_hub(monkeypatch, tmp_path / "hf")


def add_tiny(hub: LoopbackHub, root: Path, **config: object) -> str:
    """A repository org/tiny with a tiny model; returns its commit."""
    directory = tiny.write_tiny(root / "upstream", config=tiny.tiny_config(**config))
    commit = hub.add_repo("org/tiny", read_files(directory))
    shutil.rmtree(directory)
    return commit


def fetched_weights(hub: LoopbackHub) -> bool:
    return any(r.method == "GET" and r.path.endswith(".safetensors") for r in hub.requests) or any(
        r.method == "GET" and r.server == "cdn" for r in hub.requests
    )


def test_from_a_name_to_a_bundle(
    tmp_path: Path, hub: LoopbackHub, compile_side: FakeCompileSide
) -> None:
    commit = add_tiny(hub, tmp_path)
    wanted = settings("org/tiny", tmp_path / "bundle")
    dry = plan_build(wanted, ListReporter())
    assert dry.plan.fetch_bytes > 400_000
    assert not fetched_weights(hub)
    reporter = ListReporter()
    result = build(wanted, reporter)
    assert (result.manifest.source.name, result.manifest.source.revision) == ("org/tiny", commit)
    assert result.manifest.files["model.irpa"].size == dry.plan.file_bytes["model.irpa"]
    assert fetched_weights(hub)
    assert "fetch" in reporter.started
    assert build(wanted, ListReporter()).reused


def test_a_commit_needs_no_second_digest(
    tmp_path: Path,
    hub: LoopbackHub,
    compile_side: FakeCompileSide,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of a commit cannot change: for 100 GB that is minutes of reading."""
    add_tiny(hub, tmp_path)
    wanted = settings("org/tiny", tmp_path / "bundle")
    build(wanted, ListReporter())

    def read_again(self: object) -> str:
        raise AssertionError("the digest is known")

    monkeypatch.setattr("shark_llm.checkpoint.safetensors.SafetensorsCheckpoint.digest", read_again)
    assert build(wanted, ListReporter()).reused


@pytest.mark.parametrize(
    ("config", "changes", "error"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, {}, UnsupportedModelError),
        ({}, {"tp": 5}, ShardingError),
        ({}, {"target": "gfx1"}, UnsupportedTargetError),
    ],
)
def test_refused_before_weights_are_fetched(
    tmp_path: Path,
    hub: LoopbackHub,
    compile_side: FakeCompileSide,
    config: dict[str, object],
    changes: dict[str, object],
    error: type[SharkError],
) -> None:
    add_tiny(hub, tmp_path, **config)
    with pytest.raises(error):
        build(settings("org/tiny", tmp_path / "bundle", **changes), ListReporter())
    assert not fetched_weights(hub)
    assert not (tmp_path / "bundle").exists()


def test_a_foreign_output_is_refused_before_weights_are_fetched(
    tmp_path: Path, hub: LoopbackHub, compile_side: FakeCompileSide
) -> None:
    add_tiny(hub, tmp_path)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "mine").touch()
    with pytest.raises(SharkError, match="never deleted"):
        build(settings("org/tiny", tmp_path / "bundle"), ListReporter())
    assert not fetched_weights(hub)


def test_download_and_bundle_must_fit_one_disk_together(
    tmp_path: Path,
    hub: LoopbackHub,
    compile_side: FakeCompileSide,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_tiny(hub, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    bundle_alone = plan_build(settings("org/tiny", tmp_path / "b"), ListReporter()).needed_bytes
    free = bundle_alone + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    with pytest.raises(CapacityError, match=f"the disk of both has {free} free"):
        build(settings("org/tiny", tmp_path / "bundle"), ListReporter())
    assert not fetched_weights(hub)


def test_a_gguf_file_of_the_hub_is_fetched_before_it_is_planned(
    tmp_path: Path, hub: LoopbackHub, compile_side: FakeCompileSide
) -> None:
    """It holds its config itself: a dry run says that it cannot know, a build goes on."""
    config = tiny.tiny_config()
    path = write_tiny_gguf(tmp_path / "m.gguf", config, tiny.tiny_weights(config), kind="Q8_0")
    commit = hub.add_repo("org/quants", {"m.gguf": path.read_bytes()})
    wanted = settings("org/quants:m.gguf", tmp_path / "bundle")
    with pytest.raises(UsageError, match="--dry-run can only plan what is in the cache"):
        plan_build(wanted, ListReporter())
    reporter = ListReporter()
    manifest = build(wanted, reporter).manifest
    assert reporter.started[:3] == ["resolve", "fetch", "plan"]
    assert (manifest.source.name, manifest.source.revision) == ("org/quants:m.gguf", commit)
    assert manifest.dtype == "bf16"  # of quantized weights f32 would only store noise
    assert plan_build(wanted, ListReporter()).reuse.everything


def test_the_token_is_nowhere(
    tmp_path: Path,
    hub: LoopbackHub,
    compile_side: FakeCompileSide,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in the settings' repr, a note, a report, a manifest or any other file of the build."""
    directory = tiny.write_tiny(tmp_path / "upstream")
    hub.add_repo("org/secret", read_files(directory), private=True)
    wanted = settings(
        "org/secret",
        tmp_path / "bundle",
        dev_dir=tmp_path / "dev",
        hub=HubSettings(token=GOOD_TOKEN, cache_dir=tmp_path / "cache"),
    )
    reporter = ListReporter()
    build(wanted, reporter)
    assert GOOD_TOKEN not in repr(wanted) + repr(reporter)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert GOOD_TOKEN.encode() not in path.read_bytes(), path


def test_another_target_of_a_commit_needs_no_second_digest(
    tmp_path: Path,
    hub: LoopbackHub,
    compile_side: FakeCompileSide,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading 800 GB to learn what the cache knows already would be no reuse."""
    add_tiny(hub, tmp_path)
    cache = {"cache_dir": tmp_path / "cache"}
    first = build(settings("org/tiny", tmp_path / "one", **cache), ListReporter())

    def digest(self: object, progress: object = None) -> str:
        raise AssertionError("the checkpoint is read again")

    monkeypatch.setattr("shark_llm.checkpoint.safetensors.SafetensorsCheckpoint.digest", digest)
    reporter = ListReporter()
    other = settings("org/tiny", tmp_path / "two", target="gfx942", **cache)
    second = build(other, reporter)
    assert reporter.stage_note("shard") == "reused from the cache"
    assert second.manifest.source == first.manifest.source


def test_ensure_download_fetches_again_and_then_finds_nothing_to_do(
    tmp_path: Path, hub: LoopbackHub, compile_side: FakeCompileSide
) -> None:
    add_tiny(hub, tmp_path)
    build(settings("org/tiny", tmp_path / "bundle"), ListReporter())
    hub.requests.clear()
    reporter = ListReporter()
    forced = settings("org/tiny", tmp_path / "bundle", hub=HubSettings(force_download=True))
    assert build(forced, reporter).reused
    assert "fetch" in reporter.started
    assert fetched_weights(hub)
