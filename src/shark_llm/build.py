"""From a checkpoint to a published bundle: the visible list of stages.

    resolve   name -> files, those of the hub but for the weights       hub, checkpoint
    plan      config -> target, tensor parallel plan, sizes             build_plan
    fetch     weights that are still on the hub                         hub
    compare   checkpoint's digest, what is there of it already          reuse
    shard     checkpoint -> model.irpa, model.rank{r}.irpa              sharding.apply
    export    config + plan -> model.mlir                               export
    compile   model.mlir -> model.vmfb                                  compile.compiler
    dump      the compiler's phases, where they are asked for           compile.compiler
    verify    compiled module == eager model, where it can run          golden_run
    publish   manifest, digests, atomic rename                          artifacts.publish
    keep      links to the archives and the module                      artifacts.stage_cache

Nothing of the old bundle is touched before `publish`. What an older bundle in the same place or the
stage cache has already is linked instead of made again.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from shark_llm.artifacts.bundle import Bundle
from shark_llm.artifacts.manifest import Manifest
from shark_llm.artifacts.publish import publish
from shark_llm.artifacts.stage_cache import StageCache
from shark_llm.build_plan import (
    BuildPlan,
    BuildSettings,
    build_versions,
    check_settings,
    expected_manifest,
    make_plan,
    open_local,
    resolve,
)
from shark_llm.build_work import BuildWork, no_golden
from shark_llm.checkpoint.known_digests import compute_digest, known_digest
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.compile.dev_artifacts import write_dev_artifacts
from shark_llm.compile.dev_directory import describes, dev_staging, write_report
from shark_llm.errors import CapacityError
from shark_llm.hub import LocalModel, Metadata, fetch_weights
from shark_llm.reuse import Reuse, find_reuse, is_all, keep_parts, manifest_digest, open_old
from shark_llm.stages import Reporter, StageClock, StageRecord

__all__ = ["BuildPlan", "BuildResult", "BuildSettings", "DryRun", "build", "plan_build"]

_UNKNOWN_DIGEST = "0" * 64  # of weights that are still on the hub


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A published bundle and what was done for it."""

    path: Path
    manifest: Manifest
    stages: tuple[StageRecord, ...]
    reused: bool
    """The bundle was there already, and is exactly what was asked for."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a build would do."""

    plan: BuildPlan
    reuse: Reuse
    dev_is_there: bool
    """No dev artifacts are asked for, or those that are there are the bundle's."""
    why_no_golden: str | None
    """None: the golden check would run."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of disk for the bundle."""
        return _needed_bytes(self.plan, self.reuse)


def plan_build(settings: BuildSettings, reporter: Reporter) -> DryRun:
    """The stages up to compare, fetching no weights: everything that can be refused is refused."""
    clock = StageClock(reporter)
    cache = settings.open_cache(reporter.note)
    plan, _ = _plan(settings, clock, may_fetch=False)
    reuse, expected = Reuse(), expected_manifest(plan, _UNKNOWN_DIGEST)
    if plan.checkpoint is not None and _something_is_there(plan, cache):
        expected, reuse = _Comparison(plan, cache, clock).run()
    return DryRun(
        plan=plan,
        reuse=reuse,
        dev_is_there=_dev_is_there(plan),
        why_no_golden="--no-verify" if not settings.verify else no_golden(plan, expected),
        free_bytes=_disk(plan.out_dir)[1],
    )


