"""From `--hf-model` to local files, in two steps: everything small first, the weights when wanted.

    location = parse_model(model, revision=...)
    metadata = fetch_metadata(location, settings=...)   small files; sizes of weights
    ... refuse what config and sizes already tell ...
    resolved = fetch_weights(metadata, settings=..., progress=...)
    checkpoint = open_checkpoint(resolved.path)

When the network is asked:

    local path                                        never
    commit given and everything of it cached          never (a commit cannot change)
    offline (HF_HUB_OFFLINE or the setting)           never: cached and complete, or refused
    hub unreachable or out of order                   asked, then as offline, with a note
    hub refuses (gated, private, token, revision)     asked, and refused
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shark_llm.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME
from shark_llm.errors import CheckpointError, HubError, UsageError
from shark_llm.hub.cache import (
    SMALL_FILES,
    RepoCache,
    read_config,
    read_config_file,
    refuse_lfs_pointer,
    weight_names,
)
from shark_llm.hub.client import HubClient, RemoteFile, UnreachableError
from shark_llm.hub.download import (
    LFS_POINTER_MAX_BYTES,
    ProgressCallback,
    fetch_files,
    is_cached,
)
from shark_llm.hub.listing import gguf_files, refuse_unreadable
from shark_llm.hub.location import COMMIT, HubModel, LocalModel, ModelLocation, parse_model
from shark_llm.hub.settings import HubSettings

DEFAULT_REVISION = "main"


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file that holds weights."""

    name: str
    num_bytes: int
    is_local: bool
    """It is there already."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What is known of a model before its weights are fetched."""

    path: Path
    """What `open_checkpoint` takes, once the weights are there; a JSON file has none."""
    name: str
    revision: str | None
    """The commit; None for local files that tell of none."""
    config: Mapping[str, Any] | None
    """config.json; None for a GGUF file, which holds its own."""
    weight_files: tuple[WeightFile, ...]
    notes: tuple[str, ...]
    """What a user should know though it is no error, one line each."""
    location: ModelLocation
    remote_files: tuple[RemoteFile, ...] = ()
    """The weight files as the hub lists them; empty when nothing is to be fetched."""

    @property
    def total_bytes(self) -> int:
        return sum(file.num_bytes for file in self.weight_files)

    @property
    def missing_bytes(self) -> int:
        """Bytes that `fetch_weights` will fetch; less when an earlier run left a part of a file."""
        return sum(file.num_bytes for file in self.weight_files if not file.is_local)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A model whose files are all on this disk."""

    path: Path
    name: str
    revision: str | None
    notes: tuple[str, ...]


def resolve_checkpoint(
    model: str, *, settings: HubSettings, progress: ProgressCallback | None = None
) -> Resolved:
    """All steps in one, for callers with nothing to check between them. Raises as they do."""
    location = parse_model(model, revision=settings.revision)
    metadata = fetch_metadata(location, settings=settings)
    return fetch_weights(metadata, settings=settings, progress=progress)


def fetch_metadata(location: ModelLocation, *, settings: HubSettings) -> Metadata:
    """Everything but the weights: small files fetched, weight files listed with their sizes.

    Raises HubError when the hub refuses, or does not answer while the cache is incomplete;
    CheckpointError for a repository without weights that we read, or with a damaged config.
    """
    if isinstance(location, LocalModel):
        return _local_metadata(location)
    cache = RepoCache(settings.cache_root, location.repo_id)
    if settings.force_download and settings.is_offline:
        raise UsageError(
            f"--ensure-download fetches {location.name} again, and HF_HUB_OFFLINE forbids it: leave"
            " one of them out"
        )
    if settings.is_offline:
        return _cached_metadata(location, cache, why="offline")
    if _is_all_cached(location, cache) and not settings.force_download:
        return _cached_metadata(location, cache, why=None)
    client = HubClient(location.repo_id, settings)
    try:
        commit, listing = client.list_files(location.revision)
        return _remote_metadata(location, cache, client, commit, listing, settings)
    except UnreachableError as error:
        if settings.force_download:
            raise
        return _cached_metadata(location, cache, why=str(error))


def fetch_weights(
    metadata: Metadata, *, settings: HubSettings, progress: ProgressCallback | None = None
) -> Resolved:
    """Fetch the weight files that are missing. Raises HubError; CapacityError for a full disk."""
    location, commit = metadata.location, metadata.revision
    if metadata.remote_files:
        assert isinstance(location, HubModel), metadata
        assert commit is not None, metadata
        cache = RepoCache(settings.cache_root, location.repo_id)
        if metadata.missing_bytes:
            client = HubClient(location.repo_id, settings)
            fetch_files(
                client,
                cache,
                commit,
                metadata.remote_files,
                parallel_files=settings.parallel_files,
                force=settings.force_download,
                progress=progress,
            )
        cache.write_ref(location.revision or DEFAULT_REVISION, commit)
    return Resolved(path=metadata.path, name=metadata.name, revision=commit, notes=metadata.notes)


def _local_metadata(location: LocalModel) -> Metadata:
    """A local path as it stands; what is wrong with it is for `open_checkpoint` to say."""
    path = location.path.absolute()
    if path.is_file() and path.suffix == ".json":  # the shapes of a model, without weights
        files, config = [], read_config_file(path)
        if path.name == "config.json":
            name, revision = _snapshot_identity(path.parent.resolve())
        else:
            name, revision = path.stem, None
    elif path.is_file():
        files, config = [path], None
        name, revision = path.resolve().stem, None
    else:
        files = [path / name for name in weight_names(path) if (path / name).is_file()]
        config = read_config(path)
        name, revision = _snapshot_identity(path.resolve())
    return Metadata(
        path=path,
        name=name,
        revision=revision,
        config=config,
        weight_files=tuple(
            WeightFile(name=file.name, num_bytes=file.stat().st_size, is_local=True)
            for file in files
        ),
        notes=location.notes,
        location=location,
    )


def _snapshot_identity(directory: Path) -> tuple[str, str | None]:
    """Name and commit of a local directory: a snapshot of the hub's cache tells both."""
    folder = directory.parent.parent.name
    if (
        COMMIT.fullmatch(directory.name)
        and directory.parent.name == "snapshots"
        and folder.startswith("models--")
    ):
        return folder.removeprefix("models--").replace("--", "/"), directory.name
    return directory.name, None


