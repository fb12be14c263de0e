"""From a name to a whole snapshot, with the real client against a loopback hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopback_hub import GOOD_TOKEN, LoopbackHub, git_sha1, read_files, serve_hub
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.errors import CheckpointError, HubError
from shark_llm.hub import (
    HubSettings,
    Metadata,
    fetch_metadata,
    fetch_weights,
    parse_model,
    resolve_checkpoint,
)
from tiny import write_tiny

SETTINGS = HubSettings(retry_delays_s=(0.0, 0.0))
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    return write_tiny(directory, shards=2, generation_config={"eos_token_id": [2, 4]})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf-home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[LoopbackHub]:
    yield from serve_hub(monkeypatch, home)


def metadata_of(model: str, settings: HubSettings = SETTINGS) -> Metadata:
    return fetch_metadata(parse_model(model, revision=settings.revision), settings=settings)


def test_small_files_come_first_and_weights_when_wanted(
    hub: LoopbackHub, home: Path, tiny: Path
) -> None:
    commit = hub.add_repo("org/tiny", read_files(tiny))
    metadata = metadata_of("org/tiny")
    assert sorted(hub.downloads()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert hub.paths("cdn") == []
    assert metadata.config == json.loads((tiny / "config.json").read_text())
    assert (metadata.name, metadata.revision) == ("org/tiny", commit)
    assert [(f.name, f.num_bytes, f.is_local) for f in metadata.weight_files] == [
        (name, (tiny / name).stat().st_size, False) for name in SHARDS
    ]
    assert metadata.missing_bytes == metadata.total_bytes > 0

    resolved = fetch_weights(metadata, settings=SETTINGS)
    assert resolved.path == home / "hub/models--org--tiny/snapshots" / commit
    assert read_files(resolved.path) == read_files(tiny)
    assert open_checkpoint(resolved.path).digest() == open_checkpoint(tiny).digest()
    assert sorted(hub.downloads()[5:]) == SHARDS
    assert (home / "hub/models--org--tiny/refs/main").read_text() == commit
    assert list((home / "hub/models--org--tiny/blobs").glob("*.incomplete")) == []


def test_only_what_the_index_names_is_fetched(hub: LoopbackHub, tiny: Path, tmp_path: Path) -> None:
    """A14: consolidated and stray weights by the shards are neither downloaded nor read."""
    files = read_files(tiny)
    index = json.loads(files.pop("model.safetensors.index.json"))
    # Shards need not be called model-*.
    renamed = {SHARDS[0]: "first.safetensors", SHARDS[1]: "sub/second.safetensors"}
    index["weight_map"] = {name: renamed[file] for name, file in index["weight_map"].items()}
    files = {renamed.get(name, name): content for name, content in files.items()}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    stray = ["consolidated.safetensors", "adapter.safetensors", "model.safetensors"]
    stray += ["pytorch_model.bin", "README.md", "tokenizer.model", "original/params.json"]
    hub.add_repo("org/tiny", files | dict.fromkeys(stray, b"other values"))
    resolved = resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert read_files(resolved.path) == files
    assert not set(hub.downloads()) & set(stray)
    checkpoint = open_checkpoint(resolved.path)
    assert len(checkpoint.parameters) == len(open_checkpoint(tiny).parameters)


def test_unindexed_single_file(hub: LoopbackHub, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "single")
    hub.add_repo("org/single", read_files(directory))
    resolved = resolve_checkpoint("org/single", settings=SETTINGS)
    assert open_checkpoint(resolved.path).digest() == open_checkpoint(directory).digest()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "consolidated.safetensors"], "only consolidated.safetensors, in the orig"),
        (["config.json", "pytorch_model.bin"], "only pickled weights"),
        (["config.json", "README.md"], "has no weights"),
        (["model.safetensors"], "has no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter"),
        (["q4.gguf", "q8.gguf"], "name one of them: org/odd:q4.gguf, org/odd:q8.gguf"),
    ],
)
def test_what_cannot_be_read_is_refused_from_names_alone(
    hub: LoopbackHub, files: list[str], message: str
) -> None:
    """A14: nothing is downloaded of a repository that has only the original layout."""
    hub.add_repo("org/odd", dict.fromkeys(files, b"{}"))
    with pytest.raises(CheckpointError, match=message):
        metadata_of("org/odd")
    assert hub.downloads() == []


def test_index_that_names_absent_or_outside_files(hub: LoopbackHub, tiny: Path) -> None:
    files = read_files(tiny)
    del files[SHARDS[1]]
    hub.add_repo("org/absent", files)
    with pytest.raises(CheckpointError, match=f"1 files that the repository lacks: {SHARDS[1]}"):
        metadata_of("org/absent")
    index = {"weight_map": {"a": "../../../etc/passwd"}}
    hub.add_repo("org/evil", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match="names files outside its directory"):
        metadata_of("org/evil")
    assert hub.paths("cdn") == []


def test_all_files_are_of_one_commit(hub: LoopbackHub, tiny: Path, tmp_path: Path) -> None:
    """A push between the two steps does not mix its files with those of the commit before."""
    first = hub.add_repo("org/tiny", read_files(tiny))
    metadata = metadata_of("org/tiny")
    other = write_tiny(tmp_path / "other", shards=2, seed=1)
    second = hub.add_repo("org/tiny", read_files(other))
    assert first != second
    resolved = fetch_weights(metadata, settings=SETTINGS)
    assert resolved.revision == first
    assert open_checkpoint(resolved.path).digest() == open_checkpoint(tiny).digest()
    again = resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert again.revision == second
    assert open_checkpoint(again.path).digest() == open_checkpoint(other).digest()


def test_revisions_by_branch_tag_and_url(hub: LoopbackHub, tiny: Path, home: Path) -> None:
    hub.add_repo("org/tiny", {"config.json": b"{}"})
    commit = hub.add_repo("org/tiny", read_files(tiny), revision="refs/pr/1")
    url = f"{hub.endpoint}/org/tiny/tree/refs%2Fpr%2F1"
    assert resolve_checkpoint(url, settings=SETTINGS).revision == commit
    assert (home / "hub/models--org--tiny/refs/refs/pr/1").read_text() == commit
    named = HubSettings(revision="refs/pr/1", retry_delays_s=())
    assert resolve_checkpoint("org/tiny", settings=named).revision == commit
    with pytest.raises(HubError, match="revision v9: no such branch, tag or commit"):
        metadata_of("org/tiny", HubSettings(revision="v9"))


def test_gguf_file_of_a_repository(hub: LoopbackHub) -> None:
    commit = hub.add_repo("org/gguf", {"q4.gguf": b"GGUF" * 500, "q8.gguf": b"GGUF" * 900})
    metadata = metadata_of("org/gguf:q4.gguf")
    assert (metadata.config, metadata.total_bytes, hub.downloads()) == (None, 2000, [])
    resolved = fetch_weights(metadata, settings=SETTINGS)
    assert (resolved.name, resolved.revision) == ("org/gguf:q4.gguf", commit)
    assert resolved.path.name == "q4.gguf"
    assert resolved.path.read_bytes() == b"GGUF" * 500
    assert hub.downloads() == ["q4.gguf"]
    with pytest.raises(CheckpointError, match=r"no such file there; .*org/gguf:q8.gguf"):
        metadata_of("org/gguf:q5.gguf")


def test_second_run_fetches_nothing(hub: LoopbackHub, tiny: Path) -> None:
    commit = hub.add_repo("org/tiny", read_files(tiny))
    first = resolve_checkpoint("org/tiny", settings=SETTINGS)
    hub.requests.clear()
    assert resolve_checkpoint("org/tiny", settings=SETTINGS) == first
    assert [request.path for request in hub.requests] == ["/api/models/org/tiny"]
    hub.requests.clear()
    # A commit cannot change, so that the hub is not even asked.
    pinned = HubSettings(revision=commit)
    assert resolve_checkpoint("org/tiny", settings=pinned) == first
    assert hub.requests == []


def test_the_token_goes_to_the_hub_and_not_to_its_cdn(
    hub: LoopbackHub, home: Path, tiny: Path
) -> None:
    hub.add_repo("org/secret", read_files(tiny), private=True)
    settings = HubSettings(token=GOOD_TOKEN, retry_delays_s=())
    resolve_checkpoint("org/secret", settings=settings)
    at_hub = [r.headers.get("authorization") for r in hub.requests if r.server == "hub"]
    at_cdn = [r.headers.get("authorization") for r in hub.requests if r.server == "cdn"]
    assert set(at_hub) == {f"Bearer {GOOD_TOKEN}"}
    assert at_cdn == [None, None]
    assert GOOD_TOKEN not in repr(settings)
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert kept
    assert not any(GOOD_TOKEN.encode() in path.read_bytes() for path in kept)


def test_cache_dir_and_progress(hub: LoopbackHub, tiny: Path, tmp_path: Path, home: Path) -> None:
    hub.add_repo("org/tiny", read_files(tiny))
    settings = HubSettings(cache_dir=tmp_path / "elsewhere", retry_delays_s=())
    seen: list[tuple[int, int]] = []
    metadata = metadata_of("org/tiny", settings)
    resolved = fetch_weights(
        metadata, settings=settings, progress=lambda done, total: seen.append((done, total))
    )
    assert resolved.path.is_relative_to(tmp_path / "elsewhere/models--org--tiny/snapshots")
    assert not (home / "hub").exists()
    assert seen[-1] == (metadata.total_bytes, metadata.total_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_mirror_whose_listing_has_no_sizes(
    monkeypatch: pytest.MonkeyPatch, home: Path, tiny: Path
) -> None:
    """Sizes and digests then come from the headers of each file."""
    for hub in serve_hub(monkeypatch, home, with_sizes=False):
        hub.add_repo("org/tiny", read_files(tiny))
        metadata = metadata_of("org/tiny")
        assert metadata.total_bytes == sum((tiny / name).stat().st_size for name in SHARDS)
        resolved = fetch_weights(metadata, settings=SETTINGS)
        assert read_files(resolved.path) == read_files(tiny)
        assert set(SHARDS) <= {path.split("/")[-1] for path in hub.paths("hub", "HEAD")}


def test_the_hubs_own_client_reads_our_cache_and_we_read_its(
    hub: LoopbackHub, tiny: Path, home: Path, tmp_path: Path
) -> None:
    """The loopback hub speaks the real protocol, and the cache has the real layout."""
    from huggingface_hub import snapshot_download

    commit = hub.add_repo("org/tiny", read_files(tiny))
    ours = resolve_checkpoint("org/tiny", settings=SETTINGS)
    assert snapshot_download(
        "org/tiny", cache_dir=home / "hub", local_files_only=True, endpoint=hub.endpoint
    ) == str(ours.path)

    theirs = tmp_path / "theirs"
    path = snapshot_download("org/tiny", cache_dir=theirs, endpoint=hub.endpoint)
    hub.requests.clear()
    offline = HubSettings(cache_dir=theirs, offline=True)
    resolved = resolve_checkpoint("org/tiny", settings=offline)
    assert (str(resolved.path), resolved.revision) == (path, commit)
    online = HubSettings(cache_dir=theirs)
    assert resolve_checkpoint("org/tiny", settings=online).path == resolved.path
    assert hub.downloads() == []


def test_blob_names_are_those_of_git_and_lfs(hub: LoopbackHub, tiny: Path, home: Path) -> None:
    hub.add_repo("org/tiny", read_files(tiny))
    resolved = resolve_checkpoint("org/tiny", settings=SETTINGS)
    link = resolved.path / "config.json"
    assert link.is_symlink()
    assert os.readlink(link) == f"../../blobs/{git_sha1((tiny / 'config.json').read_bytes())}"


def test_local_paths(tiny: Path, tmp_path: Path) -> None:
    metadata = metadata_of(str(tiny))
    assert (metadata.path, metadata.name, metadata.revision) == (tiny, tiny.name, None)
    assert metadata.config is not None
    assert metadata.missing_bytes == 0
    assert [file.name for file in metadata.weight_files] == SHARDS
    resolved = fetch_weights(metadata, settings=SETTINGS)
    assert open_checkpoint(resolved.path).config.num_layers == 2
    gguf = tmp_path / "q4.gguf"
    gguf.write_bytes(b"GGUF")
    metadata = metadata_of(str(gguf))
    assert (metadata.path, metadata.name, metadata.total_bytes) == (gguf, "q4", 4)


def test_local_snapshot_of_the_cache_tells_name_and_commit(tiny: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("ab" * 20)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(tiny)
    assert metadata_of(str(snapshot)).revision is None  # the link's own place says nothing
    snapshot.unlink()
    write_tiny(snapshot)
    metadata = metadata_of(str(snapshot))
    assert (metadata.name, metadata.revision) == ("org/tiny", "ab" * 20)


def test_local_paths_import_no_hub_client(tiny: Path) -> None:
    program = (
        "import sys; from shark_llm.hub import HubSettings, resolve_checkpoint;"
        f"resolve_checkpoint({str(tiny)!r}, settings=HubSettings());"
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