def build(settings: BuildSettings, reporter: Reporter) -> BuildResult:
    """Run all stages and publish the bundle at `settings.out_dir`.

    Raises a SharkError of the stage that fails; the old bundle and its dev artifacts stay as they
    were. Another build of the same directory is waited for.
    """
    clock = StageClock(reporter)
    cache = settings.open_cache(reporter.note)
    plan, metadata = _plan(settings, clock, may_fetch=True)
    comparison = _Comparison(plan, cache, clock)
    needed = plan.needed_bytes
    if plan.checkpoint is not None and _something_is_there(plan, cache):
        # Before the lock is taken: an identical run needs neither it nor a writable place, and
        # what can be linked needs no room.
        _, reuse = comparison.run()
        if reuse.old is not None and reuse.everything and _dev_is_there(plan):
            return _reused(plan, reuse.old, clock)
        needed = _needed_bytes(plan, reuse)
    _check_fetch_fits(plan, needed)
    with publish(plan.out_dir, needed_bytes=needed, on_wait=reporter.note) as staging:
        if plan.checkpoint is None:
            plan = _plan_fetched(settings, plan, _fetch(settings, metadata, clock))
            comparison = _Comparison(plan, cache, clock)
        expected, reuse = comparison.run()  # again: who was waited for may have published just this
        if reuse.old is not None and reuse.everything and _dev_is_there(plan):
            return _reused(plan, reuse.old, clock)
        with dev_staging(plan.dev_dir) as dev:
            manifest = BuildWork(plan, expected, reuse, staging, dev, clock).run()
            keep_parts(cache, manifest, staging.path, replace=settings.forced.any)
            if dev is not None and plan.dev_dir is not None:
                write_dev_artifacts(
                    dev, dev_dir=plan.dev_dir, bundle_dir=plan.out_dir, manifest=manifest
                )
                write_report(dev, _report(plan, manifest, manifest_digest(staging.path), clock))
    return BuildResult(
        path=plan.out_dir, manifest=manifest, stages=tuple(clock.records), reused=False
    )


class _Comparison:
    """Compares what is asked for with what is there, reading each only once."""

    def __init__(self, plan: BuildPlan, cache: StageCache, clock: StageClock) -> None:
        self._plan, self._cache, self._clock = plan, cache, clock
        self._digest: str | None = None
        self._seen: str | None = None
        self._result: tuple[Manifest, Reuse] | None = None

    def run(self) -> tuple[Manifest, Reuse]:
        """The expected manifest and what can be reused; the last result if nothing has changed."""
        plan, reporter = self._plan, self._clock.reporter
        assert plan.checkpoint is not None
        seen = manifest_digest(plan.out_dir)
        if self._result is not None and seen == self._seen:
            return self._result
        with self._clock.stage("compare", f"with what {plan.out_dir} holds") as stage:
            checked: Literal["sizes", "digests"] = (
                "sizes" if plan.settings.quick_check else "digests"
            )
            old = self._open_old(checked)
            if self._digest is None:
                self._digest = self._digest_of(old)
            expected = expected_manifest(plan, self._digest)
            golden = plan.settings.verify and no_golden(plan, expected) is None
            forced, aux_files = plan.settings.forced, plan.checkpoint.aux_files
            whole = is_all(old, expected, aux_files, golden, forced)
            if old is not None and checked == "sizes" and not whole:
                old = self._open_old("digests")  # of which parts may be taken
            reuse = find_reuse(
                old,
                expected,
                aux_files,
                golden=golden,
                force=forced,
                cache=self._cache,
                progress=reporter.progress,
            )
            stage.note = str(reuse)
        self._seen, self._result = seen, (expected, reuse)
        return self._result

    def _open_old(self, verify: Literal["sizes", "digests"]) -> Bundle | None:
        reporter = self._clock.reporter
        return open_old(
            self._plan.out_dir, reporter.note, verify=verify, progress=reporter.progress
        )

    def _digest_of(self, old: Bundle | None) -> str:
        """The checkpoint's digest; not computed again for a commit, which cannot change."""
        plan, cache = self._plan, self._cache
        assert plan.checkpoint is not None
        if plan.from_hub and not plan.settings.hub.force_download:
            if old is not None:
                source = old.manifest.source
                same_weights = old.manifest.weights == plan.settings.weights
                if same_weights and (source.name, source.revision) == (plan.name, plan.revision):
                    return source.digest
            if plan.revision is not None:
                known = cache.source_digest(plan.name, plan.revision, plan.settings.weights)
                if known is not None:
                    return known
        if plan.settings.quick_check and cache.reads and not plan.from_hub:
            known = known_digest(cache.sources, plan.checkpoint)
            if known is not None:
                return known
        kept = cache.sources if cache.writes and not plan.from_hub else None
        return compute_digest(kept, plan.checkpoint, self._clock.reporter.progress)