def _is_all_cached(location: HubModel, cache: RepoCache) -> bool:
    """Whether the hub could tell nothing new: a commit of which all that we read is cached."""
    commit = location.revision
    return (
        commit is not None
        and COMMIT.fullmatch(commit) is not None
        and not cache.missing_files(commit, location.gguf_file)
        and (location.gguf_file is not None or not cache.unknown_small_files(commit))
    )


def _cached_metadata(location: HubModel, cache: RepoCache, *, why: str | None) -> Metadata:
    """A complete snapshot, or HubError saying why the hub was not asked and what is missing."""
    revision = location.revision or DEFAULT_REVISION
    commit = cache.read_ref(revision)
    if commit is None:
        raise HubError(
            f"{location.name}: {why}; the cache at {cache.path} does not know revision"
            f" {revision}: {_cached_commits(location, cache)}"
        )
    missing = cache.missing_files(commit, location.gguf_file)
    if missing:
        raise HubError(
            f"{location.name}: {why}; the cache at {cache.path} is incomplete: of commit {commit}"
            f" {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing;"
            " run the command again with a network to complete it"
        )
    snapshot = cache.snapshot(commit)
    notes = [] if why is None else [f"{location.name}: {why}: cached commit {commit} is used"]
    if location.gguf_file is not None:
        names, path, config = [location.gguf_file], snapshot / location.gguf_file, None
    else:
        names, path, config = weight_names(snapshot), snapshot, read_config(snapshot)
        unknown = [name for name in cache.unknown_small_files(commit) if "tokenizer" in name]
        if unknown:
            notes.append(
                f"{snapshot}: without {', '.join(unknown)}, which the hub may have: fetch the model"
                " with a network once to be sure"
            )
    for name in names:
        if (snapshot / name).stat().st_size <= LFS_POINTER_MAX_BYTES:
            refuse_lfs_pointer(snapshot / name, name)
    return Metadata(
        path=path,
        name=location.name,
        revision=commit,
        config=config,
        weight_files=tuple(
            WeightFile(name=name, num_bytes=(snapshot / name).stat().st_size, is_local=True)
            for name in names
        ),
        notes=tuple(notes),
        location=location,
    )


def _cached_commits(location: HubModel, cache: RepoCache) -> str:
    """Which commits there are, and what the user can do with them."""
    commits = cache.commits()
    if not commits:
        return "it holds nothing of this model; run the command once with a network"
    states = []
    for commit in commits:
        missing = cache.missing_files(commit, location.gguf_file)
        states.append(f"{commit} (incomplete: {', '.join(missing)})" if missing else commit)
    return f"it holds {', '.join(states)}; name a complete one with --revision"


def _remote_metadata(
    location: HubModel,
    cache: RepoCache,
    client: HubClient,
    commit: str,
    listing: Mapping[str, RemoteFile],
    settings: HubSettings,
) -> Metadata:
    snapshot = cache.snapshot(commit)
    if location.gguf_file is not None:
        names, path, config = [location.gguf_file], snapshot / location.gguf_file, None
        if location.gguf_file not in listing:
            raise CheckpointError(
                f"{location.name}: no such file there; {gguf_files(location.repo_id, listing)}"
            )
    else:
        refuse_unreadable(location.repo_id, listing)
        names, path, config = _fetch_small_files(cache, client, commit, listing, settings)
    files = [client.complete(listing[name], commit) for name in names]
    return Metadata(
        path=path,
        name=location.name,
        revision=commit,
        config=config,
        weight_files=tuple(
            WeightFile(
                name=file.name,
                num_bytes=file.num_bytes or 0,
                is_local=is_cached(cache, commit, file) and not settings.force_download,
            )
            for file in files
        ),
        notes=(),
        location=location,
        remote_files=tuple(files),
    )


def _fetch_small_files(
    cache: RepoCache,
    client: HubClient,
    commit: str,
    listing: Mapping[str, RemoteFile],
    settings: HubSettings,
) -> tuple[list[str], Path, Mapping[str, Any] | None]:
    """Fetch config, tokenizer and index; returns the names of the weight files, path and config."""
    snapshot = cache.snapshot(commit)
    wanted = [name for name in (*SMALL_FILES, INDEX_NAME) if name in listing]
    fetch_files(
        client,
        cache,
        commit,
        [client.complete(listing[name], commit) for name in wanted],
        parallel_files=settings.parallel_files,
        force=settings.force_download,
    )
    for name in SMALL_FILES:
        if name not in listing:
            cache.mark_absent(commit, name)
    names = weight_names(snapshot) if INDEX_NAME in listing else [SINGLE_NAME]
    absent = [name for name in names if name not in listing]
    if absent:
        raise CheckpointError(
            f"{client.repo_id}: {INDEX_NAME} names {len(absent)} files that the repository lacks:"
            f" {', '.join(absent)}; tell its authors, or use another revision"
        )
    return names, snapshot, read_config(snapshot)
