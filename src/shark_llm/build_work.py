"""The stages that make a bundle: shard, export, compile, dump, verify and publish."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

from shark_llm.artifacts.bundle import Bundle, archive_identity
from shark_llm.artifacts.manifest import FileInfo, GoldenReport, Manifest
from shark_llm.artifacts.publish import Staging
from shark_llm.build_plan import BuildPlan
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.compile.compiler import run_compiler, shell_script
from shark_llm.compile.dev_artifacts import MLIR_NAME, SCRIPT_NAME
from shark_llm.golden import read_parameters
from shark_llm.golden_run import run_golden, why_not_here
from shark_llm.interrupts import signals_held_back
from shark_llm.reuse import Part, Reuse, check_linked, link_files, old_part
from shark_llm.sharding.apply import TORCH_DTYPES, write_archives
from shark_llm.sharding.archives import write_dummy_archives
from shark_llm.stages import StageClock


class BuildWork:
    """The stages from shard to publish, with what they share."""

    def __init__(
        self,
        plan: BuildPlan,
        expected: Manifest,
        reuse: Reuse,
        staging: Staging,
        dev: Path | None,
        clock: StageClock,
    ) -> None:
        self.plan, self.expected = plan, expected
        self.reuse, self.staging, self.dev, self.clock = reuse, staging, dev, clock
        assert plan.checkpoint is not None
        self.checkpoint: Checkpoint = plan.checkpoint
        self.linked: dict[str, FileInfo] = {}

    def run(self) -> Manifest:
        """All of them; returns the sealed manifest."""
        self.shard()
        manifest = self.export_and_compile()
        for name, data in self.checkpoint.aux_files.items():
            (self.staging.path / name).write_bytes(data)
        golden = self.verify(manifest)
        with self.clock.stage("publish", str(self.staging.target)):
            sealed = self.staging.seal(
                manifest.model_copy(update={"golden": golden}), self.clock.reporter.progress
            )
            check_linked(self.linked, sealed)
        return sealed

    def shard(self) -> None:
        plan, expected, part = self.plan, self.expected, self.reuse.archives
        size = sum(plan.file_bytes.values())
        with self.clock.stage("shard", f"{size / 1e6:.1f} MB") as stage:
            if part is not None and self.link(part, expected.archives):
                stage.note = part.note()
                return
            identity = archive_identity(expected, None)
            if plan.settings.weights == "dummy":
                stage.note = "dummy weights"
                write_dummy_archives(
                    plan.config, plan.plan, identity=identity, out_dir=self.staging.path
                )
                return
            write_archives(
                self.checkpoint,
                plan.plan,
                identity=identity,
                out_dir=self.staging.path,
                progress=self.clock.reporter.progress,
            )

    def export_and_compile(self) -> Manifest:
        """The module and, where asked for, its source and the compiler's phases."""
        plan, dev, part = self.plan, self.dev, self.reuse.module
        may_skip = part is not None and not plan.settings.forced.export
        source = (dev or self.staging.path) / MLIR_NAME
        with self.clock.stage("export", ", ".join(e.name for e in self.expected.entry_points)) as s:
            if part is not None and may_skip and (dev is None or self.find_source(part, source)):
                key = part.module_key
                s.note = part.note()
            else:
                key = self.write_source(source)
        manifest = self.expected.model_copy(update={"module_key": key})
        if dev is not None:  # before the compiler runs: what a failure is reproduced with
            script = dev / SCRIPT_NAME
            script.write_text(shell_script(MLIR_NAME, manifest.module, plan.flags))
            script.chmod(0o755)
        with self.clock.stage("compile", plan.target.name) as stage:
            part = self.module_of(key)
            if part is not None and self.link(part, (manifest.module,)):
                stage.note = part.note()
            else:
                if not source.exists():  # the cached module was pruned since it was found
                    self.write_source(source)
                result = run_compiler(source, self.staging.path / manifest.module, plan.flags)
                stage.compiler_peak_bytes = result.peak_memory_bytes
        if dev is None:
            source.unlink(missing_ok=True)
        elif plan.settings.save_intermediates:
            # A run of its own: dumping leaves traces in the module, which would then have another
            # digest than compile-command.sh gives.
            with self.clock.stage("dump", "phases, executable sources and benchmarks") as stage:
                scrap = dev / manifest.module
                result = run_compiler(source, scrap, (*plan.flags, *_dump_flags(dev)))
                stage.compiler_peak_bytes = result.peak_memory_bytes
                scrap.unlink()
        return manifest

    def write_source(self, source: Path) -> str:
        """Export the MLIR; returns the module's key."""
        # Imported here: tracing machinery takes seconds to load, and reuse does without.
        with signals_held_back():
            from shark_llm.export.compose import export_module

        plan = self.plan
        exported = export_module(
            plan.config,
            plan.plan,
            plan.settings.tp,
            plan.export,
            plan.target.attention_form,
            plan.target.linear_form,
        )
        assert exported.entry_points == self.expected.entry_points
        assert exported.softmax_sums == self.expected.softmax_sums
        assert exported.caches == self.expected.caches
        source.write_text(exported.mlir)
        return _module_key(exported.mlir, plan.flags)

    def link(self, part: Part, names: tuple[str, ...]) -> bool:
        """Take files of `part`; False when they have gone since they were found."""
        if not link_files(part, self.staging, names):
            return False
        self.linked |= {name: part.files[name] for name in names}
        return True

    def module_of(self, key: str) -> Part | None:
        """A module of that MLIR, flags and compiler, whoever exported it."""
        old = self.reuse.old
        if self.plan.settings.forced.compile:
            return None
        if self.reuse.module is not None and self.reuse.module.module_key == key:
            return self.reuse.module
        if old is not None and old.manifest.module_key == key:
            return old_part(old, (old.manifest.module,))
        return None

    def find_source(self, part: Part, source: Path) -> bool:
        """Copy the module's MLIR from the dev artifacts that are there, if it is intact."""
        dev_dir = self.plan.dev_dir
        assert dev_dir is not None
        try:
            mlir = (dev_dir / MLIR_NAME).read_text()
        except (OSError, ValueError):
            return False
        if _module_key(mlir, self.plan.flags) != part.module_key:
            return False
        source.write_text(mlir)
        return True

    def verify(self, manifest: Manifest) -> GoldenReport | None:
        plan, staging = self.plan, self.staging
        with self.clock.stage("verify", "compiled module against the eager model") as stage:
            if not plan.settings.verify:
                stage.note = "skipped: --no-verify"
                return None
            if why := no_golden(plan, manifest):
                stage.note = f"skipped: {why}"
                return None
            made = manifest.model_copy(update={"files": _sizes(staging.path)})
            report = run_golden(
                Bundle(path=staging.path, manifest=made),
                plan.config,
                read_parameters(
                    self.checkpoint,
                    TORCH_DTYPES[manifest.dtype],
                    quantized=manifest.weights_dtype is not None,
                ),
                form=plan.target.linear_form,
            )
            stage.note = f"largest error {report.max_abs_error:.2g}"
            return report


def no_golden(plan: BuildPlan, manifest: Manifest) -> str | None:
    """Why the golden check of this build cannot run here; None: it can."""
    return why_not_here(manifest, sum(plan.file_bytes.values()))


def _module_key(mlir: str, flags: tuple[str, ...]) -> str:
    compiler = importlib.metadata.version("iree-base-compiler")
    digest = hashlib.sha256(json.dumps([compiler, *flags]).encode())
    digest.update(mlir.encode())
    return digest.hexdigest()


def _dump_flags(dev: Path) -> tuple[str, ...]:
    return (
        f"--dump-compilation-phases-to={dev / 'phases'}",
        f"--iree-hal-dump-executable-sources-to={dev / 'executable-sources'}",
        f"--iree-hal-dump-executable-benchmarks-to={dev / 'executable-benchmarks'}",
    )


def _sizes(directory: Path) -> dict[str, FileInfo]:
    """Of the files of a bundle that has no digests yet."""
    return {
        path.name: FileInfo(size=path.stat().st_size, sha256="")
        for path in directory.iterdir()
        if path.is_file()
    }