def _plan(
    settings: BuildSettings, clock: StageClock, *, may_fetch: bool
) -> tuple[BuildPlan, Metadata]:
    """The stages resolve and plan."""
    target = check_settings(settings)
    with clock.stage("resolve", settings.model):
        metadata = resolve(settings)
        checkpoint = open_local(settings, metadata)
        for note in (*metadata.notes, *(checkpoint.notes if checkpoint else ())):
            clock.reporter.note(note)
        hub = {
            "--hf-cache-dir": settings.hub.cache_dir is not None,
            "--ensure-download": settings.hub.force_download,
        }
        for flag in (flag for flag, given in hub.items() if given):
            if isinstance(metadata.location, LocalModel):
                clock.reporter.note(f"{settings.model} is a local path: {flag} has no effect")
    if checkpoint is None and metadata.config is None and may_fetch:
        # A GGUF file holds its config itself: there is nothing to plan with before it is here.
        metadata = _fetch(settings, metadata, clock)
        checkpoint = open_local(settings, metadata)
    with clock.stage("plan", f"{target.name}, tp {settings.tp}"):
        plan = make_plan(settings, metadata, checkpoint, target)
    for note in plan.notes:
        clock.reporter.note(note)
    return plan, metadata


def _fetch(settings: BuildSettings, metadata: Metadata, clock: StageClock) -> Metadata:
    """Fetch the weights; returns the metadata of a model that is wholly here."""
    megabytes = metadata.missing_bytes / 1e6
    with clock.stage("fetch", f"{metadata.name}, {megabytes:.0f} MB"):
        fetch_weights(metadata, settings=settings.hub, progress=clock.reporter.progress)
        return replace(
            metadata, weight_files=tuple(replace(f, is_local=True) for f in metadata.weight_files)
        )


def _plan_fetched(settings: BuildSettings, plan: BuildPlan, metadata: Metadata) -> BuildPlan:
    """Plan again with what the weights say themselves."""
    return make_plan(settings, metadata, open_checkpoint(metadata.path), plan.target)


def _something_is_there(plan: BuildPlan, cache: StageCache) -> bool:
    return manifest_digest(plan.out_dir) is not None or cache.has_entries()


def _reused(plan: BuildPlan, old: Bundle, clock: StageClock) -> BuildResult:
    clock.reporter.note(f"{plan.out_dir} is what was asked for already: nothing to do")
    return BuildResult(
        path=plan.out_dir, manifest=old.manifest, stages=tuple(clock.records), reused=True
    )


def _dev_is_there(plan: BuildPlan) -> bool:
    """Whether the dev artifacts asked for are those of the bundle that is there."""
    if plan.dev_dir is None:
        return True
    digest = manifest_digest(plan.out_dir)
    intermediates = plan.settings.save_intermediates
    return digest is not None and describes(plan.dev_dir, digest, intermediates=intermediates)


def _needed_bytes(plan: BuildPlan, reuse: Reuse) -> int:
    """Links take no room, and archives of another file system are copied."""
    part = reuse.archives
    linked = part is not None and _disk(part.path)[0] == _disk(plan.out_dir)[0]
    return plan.needed_bytes - (sum(plan.file_bytes.values()) if linked else 0)


def _check_fetch_fits(plan: BuildPlan, needed: int) -> None:
    """Before the first weight byte: download and bundle may share a disk, and must fit together."""
    if not plan.fetch_bytes:
        return
    cache = plan.settings.hub.cache_root
    (cache_device, free), (out_device, _) = _disk(cache), _disk(plan.out_dir)
    both = plan.fetch_bytes + needed
    if cache_device == out_device and both > free:
        raise CapacityError(
            f"fetching {plan.name} takes {plan.fetch_bytes} bytes in {cache} and its bundle "
            f"{needed} in {plan.out_dir}; the disk of both has {free} free: make room, or put one "
            "of them on another disk (--hf-cache-dir, --output-artifacts-dir)"
        )


def _disk(path: Path) -> tuple[int, int]:
    """Device number and free bytes of the file system that `path` is, or will be, on."""
    while not path.exists():
        path = path.parent
    return os.stat(path).st_dev, shutil.disk_usage(path).free


def _report(
    plan: BuildPlan, manifest: Manifest, digest: str | None, clock: StageClock
) -> dict[str, object]:
    """build-report.json but for its list of files. The hub's settings hold a token: left out."""
    settings = {
        key: list(value)
        if isinstance(value, tuple)
        else str(value)
        if isinstance(value, Path)
        else value
        for key, value in vars(plan.settings).items()
        if key != "hub"
    }
    return {
        "model": plan.name,
        "revision": plan.revision,
        "settings": settings,
        "bundle": str(plan.out_dir),
        "dev_dir": str(plan.dev_dir),
        "module_key": manifest.module_key,
        "manifest_sha256": digest,
        "intermediates": plan.settings.save_intermediates,
        "versions": build_versions(),
        "stages": [asdict(record) for record in clock.records],
    }
